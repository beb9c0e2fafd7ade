"""Random steps, windows and episodes of an archive, a checkpoint or a share, read as they are
drawn.

Only the chunks that cover a batch are read, together, and kept as far as the cache goes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from archive.arrays import Ints, Mask
from archive.base import ClosedError, UsageError, forking
from archive.fields import Ragged, mapped
from archive.read import Episodes, Gather, GatherStats
from archive.torch import units
from archive.torch.batches import Padded, as_kind, tensors
from archive.torch.datasets import Feed
from archive.torch.strategies import Draw, Prioritized, Strategy, Uniform, WithoutReplacement, as_numpy

FORMAT = 1
COLLATE = ("dict", "tensordict", "padded")
_BYTES_AT_ONCE = 8 * 1024 * 1024
_HEAD_START_S = 0.5  # for the first batch
_LOOKED_AT = 1 << 18  # steps at most, to say how much is local


class Sampler:
    """Batches of random units of some episodes: an endless iterator, and `sample(n)`.

    source: Episodes, an archive, a checkpoint, or a share (or one buffer of it) of a plan.
    fields, missing: as in Episodes.read.  unit: "step", "window" (of `length` steps of one episode), "episode", or
    "group": all episodes of one key, never a part of them; `batch_size` counts units.
    group: what that key is: "metadata.prompt", "attributes.NAME", a column of the episodes' table, a function of an
    episode, or one key an episode.  group_size: only groups of at least so many episodes. `group_keys[i]` is the key of
    index i, and "_index" has that of each episode of a batch.
    strategy: "uniform" (no unit twice in a batch, unless `replace`), "without_replacement" (each once, then all again),
    "prioritized" (proportional to priority ** alpha, with importance weights), or a function of the number of units
    that gives an object with the methods of strategies.Strategy.
    priorities: a column's name, "label.KEY" (0 for episodes without it), or an array of one a step (or one a unit).
    recency: only this many of the newest steps (episodes or groups, if those are drawn).  update_count,
    model_weights_uuid: as in Episodes.filter.  staleness: only episodes with steps at most so many updates older than
    the newest. Of groups all episodes must meet these. generator: draws; its state is saved with the sampler's. A
    share's is seeded by the plan if none is given. prefetch: batches that are drawn and fetched ahead.  fill: bring
    everything into the cache in the background; the default does so for shares.  cache_bytes, disk_cache,
    max_ahead_bytes: as in Gather. collate: "dict", "tensordict", "padded" or a Padded; the steps of whole episodes are
    Ragged, in a TensorDict jagged. index: add "_index", which names the units (default: of groups, and if prioritized,
    as "_weight" is).

    Threads may share it: one batch is made after the other.
    """

    def __init__(
        self, source: Any, fields: Any = None, *, batch_size: int = 256, unit: str = "step", length: int | None = None,
        strategy: str | Callable[[int], Strategy] = "uniform", replace: bool = False, priorities: Any = None,
        alpha: float = 0.6, beta: float = 0.4, recency: int | None = None, update_count: Any = None,
        staleness: int | None = None, model_weights_uuid: Any = None, generator: torch.Generator | None = None,
        prefetch: int = 0, fill: bool | None = None, cache_bytes: int = 2**30, disk_cache: Any = None,
        max_ahead_bytes: int = 2**26, missing: Any = "error", device: Any = None, collate: Any = "dict",
        index: bool | None = None, buffer: str | None = None, group: Any = None, group_size: int | None = None,
    ) -> None:  # fmt: skip
        _check(unit, length, collate, prefetch, batch_size)
        if (unit == "group") != (group is not None):
            raise UsageError(
                f"unit={unit!r} with group={group!r}: unit='group' needs group=, such as 'metadata.prompt'"
            )
        if group_size is not None and (unit != "group" or group_size < 1):
            raise UsageError(f"group_size={group_size} is for unit='group', and at least 1")
        self.batch_size = batch_size
        self.unit = unit
        self.length = length or 1
        self._feed = Feed(source, buffer)
        self.episodes: Episodes = self._feed.episodes
        self.generator = torch.Generator() if generator is None else generator
        if generator is None:
            if self._feed.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(self._feed.seed)
        self._gather = Gather(
            self.episodes,
            fields,
            missing=missing,
            cache_bytes=cache_bytes,
            disk_cache=disk_cache,
            max_ahead_bytes=max_ahead_bytes,
        )
        kept = units.chosen(
            self.episodes, update_count=update_count, staleness=staleness, model_weights_uuid=model_weights_uuid
        )
        self.group_keys: list[Any] = []
        self._units = self._made_units(kept, recency, group, group_size or 1)
        if priorities is not None and strategy != "prioritized":
            raise UsageError("priorities are for strategy='prioritized'; pass that too, or leave them out")
        if strategy == "prioritized":
            self.strategy: Strategy = Prioritized(self._priorities(priorities), alpha=alpha, beta=beta)
        else:
            self.strategy = _strategy_of(strategy, self._units.count, replace)
        prioritized = isinstance(self.strategy, Prioritized)
        self._indexed = prioritized or unit == "group" if index is None else index
        self._device = device
        self._collate = collate
        self._prefetch = prefetch
        self._drawn: deque[Draw] = deque()
        self._closed = False
        self._turn = forking.lock(self, "_turn")
        self._filling = _Loading(self._gather, self._units.episodes)
        if self._feed.is_share if fill is None else fill:
            self._filling.start()

    def _made_units(
        self, kept: Mask, recency: int | None, group: Any, group_size: int
    ) -> units.StepUnits | units.EpisodeUnits:
        lengths = self._gather.lengths
        if self.unit not in units.WHOLE:
            begin = np.zeros(len(lengths), np.int64)
            if recency is not None:
                kept, begin = units.newest_steps(self.episodes, lengths, kept, recency)
            return units.StepUnits(self.unit, lengths, kept, begin, self.length)
        codes = np.arange(len(lengths))
        if self.unit == "group":
            self.group_keys, codes = units.grouped(self.episodes, group)
        if recency is not None:
            kept = units.of_newest_groups(self.episodes, kept, recency, codes)
        return units.EpisodeUnits(
            self.unit, lengths, codes, kept if self.unit == "group" else kept & (lengths > 0), group_size
        )

    def _priorities(self, given: Any) -> Any:
        """One priority for each unit, from a column, a label, an array of one a step, or of one a unit."""
        if given is None:
            raise UsageError("strategy='prioritized' needs priorities=: a column's name, or an array of one a step")
        if not isinstance(given, str):
            values = as_numpy(given)
        elif given.startswith(units.LABEL):
            values = np.repeat(units.labelled(self.episodes, given), self._gather.lengths)
        else:
            values = self._feed.column(given)
        if len(values) == self._gather.steps:
            return self._units.of_steps(values)
        if len(values) != self._units.count:
            raise UsageError(
                f"{len(values)} priorities were given; these episodes have {self._gather.steps} steps, and "
                f"{self._units.count} {self.unit}s can be drawn"
            )
        return values

    def __len__(self) -> int:
        """The number of units that can be drawn."""
        return self._units.count

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.sample()

    def sample(self, batch_size: int | None = None) -> Any:
        """The next batch, of `batch_size` units if it is given (what was drawn ahead comes afterwards then)."""
        size = self.batch_size if batch_size is None else batch_size
        with self._turn, self._filling:
            if self._closed:
                raise _closed()
            draw = self._next(size) if self._drawn else self.strategy.draw(size, self.generator)
            try:
                batch = self._read(draw)
                while len(self._drawn) < self._prefetch:
                    self._draw_ahead()
            except BaseException:
                self._drawn.appendleft(draw)  # so that trying again skips nothing
                raise
        return batch

    def _next(self, size: int) -> Draw:
        """The draw that was made ahead for such a batch, or a new one."""
        ahead = next((draw for draw in self._drawn if len(draw.places) == size), None)
        if ahead is None:
            return self.strategy.draw(size, self.generator)
        self._drawn = deque(draw for draw in self._drawn if draw is not ahead)
        return ahead

    def _draw_ahead(self) -> None:
        draw = self.strategy.draw(self.batch_size, self.generator)
        self._drawn.append(draw)
        numbers, steps = self._units.locate(draw.places.numpy())
        if self.unit in units.WHOLE:
            self._gather.prefetch(*self._gather.every_step(numbers))
        else:
            self._gather.prefetch(numbers, steps, self.length)

    def _read(self, draw: Draw) -> Any:
        places = draw.places.numpy()
        numbers, steps = self._units.locate(places)
        if self.unit in units.WHOLE:
            batch = self._gather.whole(numbers)
        elif self.unit == "window":
            batch = self._gather.windows(numbers, steps, self.length)
        else:
            batch = self._gather.rows(numbers, steps)
        out: dict[str, Any] = tensors(self._feed.renumbered(batch, numbers) if self._feed.is_share else batch)
        if self._indexed:
            out["_index"] = torch.from_numpy(self._units.index(places))
            if draw.weights is not None:
                out["_weight"] = self._units.each(draw.weights, places)
        if self._device is not None:
            out = mapped(out, lambda leaf: _on_device(leaf, self._device))
        return out if self._collate == "dict" else as_kind(out, len(numbers), self._collate)

    def update_priorities(self, index: Any, priorities: Any) -> None:
        """Set priorities of units, by the "_index" of the batches that they came in. Batches drawn ahead stay. A group
        gets the greatest of its episodes'."""
        if not isinstance(self.strategy, Prioritized):
            raise UsageError("only a sampler with strategy='prioritized' has priorities to update")
        places = self._units.places(as_numpy(index).astype(np.int64).reshape(-1))
        if self.unit == "group" and len(places):
            order = np.argsort(as_numpy(priorities), kind="stable")  # of a place named twice the last counts
            places, priorities = places[order], as_numpy(priorities)[order]
        with self._turn:
            self.strategy.update(places, priorities)

    @property
    def ready(self) -> float:
        """The part of the bytes of what can be drawn that is local, in memory or in the disk cache: 0 to 1."""
        return 0.0 if self._closed else self._filling.ready

    def fill(self, timeout_s: float | None = None) -> bool:
        """Bring everything into the cache, and wait for it; True if that ended in time. Errors surface here."""
        if self._closed:
            raise _closed()
        self._filling.start()
        return self._filling.join(timeout_s)

    @property
    def io_stats(self) -> GatherStats:
        """Counts of the last batch, and of all together, with what was fetched in the background."""
        return self._gather.io_stats

    def state_dict(self) -> dict[str, Any]:
        """The sampler's place: its generator, its strategy, and what was drawn ahead; a tree that checkpoints take."""
        with self._turn:
            ahead = [{"places": d.places, "weights": d.weights} for d in self._drawn]
            return {
                "format": FORMAT,
                "count": len(self),
                "unit": self.unit,
                "generator": self.generator.get_state(),
                "by": type(self.strategy).__name__,
                "strategy": self.strategy.state_dict(),
                "ahead": ahead,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken: the next batches are the same, over the same episodes."""
        if state.get("format") != FORMAT:
            raise UsageError(f"this is no state of a sampler (its format is {state.get('format')!r}, not {FORMAT})")
        if (state["count"], state["unit"]) != (len(self), self.unit):
            raise UsageError(
                f"the state is of a sampler of {state['count']} {state['unit']}s; this one has {len(self)} "
                f"{self.unit}s: restore it over the same episodes, or begin anew with a seed of its own"
            )
        if state["by"] != type(self.strategy).__name__:
            raise UsageError(
                f"the state is of a sampler with strategy {state['by']}; this one has {type(self.strategy).__name__}: "
                "make it with the same, or begin anew"
            )
        with self._turn:
            self.strategy.load_state_dict(state["strategy"])
            self.generator.set_state(torch.as_tensor(state["generator"], dtype=torch.uint8))
            self._drawn = deque(Draw(_tensor(d["places"]), _tensor(d["weights"])) for d in state["ahead"])

    def close(self) -> None:
        """Stop background work; an error that has not surfaced yet does."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self._filling.stop()
            with contextlib.ExitStack() as stack:
                stack.callback(self._gather.close)
                stack.enter_context(self._filling)

    def __getstate__(self) -> Any:
        raise UsageError("a sampler draws in one process and does not pickle; its state_dict() does")

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Sampler of {len(self)} {self.unit}s of {len(self.episodes)} episodes, {self.ready:.0%} local>"


def _raised() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


class _Loading:
    """A thread that loads some episodes step by step, in bounded bytes, and stands aside while a batch is fetched.

    It ends when all is local, or when the memory is full and there is no disk cache: more would push out what is held.
    """

    def __init__(self, gather: Gather, episodes: Ints) -> None:
        self._gather = gather
        self._numbers, self._steps = gather.every_step(episodes)
        self._stopped = forking.own(self, "_stopped", threading.Event)
        self._clear = forking.own(self, "_clear", _raised)
        self._begun = forking.own(self, "_begun", threading.Event)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = forking.own(self, "_thread", lambda: None)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="archive-filling", daemon=True)
            self._thread.start()

    def __enter__(self) -> None:
        """While a batch is fetched, nothing more is begun here. Raises what failed in the background, once."""
        error, self._error = self._error, None
        if error is not None:
            self._thread = None  # starting again tries again
            raise error
        self._clear.clear()

    def __exit__(self, *_: object) -> None:
        self._clear.set()
        self._begun.set()

    @property
    def ready(self) -> float:
        """The part of the bytes that is in memory or in the disk cache, from 0 to 1."""
        count = len(self._numbers)
        if not count:
            return 1.0
        some = slice(None) if count <= _LOOKED_AT else np.linspace(0, count - 1, _LOOKED_AT).astype(np.int64)
        return self._gather.local(self._numbers[some], self._steps[some])

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it ends; whether it did. Raises what failed."""
        self._begun.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self:
            return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()
        self._clear.set()
        self._begun.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._begun.wait(_HEAD_START_S)
        try:
            start = 0
            while start < len(self._numbers):
                self._clear.wait()
                if not self._wanted() or (self._gather.full and self._gather.disk_cache is None):
                    return
                stop = start + max(1, _BYTES_AT_ONCE // self._gather.step_bytes)
                self._gather.load(self._numbers[start:stop], self._steps[start:stop], wanted=self._wanted)
                start = stop
        except BaseException as e:
            self._error = e

    def _wanted(self) -> bool:
        return not self._stopped.is_set()


# -- options -----------------------------------------------------------------------------------------------------------


def _check(unit: str, length: int | None, collate: Any, prefetch: int, batch_size: int) -> None:
    """UsageError for options that are unknown, or do not go together."""
    if unit not in units.KINDS:
        raise UsageError(f"unit={unit!r}: give one of {', '.join(units.KINDS)}")
    if (unit == "window") != (length is not None) or (length is not None and length < 1):
        raise UsageError(
            f"length={length} with unit={unit!r}: windows need a length of at least 1, and nothing else has one"
        )
    if not isinstance(collate, Padded) and collate not in COLLATE:
        raise UsageError(f"collate={collate!r}: give one of {', '.join(COLLATE)}, or a Padded")
    if prefetch < 0 or batch_size < 1:
        raise UsageError(f"prefetch={prefetch} must be 0 or more, and batch_size={batch_size} at least 1")


def _strategy_of(given: Any, count: int, replace: bool) -> Strategy:
    """The strategy of a name, or of a function of the number of units."""
    if given == "uniform":
        return Uniform(count, replace=replace)
    if given == "without_replacement":
        return WithoutReplacement(count)
    if isinstance(given, str) or not callable(given):
        raise UsageError(
            f"strategy={given!r}: give 'uniform', 'without_replacement', 'prioritized', or a function of a count"
        )
    made: Strategy = given(count)
    return made


def _closed() -> ClosedError:
    return ClosedError("this sampler was closed; make another")


def _on_device(leaf: Any, device: Any) -> Any:
    if isinstance(leaf, Ragged):
        return Ragged(*(_on_device(part, device) for part in leaf))
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf


def _tensor(value: Any) -> Any:
    return None if value is None else torch.as_tensor(value)

"""Batches from several sources in exact proportions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from archive.base import DeadlineError, FieldError, UsageError, Wait
from archive.fields import Ragged, flatten, to_tensors, unflatten
from archive.torch.batches import as_kind, check_kind, collate, concatenated
from archive.torch.loaders import Loader
from archive.torch.streams import StreamDataset

FORMAT = 1
_POLL_S = 0.05


class Mix:
    """An endless iterator of batches with a part from each source. Made by `mix(...)`."""

    def __init__(
        self, sources: Mapping[str, Any], ratios: Mapping[str, Fraction], batch_size: int, kind: str, tag: str | None
    ) -> None:
        self.batch_size = batch_size
        self.ratios = dict(ratios)
        self.batches = 0
        self.counts: dict[str, int] = {}  # of the batch given last
        self._sources = dict(sources)
        self._walks: dict[str, Iterator[Any]] = {}  # of the loaders among them, epoch after epoch
        self._kind = kind
        self._tag = tag
        self._owed = dict.fromkeys(ratios, Fraction(0))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        owed, counts = _shares(self.ratios, self._owed, self.batch_size)
        parts = {name: self._draw(name, n) for name, n in counts.items() if n}
        whole = concatenated(list(parts.values()), list(parts))
        if self._tag is not None:
            if self._tag in whole:
                raise FieldError(f"the steps have a field {self._tag!r} already; give the tag another name")
            numbers = torch.arange(len(counts))
            whole[self._tag] = torch.repeat_interleave(numbers, torch.tensor(list(counts.values())))
        self._owed = owed
        self.counts = counts
        self.batches += 1
        return as_kind(whole, self.batch_size, self._kind)

    def _draw(self, name: str, count: int) -> dict[str, Any]:
        """The next items of a source, as one nest of tensors."""
        source = self._sources[name]
        if isinstance(source, StreamDataset):
            return concatenated([collate(items) for items in source.take(count)])  # type: ignore[no-any-return]
        if not isinstance(source, Loader):
            return _checked(name, source.sample(count), count)
        if source.batch_size != count:
            raise UsageError(
                f"source {name!r} is a loader of batches of {source.batch_size} items and its part of a batch is "
                f"{count}; give the loader that size, and ratios that part the batch evenly"
            )
        for _ in range(2):
            for batch in self._walks.get(name, ()):
                return _checked(name, batch, count)
            self._walks[name] = iter(source)
        raise UsageError(f"source {name!r} has no batch of {count} items in an epoch")

    def state_dict(self) -> dict[str, Any]:
        """The place of the mix and of each of its sources that have one."""
        sources = {n: s.state_dict() for n, s in self._sources.items() if hasattr(s, "state_dict")}
        owed = {name: [value.numerator, value.denominator] for name, value in self._owed.items()}
        return {"format": FORMAT, "batches": self.batches, "owed": owed, "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; the sources must be those of the same names."""
        if state.get("format") != FORMAT:
            raise UsageError(f"this is no state of a mix (its format is {state.get('format')!r}, not {FORMAT})")
        if set(state["owed"]) != set(self._sources):
            raise UsageError(
                f"the state is of a mix of {sorted(state['owed'])}; this one is of {sorted(self._sources)}"
            )
        for name, inner in state["sources"].items():
            self._sources[name].load_state_dict(inner)
        self._walks.clear()
        self._owed = {name: Fraction(*pair) for name, pair in state["owed"].items()}
        self.batches = state["batches"]


def mix(
    sources: Mapping[str, Any],
    ratios: Mapping[str, float] | Sequence[float] | str | None = None,
    *,
    batch_size: int,
    collate: str = "dict",
    tag: str | None = None,
    shuffle: str | bool | None = "blocks",
    seed: int = 0,
    min_sizes: Mapping[str, int] | None = None,
    timeout_s: float | None = None,
) -> Mix:
    """Batches of `batch_size` items, with the ratio of each source; later batches make up for remainders, so that the
    counts are exact in the long run and never off by more than one.

    sources: name -> a sampler or replay buffer (with `sample(n)`), a dataset or stream of items (endless, epoch after
    epoch), or a loader of batches (of the size that its ratio comes to); None is left out.
    ratios: name -> part, or in the order of the sources; default equal parts, "size" as the numbers of items are.
    tag: name of a field that says of each item which source it is from, by number.
    shuffle, seed: of datasets that are no streams.  min_sizes: name -> how much a source must hold (its
    `is_ready(size)`) before the first batch; waits for it, at most `timeout_s`.
    """
    given = {name: source for name, source in sources.items() if source is not None}
    if not given or batch_size < 1:
        raise UsageError(f"a mix needs at least one source and a batch_size of at least 1, not {batch_size}")
    _wait(given, min_sizes or {}, timeout_s)
    inner = {name: _endless(name, one, shuffle, seed) for name, one in given.items()}
    return Mix(inner, _parts(given, sources, ratios), batch_size, check_kind(collate), tag)


def _endless(name: str, given: Any, shuffle: str | bool | None, seed: int) -> Any:
    """An endless source: a dataset as a stream, all else as it is."""
    if isinstance(given, (Loader, StreamDataset)) or hasattr(given, "sample"):
        return given
    if not hasattr(given, "__getitem__") or not hasattr(given, "__len__") or hasattr(given, "filter"):
        raise UsageError(
            f"source {name!r} is a {type(given).__name__}; give a sampler, a dataset, a stream or a loader: of "
            "episodes, say, StepDataset(episodes)"
        )
    return StreamDataset(given, shuffle=shuffle, seed=seed)


def _parts(
    given: Mapping[str, Any], sources: Mapping[str, Any], ratios: Mapping[str, float] | Sequence[float] | str | None
) -> dict[str, Fraction]:
    """The part of each source that is there; together 1."""
    if isinstance(ratios, str):
        if ratios != "size":
            raise UsageError(f"ratios={ratios!r}: give numbers, 'size', or nothing for equal parts")
        ratios = {name: len(source) for name, source in given.items()}
    elif ratios is None:
        ratios = dict.fromkeys(given, 1)
    elif not isinstance(ratios, Mapping):
        ratios = dict(zip(sources, ratios, strict=True)) if len(ratios) == len(sources) else {}
    if set(ratios) != set(sources) and set(ratios) != set(given):
        raise UsageError(f"ratios={ratios!r}: give one for each of {', '.join(sources)}")
    try:
        found = {name: Fraction(str(ratios[name])).limit_denominator(10**6) for name in given}
    except ValueError as e:
        raise UsageError(f"ratios={ratios!r}: each must be a finite number") from e
    if min(found.values()) < 0 or not sum(found.values()):
        raise UsageError(f"ratios={ratios!r}: none may be negative, and not all 0")
    return {name: value / sum(found.values()) for name, value in found.items()}


def _shares(
    ratios: Mapping[str, Fraction], owed: Mapping[str, Fraction], size: int
) -> tuple[dict[str, Fraction], dict[str, int]]:
    """The items that each source is owed after a batch, and the number that it gives: the largest remainders are paid
    first."""
    due = {name: owed[name] + ratio * size for name, ratio in ratios.items()}
    counts = {name: max(0, int(value)) for name, value in due.items()}
    by_need = sorted(due, key=lambda n: (counts[n] - due[n], -ratios[n]))
    spare = size - sum(counts.values())
    for name in by_need[: max(0, spare)]:
        counts[name] += 1
    for name in [n for n in reversed(by_need) if counts[n]][: max(0, -spare)]:
        counts[name] -= 1
    return {name: due[name] - counts[name] for name in due}, counts


def _wait(sources: Mapping[str, Any], min_sizes: Mapping[str, int], timeout_s: float | None) -> None:
    wait = Wait(timeout_s, _POLL_S)
    for name, size in min_sizes.items():
        if not hasattr(sources.get(name), "is_ready"):
            raise UsageError(f"min_sizes names {name!r}, which is no source that tells by is_ready(size) what it holds")
        while not sources[name].is_ready(size):
            if wait.over:
                raise DeadlineError(
                    f"source {name!r} did not hold {size} within {timeout_s} s; fill it, or wait longer"
                )
            wait.pause()


def _checked(name: str, batch: Any, count: int) -> dict[str, Any]:
    """A batch, a TensorDict say, as a nest of tensors; refused if it holds another number of items."""
    leaves = {path: to_tensors(leaf) for path, leaf in flatten(batch)}
    found = {_length(leaf) for leaf in leaves.values() if leaf is not None and not isinstance(leaf, dict)}
    if found != {count}:
        raise UsageError(
            f"source {name!r} gave {sorted(found)} items instead of {count}; it holds too few, or drop_last="
        )
    return unflatten(leaves)


def _length(leaf: Any) -> int:
    return len(leaf.lengths if isinstance(leaf, Ragged) else leaf)

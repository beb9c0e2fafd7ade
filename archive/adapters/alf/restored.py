"""A share of a checkpoint as the tensors of an ALF replay buffer: a live one, or one like those that were saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from archive.adapters import UNFINISHED, Report, check_option
from archive.adapters.alf.tensors import (
    DEFAULT_RETURN,
    DISC_0,
    FIRST,
    HEADLESS,
    INDEX,
    LAST,
    MARKED,
    MAXIMA,
    POS,
    PRIORITY,
    RETURN,
    RETURNS,
    SIZE,
    SUMS,
    Heads,
    Table,
    Tensors,
    Track,
    grown,
    indices,
    marks,
    name_of,
    no_rewrites,
    path_by_key,
    tensors_of,
)
from archive.arrays import Ints, ascending
from archive.base import FieldError, UsageError, cached_property, logger
from archive.fields import Path, flatten
from archive.torch import ring


@dataclass(frozen=True)
class Target:
    """The buffer that is to hold the share."""

    num_envs: int
    max_length: int
    episodic: bool = False  # it keeps ALF's episode indices
    returns: bool = False
    prioritized: bool = False
    default_return: float = DEFAULT_RETURN
    initial_priority: float = 1.0
    ignored_frames: int = 0  # earliest steps of each row that are never sampled
    device: Any = None
    kinds: Mapping[Path, tuple[torch.dtype, tuple[int, ...]]] | None = None  # dtype and shape of each field


def target_of(rb: Any) -> Target:
    """The target that a live buffer is."""
    tensors = tensors_of(rb)
    return Target(
        tensors.num_envs,
        tensors.max_length,
        episodic=INDEX in tensors.named,
        returns=RETURNS in tensors.named,
        prioritized=SUMS in tensors.named,
        default_return=float(getattr(rb, "_default_return", DEFAULT_RETURN)),
        initial_priority=float(getattr(rb, "_initial_priority", 1.0)),
        ignored_frames=int(getattr(rb, "_num_earliest_frames_ignored", 0)),
        device=tensors.pos.device,
        kinds={path: (leaf.dtype, tuple(leaf.shape[2:])) for path, leaf in tensors.fields.items()},
    )


def target_saved(states: Sequence[Mapping[str, Any]], num_envs: int | None, max_length: int | None) -> Target:
    """A buffer like those that were saved, of a size of its own where one is given."""
    if not states:
        raise UsageError("ALF did not save this checkpoint, so what its ring keeps is not known; restore a live buffer")
    return Target(
        num_envs or max(s["num_envs"] for s in states),
        max_length or max(s["max_length"] for s in states),
        episodic=all(s["episodic"] for s in states),
        returns=all(s["returns"] for s in states),
        prioritized=all(s["prioritized"] for s in states),
        default_return=states[0].get("default_return", DEFAULT_RETURN),
        ignored_frames=int(states[0].get("num_earliest_frames_ignored") or 0),
    )


def check_kinds(fields: Mapping[Path, Any], target: Target) -> None:
    """Refuse fields of other names, dtypes or shapes than the target has."""
    if target.kinds is None:
        return
    if odd := min(fields.keys() ^ target.kinds.keys(), key="/".join, default=None):
        raise FieldError(f"field {'/'.join(odd)!r} is only in {'the share' if odd in fields else 'the buffer'}")
    for path, leaf in fields.items():
        dtype, shape = target.kinds[path]
        if not isinstance(leaf, torch.Tensor) or (leaf.dtype, tuple(leaf.shape[2:])) != (dtype, shape):
            raise FieldError(
                f"field {'/'.join(path)!r} is {leaf.dtype} {list(leaf.shape[2:])} in the share, {dtype} {list(shape)} "
                "in the buffer; make the buffer with the data spec that was saved"
            )


@dataclass(frozen=True)
class Rebuilt:
    """The tensors, and what ALF keeps outside of them."""

    named: dict[str, torch.Tensor]
    mini_batch_length: int
    nnz: int
    track: Track
    report: Report


def rebuild(part: Any, target: Target, unfinished: str, states: Mapping[int, Any] | None = None) -> Rebuilt:
    """A share's buffer for that target. Nothing is touched; a share that does not fit is refused.

    states: those that ALF's adapter saved, by source rank.
    """
    check_option("unfinished", unfinished, UNFINISHED)
    planned = part.rules.unfinished
    if unfinished == "continue" and planned != "continue":
        raise UsageError(
            f"unfinished='continue', but the plan ends open episodes (unfinished={planned!r}): "
            "resharding.plan(..., unfinished='continue')"
        )
    filled = ring.fill(
        part, num_envs=target.num_envs, max_length=target.max_length, unfinished=unfinished, device=target.device
    )
    return _Restoring(part, target, filled, unfinished, states or {}).rebuilt()


class _Restoring:
    """One restore: what was filled, and where it is other than what the archive has."""

    def __init__(
        self, part: Any, target: Target, filled: ring.Filled, unfinished: str, states: Mapping[int, Any]
    ) -> None:
        self.part = part
        self.target = target
        self.filled = filled
        self.unfinished = unfinished
        self.fields: dict[Path, torch.Tensor] = dict(flatten(filled.buffers)) if filled.buffers else {}
        self.notes: list[str] = []
        self.counts: dict[str, int] = {}
        size = (target.num_envs, target.max_length)
        state = states.get(part.rank) if states and part.plan.is_identity else None
        self.exact: Any = state if state and (state["num_envs"], state["max_length"]) == size else None
        self.sources = [self.exact] if self.exact else list(states.values())  # the one to go on from, or all

    @cached_property
    def step_type(self) -> torch.Tensor:
        path = path_by_key(self.fields, "step_type")
        if path is None:
            raise FieldError(f"the share has no field 'step_type'; it has: {', '.join(map('/'.join, self.fields))}")
        return self.fields[path]

    def kept(self, name: str, made: torch.Tensor) -> torch.Tensor:
        """A tensor as the state has it, where nothing has moved; else the one that was made."""
        saved = self.exact and self.exact[name]
        return made if saved is None else torch.from_numpy(saved.copy()).to(made.device)

    def rebuilt(self) -> Rebuilt:
        """Everything that the buffer takes."""
        filled, target = self.filled, self.target
        steps = int(filled.size.sum())
        if steps:
            check_kinds(self.fields, target)
            starts, rewritten = self._mark()
        else:
            starts, rewritten = torch.zeros_like(filled.cut), no_rewrites()
        pos = self.kept("current_pos", filled.pos).to(filled.pos.dtype)
        named = {POS: pos, SIZE: filled.size, **{name_of(path): tensor for path, tensor in self.fields.items()}}
        if target.episodic:
            named |= self._indices(starts, pos)
        if target.returns:
            named[RETURNS] = self._returns()
        length = max([int(s.get("mini_batch_length") or 1) for s in self.sources], default=1)
        length, nnz = self._grow(named, length) if target.prioritized else (length, 0)
        return Rebuilt(named, length, nnz, self._track(named, rewritten), self._report(steps))

    # -- steps -----------------------------------------------------------------------------------------------------

    def _mark(self) -> tuple[torch.Tensor, Table]:
        """Step types as the buffer must have them: (steps that begin an episode, all that differ from the archive)."""
        before = self.step_type.clone()
        if self.exact:
            self._put(self.exact["rewritten"])
        else:
            self._renumber()
            self._rehead()
        starts = (self.step_type == FIRST) & self.filled.live
        if self.exact and (single := self.exact.get("single")) is not None:
            starts[tuple(torch.from_numpy(single.copy()).to(starts.device).T)] = True
        ends = self.filled.cut if self.exact else self._ends()
        self.counts["closed"] = int((ends & (self.step_type != LAST)).sum())
        self.step_type[ends] = LAST
        env, slot = torch.nonzero(self.step_type != before, as_tuple=True)
        position = self._position(env, slot)
        return starts, torch.stack([env, position, self.step_type[env, slot].long()], 1).cpu().numpy()

    def _position(self, env: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        last, length = self.filled.pos[env] - 1, self.target.max_length
        return last - (last - slot) % length

    def _put(self, rewritten: Table) -> None:
        env, position, kind = (torch.from_numpy(c.copy()).to(self.step_type.device) for c in rewritten.T)
        self.step_type[env, position % self.target.max_length] = kind.to(self.step_type.dtype)

    def _renumber(self) -> None:
        """Env ids in the data are those of the row, also where the archive was written without saying which they
        are."""
        live = self.filled.live
        rows = torch.arange(len(live), device=live.device)[:, None].expand(live.shape)
        for path, leaf in self.fields.items():
            if path[-1] == "env_id" and leaf.shape == live.shape:
                leaf[live] = rows[live].to(leaf.dtype)

    def _rehead(self) -> None:
        layout = self.part.layout
        full = np.flatnonzero(layout.length > 0)
        env, position = layout.env_id[full], layout.position[full]
        inside = layout.headless[full] & np.r_[False, env[1:] == env[:-1]]
        self.counts["reheaded"] = int(inside.sum())
        self.counts["headless"] = int((layout.headless[full] & ~inside).sum())
        self._put(np.stack([env[inside], position[inside], np.full(int(inside.sum()), FIRST)], 1))

    def _ends(self) -> torch.Tensor:
        """Last steps of all episodes but those that go on."""
        layout = self.part.layout
        full = np.flatnonzero(layout.length > 0)
        env, last = layout.env_id[full], (layout.position + layout.length - 1)[full]
        ended = ~layout.open[full] if self.unfinished == "continue" else np.ones(len(full), bool)
        ends = self.filled.cut.clone()
        ends[torch.from_numpy(env[ended]), torch.from_numpy(last[ended] % self.target.max_length)] = True
        return ends

    # -- what ALF keeps about them -------------------------------------------------------------------------------------

    def _indices(self, starts: torch.Tensor, pos: torch.Tensor) -> dict[str, torch.Tensor]:
        discount = self.fields.get(path_by_key(self.fields, "discount") or ())
        zeros = torch.zeros_like(starts) if discount is None or discount.shape != starts.shape else discount == 0
        found = indices(starts, zeros, pos, self.filled.size, self._heads(pos))
        named = {INDEX: found.index, HEADLESS: self.kept("headless_indexed_pos", found.headless)}
        return named | {DISC_0: found.disc_0} if self.target.returns else named

    def _heads(self, pos: torch.Tensor) -> Heads:
        """The heads of rows. An episode whose first step is gone began too long ago for the ring, as ALF has it."""
        begin, oldest = pos - self.target.max_length - 1, pos - self.filled.size
        return Heads(self.kept("head_begin", begin), self.kept("head_value", begin), self.kept("head_disc_0", oldest))

    def _returns(self) -> torch.Tensor:
        returns = torch.full(self.filled.cut.shape, self.target.default_return, device=self.filled.cut.device)
        column = self.filled.columns.get(RETURN)
        if column is None:
            self.notes.append("the checkpoint has no episodic returns: all steps have the default one")
            return returns
        return torch.where(self.filled.live, column.to(returns), returns)

    def _grow(self, named: dict[str, torch.Tensor], mini_batch_length: int) -> tuple[int, int]:
        """Both trees; the mini batch length that goes with them, and the number of priorities that are not 0.

        ALF keeps steps at 0 at which no mini batch can begin, as their row ends too soon. Where other steps end a row
        now, the length is 1, for which none are: ALF makes those 0 that are too near to the end by then when it draws
        its first batch, and no step loses its priority before.
        """
        live, column = self.filled.live, self.filled.columns.get(PRIORITY)
        fresh = column is None
        if column is None:
            self.notes.append("the checkpoint has no priorities: all steps have the initial one")
            column = torch.full(live.shape, float(self.target.initial_priority), device=live.device)
        leaves = torch.where(live, column, torch.zeros_like(column))
        if fresh or not self.exact:
            slots = torch.arange(self.target.max_length, device=live.device)
            age = (self.filled.pos[:, None] - 1 - slots) % self.target.max_length
            leaves[live & (age >= self.filled.size[:, None] - self.target.ignored_frames)] = 0
            if bool(leaves[live & (age < mini_batch_length - 1)].any()):
                mini_batch_length = 1
        named[SUMS] = grown(leaves.flatten(), torch.add)
        named[MAXIMA] = grown(leaves.flatten(), torch.maximum)
        return mini_batch_length, int(torch.count_nonzero(leaves))

    # -- for the next save and for the user ---------------------------------------------------------------------------

    def _track(self, named: dict[str, torch.Tensor], rewritten: Table) -> Track:
        at: Ints = self.filled.pos.cpu().numpy()
        offset = self.exact["offset"].copy() if self.exact else np.zeros(len(at), np.int64)
        if not int(self.filled.size.sum()):
            return Track(offset, at, np.full((len(at), MARKED), -1, np.int64), rewritten)
        return Track(offset, at, marks(Tensors(named)), rewritten, self._closed_rows())

    def _closed_rows(self) -> list[int]:
        """Rows whose newest episode was cut here, while the plan lets it go on in the archive."""
        if self.part.rules.unfinished != "continue":
            return []
        newest = ((self.filled.pos - 1) % self.target.max_length)[:, None]
        closed: list[int] = torch.nonzero(self.filled.cut.gather(1, newest)[:, 0])[:, 0].tolist()
        return closed

    def _report(self, steps: int) -> Report:
        filled = self.filled.report
        self.counts.setdefault("headless", filled["headless"])
        empty = torch.nonzero(self.filled.size == 0)[:, 0].tolist()
        if empty:
            listed = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
            self._note(logging.WARNING, f"env rows {listed} are empty: ALF samples only once every row has steps")
        gone = self.part.dropped
        for reason, lost in self.part.plan.dropped_of(self.part.name).items():
            note = f"on all ranks together, {lost['episodes']} episodes lost {lost['steps']} steps ({reason})"
            self._note(logging.INFO, note)
        dropped = {"dropped_episodes": len(ascending(gone.stream)), "dropped_steps": int(gone.length.sum())}
        return Report(filled["episodes"], steps, self.counts | dropped | {"empty_rows": len(empty)}, tuple(self.notes))

    def _note(self, level: int, note: str) -> None:
        logger.log(level, "restoring an ALF replay buffer: %s", note)
        self.notes.append(note)

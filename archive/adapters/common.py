"""What the adapters share: finding the system, naming the buffers, the share that is meant, one checkpoint for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from archive.base import NotFoundError, UsageError, package, visible
from archive.checkpoint import MAIN_BUFFER, Checkpoint, Pending
from archive.fields import Path, Schema
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer
    from resharding import Plan, Share, ShareBuffer

EXISTING = ("error", "replace")
UNFINISHED = ("close", "continue", "drop")


@dataclass(frozen=True)
class Saved:
    """The columns, attributes and state that one buffer adds to a checkpoint."""

    columns: Mapping[str, Any] = field(default_factory=dict)  # name -> one value a live step
    attributes: Mapping[str, Any] = field(default_factory=dict)  # name -> {episode id: value}
    state: Any = None
    tick: Any = None  # the state as a journal keeps it, where that is less


@dataclass(frozen=True)
class Report:
    """The result of a restore of one buffer: what was put into it, and what became of the rest."""

    episodes: int
    steps: int
    counts: Mapping[str, int] = field(default_factory=dict)  # such as cut, reheaded, headless, dropped steps
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"{count} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((self.episodes, "episode"), (self.steps, "step"))
        ]
        parts += [f"{count} {name.replace('_', ' ')}" for name, count in self.counts.items() if count]
        return visible("; ".join([", ".join(parts), *self.notes]))


def system(module: str, install: str) -> Any:
    """A module of the adapted system, or the error that says what to install."""
    return package(module, "this adapter", install)


SAFE_TORCH = (2, 6)  # before that, a file could run code though weights_only=True was given (CVE-2025-32434)


def load_torch(file: Any) -> Any:
    """Load what torch.save wrote to a file (a path, or a file of bytes), on the CPU; nothing in it is run.

    UsageError by a torch that does not keep to that; torch's own errors for what cannot be loaded so.
    """
    torch = system("torch", "torch")
    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_TORCH:
        raise UsageError(
            f"torch {torch.__version__} can be made to run code by the file that it loads (CVE-2025-32434), so it is "
            "not asked to: install torch 2.6 or newer to import files of torch.save"
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def several(objects: Any) -> dict[str, Any]:
    """Buffer name -> object; a lone object is the main buffer."""
    if not isinstance(objects, Mapping):
        return {MAIN_BUFFER: objects}
    if not objects or not all(isinstance(name, str) for name in objects):
        raise UsageError("give one buffer, or a dict of names (str) to buffers")
    return dict(objects)


def as_given(objects: Any, results: Mapping[str, Any]) -> Any:
    """The results by buffer name as they are; that of a lone object by itself."""
    return dict(results) if isinstance(objects, Mapping) else next(iter(results.values()))


def part_of(writer: Writer, name: str) -> Buffer:
    """The writer's buffer of that name; its main one is the writer itself."""
    return writer if name == MAIN_BUFFER else writer.buffer(name)


def share_of(source: Any, rank: int | None = None, tails: str | None = None) -> Share:
    """A share as it is; of a checkpoint, what `rank` had (the same world size goes on). tails: as of a plan."""
    if not isinstance(source, Checkpoint):
        if not (hasattr(source, "buffers") and hasattr(source, "plan")):
            raise UsageError(
                f"restoring takes a share, plan.share(rank), or a checkpoint, not a {type(source).__name__}"
            )
        share: Share = source
        return share
    if rank is None:
        raise UsageError(
            f"restoring from checkpoint {source.name!r}: give rank=, or a share: resharding.plan(checkpoint).share()"
        )
    return planned(source, world_size=source.world_size, tails=tails).share(rank)


def saved_share(source: Any, rank: int | None = None) -> Share:
    """The same as `share_of`, as the live buffer had it: fields that its steps were given later are left out."""
    return share_of(source, rank).as_saved()


def planned(checkpoint: Checkpoint, **options: Any) -> Plan:
    """`resharding.plan()`."""
    import resharding  # here, so that an adapter is imported without it

    return resharding.plan(checkpoint, **options)


def share_buffer(share: Share, name: str) -> ShareBuffer:
    """The share's buffer of that name, or what there is instead."""
    if name not in share.buffers:
        raise NotFoundError(
            f"the checkpoint has no buffer {name!r}; it has: {', '.join(share.buffers) or 'none'}. "
            "Restore with {name: object} to say which is meant"
        )
    return share.buffer(name)


def declare(
    writer: Buffer,
    *,
    env_id: Sequence[Path] = (),
    episode_id: Sequence[Path] = (),
    next_of: Mapping[Path, Path] | None = None,
    unit: str | None = None,
    reward: Path | None = None,
) -> None:
    """Say what the system's fields mean, beside what the user's schema says; where both do, the user's holds."""
    known = writer.schema
    writer.declare(
        Schema(
            dict.fromkeys((*known.env_id, *env_id)),
            dict.fromkeys((*known.episode_id, *episode_id)),
            {**(next_of or {}), **known.next_of},
            known.axes,
            known.json,
            unit or known.unit,
            known.reward or reward,
        )
    )


def checkpoint(writer: Writer, step: int, saved: Mapping[str, Saved], **options: Any) -> Pending:
    """One checkpoint of all buffers; `options` are those of `Writer.checkpoint`."""
    given = {name: {"columns": s.columns, "attributes": s.attributes, "state": s.state} for name, s in saved.items()}
    main = given.pop(MAIN_BUFFER, {})
    clash = {"columns", "attributes", "state", "buffers"} & set(options)
    if clash:
        raise UsageError(
            f"{min(clash)}= is what the adapter fills in; what else it takes: step, name, progress, wait, ..."
        )
    return writer.checkpoint(step, **main, buffers=given, **options)


def saved_by(system: str, states: Mapping[int, Any]) -> dict[int, Any]:
    """The states by source rank that the adapter of this system saved."""
    return {rank: s for rank, s in states.items() if isinstance(s, Mapping) and s.get("system") == system}


def check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a choice that there is not."""
    if value not in allowed:
        raise UsageError(f"{name}={value!r}: give {' or '.join(map(repr, allowed))}")


def check_room(existing: str, held: int, what: str, unit: str = "steps") -> None:
    """Refuse to restore over what is there, unless it is to be replaced."""
    check_option("existing", existing, EXISTING)
    if held and existing == "error":
        raise UsageError(f"{what} already holds {held} {unit}; restore into an empty one, or with existing='replace'")

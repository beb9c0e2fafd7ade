"""Tool: `archive export --html`: an episode, a checkpoint or a plan as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from archive.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from archive import Archive


def write_page(arc: Archive, what: str, file: str, *, world_size: int | None, replace: bool) -> str:
    """Write the page of an episode's id or a checkpoint's name ("latest"), with a world size that of its plan; the title."""
    path = Path(file)
    if path.exists() and not replace:
        raise UsageError(f"{file} is there; nothing was done: give another --output, or add --yes to replace it")
    title, text = _page(arc, what, world_size)
    path.write_text(text, "utf-8")
    return title


def _page(arc: Archive, what: str, world_size: int | None) -> tuple[str, str]:
    if world_size is None and len(arc.episodes.filter(episode_id=what)):
        return f"episode {what}", arc.episodes[what].to_html()
    try:
        checkpoint = arc.checkpoints.latest if what == "latest" else arc.checkpoints[what]
    except NotFoundError:
        checkpoint = None
    if checkpoint is None:
        kind = "checkpoint" if world_size is not None else "episode or checkpoint"
        raise NotFoundError(
            f"there is no {kind} {what!r} at {arc.url}; `archive episodes` and `archive checkpoints` list them"
        )
    if world_size is None:
        return f"checkpoint {checkpoint.name}", checkpoint.to_html()
    import resharding

    return f"plan of {checkpoint.name} for {world_size} ranks", resharding.plan(checkpoint, world_size).to_html()

"""Archives, damage, and all that a test compares, of verbs that are jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import archive
from tests.support.dataset_files import flat, write_flat

LENGTHS = (3, 1, 5, 2, 4, 6)
OF_ROWS = ("session", "episode_id", "sequence", "position", "length", "episode_start", "first", "last", "terminated",
           "truncated", "return", "metadata", "predecessor", "schema", "rank", "env_id", "buffer")  # fmt: skip


def of_shards(root: Path, commits: int = 6) -> Path:
    arc = archive.create(root)
    with arc.writer() as w:
        for i in range(commits):
            for j in range(2):
                w.add_episode({"x": np.arange(900.0) + i, "note": [f"{i}"] * 900}, episode_id=f"e{i}-{j}")
            w.checkpoint(i, columns={"p": np.ones(1800 * (i + 1))}).result()
    arc.refresh().add_fields({"late": {"e0-0": np.arange(900), "e1-0": np.arange(900)}})
    return root


def damage(root: Path, *numbers: int) -> None:
    """Change some objects of an archive: one byte of it, its length, or that it is there."""
    there = sorted(one for folder in ("shards", "manifest") for one in (root / folder).rglob("*") if one.is_file())
    for number in numbers:
        path = there[number % len(there)]
        if not path.exists():
            continue
        data = bytearray(path.read_bytes())
        kind = number // len(there) % 3
        if kind == 0 and data:
            data[len(data) // 3] ^= 0xFF
            path.write_bytes(data)
        elif kind == 1:
            path.write_bytes(data[: len(data) // 2])
        else:
            path.unlink()


def files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(folder.iterdir())}


def same(folder: Path, other: Path) -> bool:
    """True if two folders have the same files; npz files have times."""
    mine, others = files(folder), files(other)
    if not all(name.endswith(".npz") for name in mine):
        return mine == others
    with_arrays = lambda path: {n: a.tolist() for n, a in np.load(path).items()}  # noqa: E731
    return mine.keys() == others.keys() and all(with_arrays(folder / n) == with_arrays(other / n) for n in mine)


def imported(ck: archive.Checkpoint) -> dict[str, Any]:
    """All that an imported checkpoint has, but for the name of its session."""
    rows = [*ck.snapshot.columns(OF_ROWS).to_pylist(), *ck.live.to_pylist()]
    mine = [row for row in rows if row["session"] == ck.session]
    about = ck.staged(0).index
    return {
        "steps": [steps for _, steps in ck.episodes.stream()],
        "rows": [{n: v.replace(ck.session, "S") if isinstance(v, str) else v for n, v in row.items()} for row in mine],
        "buffers": {name: one.to_json() for name, one in about.buffers.items()},
        "about": (ck.name, ck.run, ck.step, ck.world_size, ck.progress, about.sequence, about.ordinal, about.known_at),
    }


def one_file(root: Path) -> Path:
    """A flat file whose last episodes are one, unfinished."""
    arrays = flat(LENGTHS)
    for i in (2, 3, 4):
        arrays["timeouts"][sum(LENGTHS[: i + 1]) - 1] = True
    return write_flat(root / "several.npz", arrays)

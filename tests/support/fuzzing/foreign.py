"""Files of other systems, as seeds, and what imports them: each is a folder of files, of which one is another."""

from __future__ import annotations

import io
import json
import shutil
import uuid
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq

import archive
from tests.support.fuzzing.mutating import mutated_bytes, mutated_json, mutated_table, parquet
from tests.support.places import DATA

Files = dict[str, bytes]


def files_below(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def mutated_files(seed: Files, rng: Random) -> Files:
    """One of the files is another, or gone."""
    name = rng.choice(sorted(seed))
    if rng.random() < 0.03:
        return {one: data for one, data in seed.items() if one != name}
    return seed | {name: mutated_file(name, seed[name], rng)}


def mutated_file(name: str, data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.2:
        return mutated_bytes(data, rng)
    if name.endswith(".json"):
        return mutated_json(json.loads(data), rng).encode("utf-8", "surrogatepass")
    if name.endswith(".parquet"):
        return parquet(mutated_table(pq.read_table(io.BytesIO(data)), rng), rng)
    if data[:2] == b"PK":
        return mutated_zip(data, rng)
    return mutated_bytes(data, rng)


def mutated_zip(data: bytes, rng: Random) -> bytes:
    """A ZIP of which one member is another under a right checksum, deflated maybe, or that claims other sizes."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    out, at = io.BytesIO(), rng.randrange(len(members))
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as new:
        for i, (name, content) in enumerate(members):
            if i == at:
                content = mutated_npy(content, rng) if name.endswith(".npy") else mutated_bytes(content, rng)
                name = rng.choice((name, name, name, "other.npy", "../x.npy"))
            new.writestr(name, content)
    return out.getvalue()


def mutated_npy(data: bytes, rng: Random) -> bytes:
    """An array file whose header says something else."""
    if data[:6] != b"\x93NUMPY" or rng.random() < 0.3:
        return mutated_bytes(data, rng)
    size = int.from_bytes(data[8:10], "little")
    shape = rng.choice(("(10**15,)", "(1000000000000000,)", "(9223372036854775807, 2)", "(-1,)", "()", "(0,)", "(3,)"))
    kind = rng.choice(("'<f8'", "'|O'", "'<U999999999'", "'|V0'", "[('a', '<f4')]", "'<M8[s]'", "'|S0'"))
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header + b" " * max(0, size - len(header) - 1) + b"\n"
    return data[:8] + len(header).to_bytes(2, "little") + header + data[10 + size :]


def importer(read: Callable[[Path, archive.Archive], object], tmp: Path) -> Callable[[Files], None]:
    """Writes the files and has them imported into a new archive, which must be whole and readable then."""
    folder = tmp / "given"

    def parse(files: Files) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        arc = archive.create(f"memory://{uuid.uuid4().hex}")
        try:
            read(folder, arc)
            arc.refresh().episodes.read()
        finally:
            forget_memory()

    return parse


def forget_memory() -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


# -- seeds -------------------------------------------------------------------------------------------------------------


def npz_seeds(tmp: Path) -> Sequence[Files]:
    from archive.adapters import npz
    from tests.support.dataset_files import flat, write_flat

    write_flat(tmp / "flat.npz", flat())
    arc = archive.create(str(tmp / "arc"))
    with arc.writer() as w:
        for i in range(2):
            steps = {"obs": np.ones((3, 2)), "action": np.zeros((3, 1)), "reward": np.ones(3)}
            w.add_episode(steps, terminated=bool(i), truncated=not i)
    npz.export_dataset(arc.refresh(), tmp / "several.npz", layout="episodes")
    return [{"x.npz": (tmp / name).read_bytes()} for name in ("flat.npz", "several.npz")]


def hdf5_seeds(tmp: Path) -> Sequence[Files]:
    from tests.support.dataset_files import flat, write_flat

    return [{"x.h5": write_flat(tmp / "flat.h5", flat()).read_bytes()}]


def read_npz(folder: Path, arc: archive.Archive) -> object:
    from archive.adapters import npz

    return npz.import_dataset(next(folder.glob("x.*"), folder / "x.npz"), arc)


def lerobot_seeds(tmp: Path) -> Sequence[Files]:
    from tests.support.dataset_files import write_lerobot

    return [files_below(write_lerobot(tmp / "robot"))]


def filmed_seeds(tmp: Path) -> Sequence[Files]:
    """With a video and with pictures."""
    from archive.adapters import lerobot

    rng, arc = np.random.default_rng(0), archive.create(str(tmp / "arc"))
    with arc.writer() as w:
        for length in (3, 2):
            pictures = rng.integers(0, 255, (length, 16, 16, 3), np.uint8)
            w.add_episode({"cam": pictures, "reward": np.ones(length)})
    for name, video in (("film", True), ("pictures", False)):
        lerobot.export_dataset(arc.refresh(), tmp / name, fps=10, video=video)
    return [files_below(tmp / name) for name in ("film", "pictures")]


def read_lerobot(folder: Path, arc: archive.Archive) -> object:
    from archive.adapters import lerobot

    return lerobot.import_dataset(folder, arc)


def read_film(folder: Path, arc: archive.Archive) -> object:
    from archive.adapters import lerobot

    return lerobot.import_dataset(folder, arc, on_video="decode")


def keep_film(folder: Path, arc: archive.Archive) -> object:
    from archive.adapters import lerobot

    return lerobot.import_dataset(folder, arc, on_video="keep")


def alf_seeds(tmp: Path) -> Sequence[Files]:
    return [{"ckpt-1-replay_buffer": path.read_bytes()} for path in sorted((DATA / "alf").glob("*.pt"))]


def read_alf(folder: Path, arc: archive.Archive) -> object:
    from archive.adapters import alf

    return alf.import_checkpoint(folder / "ckpt-1-replay_buffer", arc)


def rlinf_seeds(tmp: Path) -> Sequence[Files]:
    return [files_below(DATA / "rlinf" / "rank_1"), files_below(DATA / "rlinf_documented_names")]


def read_rlinf(folder: Path, arc: archive.Archive) -> object:
    from archive.adapters import rlinf

    return rlinf.import_checkpoint(folder, arc)

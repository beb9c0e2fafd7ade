"""The examples in the docstrings of the adapters run as they stand, and are short."""

from __future__ import annotations

import textwrap
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import archive
import resharding
from archive.adapters import alf, exchange, lerobot, minari, npz
from tests.support.alf_buffer import ReplayBuffer, run
from tests.support.backends import make_backend
from tests.support.dataset_files import flat, write_flat, write_lerobot
from tests.support.worlds import STORES, save_world


def run_example(module: ModuleType, names: dict[str, Any]) -> dict[str, Any]:
    code = textwrap.dedent(str(module.__doc__).partition("```python\n")[2].partition("```")[0])
    assert 0 < len(code.splitlines()) <= 15
    names = {"archive": archive, "resharding": resharding, module.__name__.rpartition(".")[2]: module, **names}
    exec(code, names)
    return names


@pytest.fixture
def arc() -> archive.Archive:
    return archive.create(f"memory://{uuid.uuid4().hex}")


def test_of_npz(arc: archive.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py", reason="h5py is not installed")
    write_flat(tmp_path / "hopper-medium.npz", flat())
    monkeypatch.chdir(tmp_path)
    run_example(npz, {"arc": arc})
    assert len(npz.import_dataset(tmp_path / "whole.h5", arc).episodes) == 2
    assert len(npz.import_dataset(tmp_path / "all.npz", arc).episodes) == 3


def test_of_lerobot(arc: archive.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lerobot(tmp_path / "pusht")
    monkeypatch.chdir(tmp_path)
    run_example(lerobot, {"arc": arc})
    assert len(lerobot.import_dataset(tmp_path / "pusht-again", arc).episodes) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_of_minari(arc: archive.Archive, pen: Any) -> None:
    names = run_example(minari, {"arc": arc})
    assert len(names["ck"].episodes) == pen.total_episodes


def test_of_exchange(arc: archive.Archive) -> None:
    data = pytest.importorskip("torchrl.data", reason="torchrl is not installed")
    torchrl = pytest.importorskip("archive.adapters.torchrl")
    rb = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(100), batch_size=4)
    ck = save_world(f"memory://{uuid.uuid4().hex}", [run(ReplayBuffer(2, 8), 7)], alf.save)
    with arc.writer(0, 1) as w:
        run_example(exchange, {"ck": ck, "torchrl": torchrl, "torchrl_buffer": rb, "w": w})
    assert len(arc.refresh().checkpoints) == 1


@pytest.mark.parametrize("store", STORES)
def test_files_on_every_store(store: str, arc: archive.Archive, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root = make_backend(request, store, tmp_path)
    ck = npz.import_dataset(write_flat(tmp_path / "hopper.npz", flat()), arc)
    npz.export_dataset(ck, f"{root.url}/hopper.npz", storage_options=root.storage_options)
    again = npz.import_dataset(f"{root.url}/hopper.npz", arc, name="again", storage_options=root.storage_options)
    for old, new in zip(ck.episodes, again.episodes, strict=True):
        assert old.read(["actions"])["actions"].tobytes() == new.read(["actions"])["actions"].tobytes()

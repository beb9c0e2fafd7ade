"""A whole archive in the hands of others: DuckDB, zarr, tensorstore, xarray; and of forked children and threads."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import archive
from archive.testing import steps
from tests.support.backends import Backend, make_backend
from tests.support.golden import GOLDEN, LABELS, TAGS
from tests.support.tampering import body, commit_files, same

EPISODES = 12


def written(url: str, storage_options: dict[str, Any] | None = None, **options: Any) -> archive.Archive:
    """Episodes of one segment each, over several commits and shards."""
    with archive.create(url, storage_options=storage_options, **options).writer() as w:
        for i in range(EPISODES):
            w.add_episode(
                steps(4 + i, i),
                episode_id=f"e{i}",
                model_weights_uuid=f"w{i // 4}",
                update_count=i,
                metadata={"task": "push" if i % 2 else "pull"},
                terminated=bool(i % 3),
            )
            if i % 4 == 3:
                w.commit()
    return archive.open(url, storage_options=storage_options)


def test_duckdb_finds_the_same_rows(tmp_path: Path) -> None:
    import duckdb

    arc = written(str(tmp_path / "root"))
    rows = [
        "episode_id",
        *("length", "return", "model_weights_uuids", "update_count_min", "update_count_max", "terminated", "metadata"),
    ]
    columns = ", ".join(f'"{name}"' for name in rows)
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT {columns} FROM read_parquet(?)", [arc.manifest_urls]).fetchall()
        best = connection.execute(
            "SELECT episode_id FROM read_parquet(?) WHERE update_count_max >= 5 AND list_contains(model_weights_uuids, "
            "'w1') "
            'ORDER BY "return" DESC',
            [arc.manifest_urls],
        ).fetchall()
    table = arc.episodes.table.select(rows)
    assert found == [tuple(row[name] for name in rows) for row in table.to_pylist()]
    chosen = arc.episodes.filter(update_count=(5, None), model_weights_uuid="w1")
    assert sorted(name for (name,) in best) == sorted(chosen.table["episode_id"].to_pylist())


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_duckdb_and_pyarrow_read_the_tables_of_letting_go(layout: str) -> None:
    """Checkpoints with the commits that serve them, labels that count, late fields and tags, from files alone."""
    import duckdb
    import pyarrow.parquet as pq

    root = GOLDEN / f"format-2-{layout}"
    head = body(commit_files(root)[-1])
    urls = {kind: [str(root / ref["path"]) for ref in head[kind]] for kind in ("checkpoints", "labels", "late", "tags")}
    with duckdb.connect() as connection:
        said = connection.execute(
            "SELECT episode_id, key, value FROM read_parquet(?) QUALIFY row_number() OVER (PARTITION BY episode_id, "
            "session, rank, sequence, key ORDER BY commit DESC) = 1 AND value IS NOT NULL ORDER BY ALL",
            [urls["labels"]],
        ).fetchall()
        saved = connection.execute("SELECT name, manifest FROM read_parquet(?) ORDER BY step", [urls["checkpoints"]])
        assert saved.fetchall() == [("step-10", 16), ("step-20", 16)]
        added = connection.execute(
            "SELECT DISTINCT unnest(fields) AS f FROM read_parquet(?) ORDER BY f", [urls["late"]]
        )
        assert added.fetchall() == [("judge/score",), ("mark",), ("reward",), ("wrong",)]
    counted = {(name, key): json.loads(value) for name, key, value in said if key != "seen"}
    assert counted == {(name, key): value for name, of in LABELS.items() for key, value in of.items()}
    assert {name for name, key, _ in said if key == "seen"} == {"env 1", "revised"}  # of a tail, and of a revision
    tags = [row for url in urls["tags"] for row in pq.read_table(url).to_pylist()]
    assert {row["name"]: row["target"] for row in tags} == {name: tag["commit"] for name, tag in TAGS.items()}


def expected(first: int) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of the shard whose four episodes begin with this one."""
    parts = [steps(4 + i, i) for i in range(first, first + 4)]
    return {name: np.concatenate([part[name] for part in parts]) for name in ("obs", "action", "reward")}


@pytest.mark.parametrize("layout", ["packed", "directory"])
@pytest.mark.parametrize("name", ["memory", "local", "moto", "seaweedfs"])
def test_zarr_opens_every_shard(request: pytest.FixtureRequest, tmp_path: Path, name: str, layout: str) -> None:
    backend = make_backend(request, name, tmp_path)
    arc = written(backend.url, backend.storage_options, layout=layout)
    assert len(arc.shards) == EPISODES // 4
    for i in range(len(arc.shards)):
        url = arc.shard_url(i)
        options = backend.storage_options
        if url.startswith("zip::") and options:
            options = {"s3": options}
        group = zarr.open_group(url, mode="r", storage_options=options or None)
        for name, array in expected(4 * i).items():
            np.testing.assert_array_equal(np.asarray(group[name]), array)
        group.store.close()


def test_tensorstore_opens_packed_shards(tmp_path: Path) -> None:
    import tensorstore

    arc = written(str(tmp_path / "root"))
    for i, shard in enumerate(arc.shards):
        for name, array in expected(4 * i).items():
            kvstore = {"driver": "zip", "base": f"file://{tmp_path / 'root' / shard}", "path": f"{name}/"}
            opened = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True).result()
            np.testing.assert_array_equal(opened.read().result(), array)


def test_xarray_opens_shards_of_the_directory_layout(tmp_path: Path) -> None:
    import xarray

    arc = written(str(tmp_path / "root"), layout="directory")
    for i, shard in enumerate(arc.shards):
        with xarray.open_zarr(tmp_path / "root" / shard, zarr_format=3, consolidated=True, chunks=None) as dataset:
            assert dataset["obs"].dims[0] == "step"
            for name, array in expected(4 * i).items():
                np.testing.assert_array_equal(dataset[name].to_numpy(), array)


def test_a_forked_child_reads_its_parents_archive(s3_backend: Backend) -> None:
    """As a DataLoader's workers do, with what the parent has opened, read and kept."""
    arc = written(s3_backend.url, s3_backend.storage_options)
    episodes = arc.episodes
    episodes[:3].read()
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    children = [fork.Process(target=lambda part=part: answers.put(episodes[part::2].read())) for part in range(2)]
    for child in children:
        child.start()
    found = [answers.get() for _ in children]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    answers.close()
    for data in found:
        first = len(data[0]["reward"]) - 4
        assert all(same(one, steps(4 + first + 2 * k, first + 2 * k)) for k, one in enumerate(data))
    assert all(same(data, steps(4 + i, i)) for i, data in enumerate(episodes.read()))  # and the parent still can


def test_threads_share_an_archive(s3_backend: Backend) -> None:
    arc = written(s3_backend.url, s3_backend.storage_options)
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(lambda k: (k % EPISODES, arc.episodes[k % EPISODES].read()), range(48))
        assert all(same(data, steps(4 + i, i)) for i, data in read)


def test_threads_share_a_writer(tmp_path: Path) -> None:
    with archive.create(str(tmp_path / "root")).writer() as w, ThreadPoolExecutor(8) as pool:

        def add(i: int) -> None:
            w.add_episode(steps(1 + i % 5, i), episode_id=f"e{i}")
            if i % 10 == 0:
                w.commit()

        list(pool.map(add, range(100)))
    arc = archive.open(str(tmp_path / "root"))
    assert sorted(arc.episodes.table["episode_id"].to_pylist()) == sorted(f"e{i}" for i in range(100))
    for episode in arc.episodes:
        i = int(episode.id.removeprefix("e"))
        assert same(episode.read(), steps(1 + i % 5, i))

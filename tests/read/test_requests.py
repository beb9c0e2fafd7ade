"""What it costs, counted at the server: requests and bytes of opening, filtering and reading;
files and bytes stored."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.log.tablefiles import MAX_FOLDED_BYTES, files_to_keep
from archive.write import slabs
from tests.support import servers
from tests.support.backends import Proxied
from tests.support.proxy import Seen
from tests.support.tampering import body, commit_files, same

MB = 1024 * 1024


def fold(sizes: Sequence[int]) -> tuple[int, int, list[tuple[int, int]]]:
    """Adds commits of so many rows: most files at once, rows written in all, and which rows each file has at last."""
    files: list[tuple[int, int]] = []
    most = written = total = 0
    for count in sizes:
        rows = [hi - lo for lo, hi in files]
        keep = files_to_keep(rows, [0] * len(rows), count)
        start = files[keep][0] if keep < len(files) else total
        total += count
        files = [*files[:keep], (start, total)]
        written += total - start
        most = max(most, len(files))
    return most, written, files


@pytest.mark.parametrize("kind", ["one", "same", "random", "growing", "shrinking"])
def test_ten_thousand_commits_fold_into_few_files(kind: str) -> None:
    draw = random.Random(0)
    sizes = {
        "one": [1] * 10_000,
        "same": [64] * 10_000,
        "random": [draw.randint(1, 200) for _ in range(10_000)],
        "growing": list(range(1, 10_001)),
        "shrinking": list(range(10_000, 0, -1)),
    }[kind]
    most, written, files = fold(sizes)
    amplification = written / sum(sizes)
    print(f"{kind}: {most} files at most, {len(files)} at last, each row written {amplification:.1f} times")
    assert most <= 13
    assert amplification < 12
    assert files[0][0] == 0
    assert files[-1][1] == sum(sizes)
    assert all(one[1] == other[0] for one, other in pairwise(files))  # each row once


def test_large_files_are_not_folded() -> None:
    assert files_to_keep([10, 1, 1], [10, MAX_FOLDED_BYTES + 1, 10], 1000) == 2
    assert files_to_keep([10, 1, 1], [10, MAX_FOLDED_BYTES, 10], 1000) == 0
    assert files_to_keep([], [], 1) == 0
    assert files_to_keep([2], [1], 1) == 1


@pytest.mark.parametrize("proxied", ["moto"], indirect=True)
def test_many_commits(tmp_path: Path, proxied: Proxied) -> None:
    """300 real commits: few files, every row once, and few requests to open and filter, none of them a HEAD."""
    root = tmp_path / "root"
    written = 0
    with archive.create(str(root)).writer() as w:
        for i in range(300):
            w.add_episode({"x": np.full(1, i)}, episode_id=f"e{i}", model_weights_uuid=f"w{i % 7}", update_count=i)
            w.commit()
            files = body(commit_files(root)[-1])["segments"]
            assert len(files) <= 13
            written += files[-1]["rows"]
    print(f"300 commits: {len(files)} files, each row written {written / 300:.1f} times")
    arc = archive.open(str(root))
    assert arc.episodes.table["episode_id"].to_pylist() == [f"e{i}" for i in range(300)]
    assert [int(data["x"][0]) for data in arc.episodes.read()] == list(range(300))
    upload(root, proxied)
    check_requests(proxied)


@pytest.mark.parametrize("steps", [5, 400])  # its metadata and chunk are neighbours, or another chunk lies between
@pytest.mark.parametrize("proxied", ["moto", "s3fs"], indirect=True)
def test_a_first_look_takes_six_requests(proxied: Proxied, steps: int) -> None:
    """Of which two are sent together: open, filter, and one field of one episode."""
    with archive.create(proxied.url, storage_options=proxied.storage_options).writer(compression=None) as w:
        for i in range(20):
            one = {"obs": np.full((steps, 100), i), "reward": np.full(steps, i)}
            w.add_episode(one, episode_id=f"e{i}", update_count=i)
    proxied.proxy.reset()
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    (found,) = arc.episodes.filter(update_count=7).read(fields=["reward"])
    assert (found["reward"] == 7).all()
    kinds = ["list" if "list-type" in seen.path else seen.path.rpartition("/")[2] for seen in proxied.proxy.log]
    assert sorted(kinds[:2]) == ["archive.json", "list"]
    assert kinds[2] == "000000002.json"
    assert [kind.partition(".")[2] for kind in kinds[3:]] == ["segments.parquet", "chunks.parquet", "zip"]


@pytest.mark.parametrize("proxied", ["moto", "s3fs"], indirect=True)
def test_where_listings_may_lag_the_next_commit_is_asked_for(proxied: Proxied) -> None:
    with archive.create(proxied.url, storage_options=proxied.storage_options).writer() as w:
        w.add_episode({"x": np.zeros(1)})
    proxied.proxy.reset()
    archive.open(proxied.url, storage_options=proxied.storage_options | {"late_list": True})
    kinds = ["list" if "list-type" in seen.path else seen.path.rpartition("/")[2] for seen in proxied.proxy.log]
    assert sorted(kinds) == ["000000002.json", "000000003.json", "archive.json", "list"]


def upload(root: Path, proxied: Proxied) -> None:
    """What opening and reading may want, past the proxy."""
    client = servers.s3_client(proxied.endpoint)
    bucket, folder = proxied.place
    wanted = {ref["path"] for ref in body(commit_files(root)[-1])["segments"]}
    paths = [root / "archive.json", *commit_files(root), *(root / path for path in wanted)]
    for path in paths:
        client.put_object(Bucket=bucket, Key=f"{folder}/{path.relative_to(root)}", Body=path.read_bytes())
    client.close()


def check_requests(proxied: Proxied) -> None:
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    assert len(arc.episodes.filter(model_weights_uuid="w3", update_count=(100, 200))) == len(range(101, 200, 7))
    log = proxied.proxy.log
    print("\n".join(f"{seen.method} {seen.path} {seen.range}" for seen in log))
    assert len(log) <= 20
    assert len(arc.episodes.filter(where="length = 1", complete=True)) == 300
    assert len(log) <= 20  # nothing more is read for another filter
    lists = [seen for seen in log if "list-type" in seen.path]
    assert len(lists) <= 2
    assert all("commits" in seen.path for seen in lists)
    assert {seen.method for seen in log} == {"GET"}


def frames(rng: np.random.Generator, length: int) -> dict[str, Any]:
    return {
        "obs": rng.integers(0, 255, (length, 84, 84), dtype=np.uint8),
        "action": rng.integers(0, 18, length),
        "reward": rng.random(length, np.float32),
        "logits": rng.random((length, 18), np.float32),
    }


def vectors(rng: np.random.Generator, length: int) -> dict[str, Any]:
    length *= 10
    wide = {f"f{i:02d}": rng.random((length, 30), np.float32) for i in range(12)}
    return {**wide, "action": rng.integers(0, 18, length), "reward": rng.random(length, np.float32)}


def scalars(rng: np.random.Generator, length: int) -> dict[str, Any]:
    """Fields of 90 KB a shard: the gaps between what is wanted of them are larger than it is,
    and smaller than 64 KB."""
    return {f"f{i:02d}": rng.random(20 * length, np.float32) for i in range(40)}


@pytest.mark.parametrize(("make", "count"), [(frames, 60), (vectors, 63), (scalars, 99)])
def test_a_contiguous_part_is_read_with_few_requests_and_bytes(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch, make: Any, count: int
) -> None:
    monkeypatch.setattr(slabs, "SHARD_BYTES", 4 * MB)
    rng = np.random.default_rng(0)
    data = [make(rng, 20 + i % 30) for i in range(count)]
    with archive.create(proxied.url, storage_options=proxied.storage_options).writer(compression=None) as w:
        for episode in data:
            w.add_episode(episode)
    for first in range(0, 2 * count // 3 + 1, count // 9):  # thirds, and what lies across two of them
        part = slice(first, first + count // 3)
        arc = archive.open(proxied.url, storage_options=proxied.storage_options)
        chosen = arc.episodes[part]
        assert len(chosen) == count // 3
        proxied.proxy.log.clear()
        found = chosen.read()
        assert all(same(one, other) for one, other in zip(found, data[part], strict=True))
        check_bounds(arc, list(proxied.proxy.log), data[part], len(data[0]))


def check_bounds(arc: archive.Archive, log: Sequence[Seen], data: Sequence[dict[str, Any]], fields: int) -> None:
    """The bounds of a read of a contiguous part: with at most two cuts."""
    needed = sum(array.nbytes for episode in data for array in episode.values())
    reads = [seen for seen in log if "/shards/" in seen.path]
    shards = {seen.path for seen in reads}
    chunk = max(chunk_bytes(arc, shard) for shard in arc.shards)
    fetched = sum(seen.bytes_out for seen in reads)
    ends = 2 + len(shards) - 1
    spare = (fetched - 1.05 * needed) / (ends * chunk)
    print(
        f"{needed=} {fetched=} {fetched / needed:.3f} {spare:.2f} requests={len(reads)} shards={len(shards)} of "
        f"{len(arc.shards)}"
    )
    assert fetched <= 1.05 * needed + ends * chunk
    partial_runs = 2 * fields
    assert len(reads) <= -(-fetched // (8 * MB)) + 2 * len(shards) + partial_runs
    assert len(arc.shards) > 2
    assert {seen.method for seen in log} == {"GET"}
    assert not [seen for seen in log if "list-type" in seen.path]
    assert len([seen for seen in log if "/shards/" not in seen.path]) <= 1  # the chunk table


def chunk_bytes(arc: archive.Archive, shard: str) -> int:
    """One chunk of each field of a shard."""
    arrays = arc._reader.shards.indexes[shard].arrays if shard in arc._reader.shards.indexes else {}
    return sum(int(array.size.max()) for name, array in arrays.items() if name)


def test_increments_of_twenty_fields_are_stored_with_little_around_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    root = tmp_path / "root"
    w = archive.create(str(root)).writer()
    for _ in range(3):
        before = stored_bytes(root)
        increment = {f"group/f{i}": rng.random((300, 128)) for i in range(20)}
        w.add_episode({"group": {name.partition("/")[2]: array for name, array in increment.items()}})
        w.commit()
        data = sum(array.nbytes for array in increment.values())
        assert 20 * 300_000 < data < 20 * 310_000
        print(f"{data} bytes of data, {stored_bytes(root) - before} stored")
        assert stored_bytes(root) - before <= 1.05 * data + 64 * 1024
    w.close()
    shutil.rmtree(root)


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_reading_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    with archive.create(str(tmp_path / "root")).writer() as w:
        for i in range(9):
            w.add_episode({"x": np.arange(3.0 + i)}, update_count=i, metadata={"i": i})
    reading = """
import sys, archive
episodes = archive.open(sys.argv[1]).episodes
assert len(episodes.read()) == len(list(episodes.stream())) == sum(len(ep.read()) for ep in episodes) == 9
assert len(episodes.filter(update_count=(2, 5), complete=True).read()) == 3
print([name for name in ("pandas", "zarr", "torch") if name in sys.modules])
"""
    command = [sys.executable, "-c", reading, str(tmp_path / "root")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"

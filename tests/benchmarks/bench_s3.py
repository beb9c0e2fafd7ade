"""S3 (SeaweedFS on this machine), at once and with 20 ms a request: reading, saving, and opening, against raw clients.

Each measurement is a process of its own that has imported what it needs; peers take turns, round by round.
`BENCH_BYTES`: of the archive.  `BENCH_ROUNDS`: how often.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]
sys.path.insert(0, str(common.ROOT))

from tests.support import servers

BYTES = int(os.environ.get("BENCH_BYTES", 256 * 1024**2))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", 5))
BUCKET, RANGE_BYTES, LATENCY_S, FRAME = "bench", 8 * 1024**2, 0.02, 84 * 84
READERS = ("obstore_raw", "archive_obstore", "s3fs_raw", "archive_s3fs")


def frames() -> Any:
    steps = BYTES // FRAME
    return np.random.default_rng(1).integers(0, 256, (steps, 84, 84), dtype=np.uint8)


def timed_archive(endpoint: str, transport: str) -> dict[str, float]:
    import archive

    import_all()
    options = servers.s3fs_options(endpoint) | {"transport": transport}
    began, cpu = time.perf_counter(), time.process_time()
    found = archive.open(f"s3://{BUCKET}/a", storage_options=options).episodes.read(fields=["obs"])
    seconds = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    assert sum(one["obs"].nbytes for one in found) >= BYTES * 0.99
    return seconds


def child_archive_obstore(endpoint: str) -> dict[str, float]:
    return timed_archive(endpoint, "obstore")


def child_archive_s3fs(endpoint: str) -> dict[str, float]:
    return timed_archive(endpoint, "s3fs")


def child_obstore_raw(endpoint: str) -> dict[str, float]:
    from concurrent.futures import ThreadPoolExecutor

    from obstore.store import S3Store

    config: Any = {"endpoint": endpoint, "access_key_id": servers.KEY, "secret_access_key": servers.SECRET,
              "region": servers.REGION}  # fmt: skip
    began, cpu = time.perf_counter(), time.process_time()
    store = S3Store(BUCKET, config=config, client_options={"allow_http": True})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: store.get_range("raw", start=at, end=min(at + RANGE_BYTES, BYTES)), starts()))
    assert sum(map(len, found)) == BYTES
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def child_s3fs_raw(endpoint: str) -> dict[str, float]:
    import s3fs

    began, cpu = time.perf_counter(), time.process_time()
    fs = s3fs.S3FileSystem(**servers.s3fs_options(endpoint), skip_instance_cache=True)
    ends = [min(at + RANGE_BYTES, BYTES) for at in starts()]
    found = fs.cat_ranges([f"{BUCKET}/raw"] * len(ends), list(starts()), ends)
    assert sum(map(len, found)) == BYTES
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def child_torch_load(endpoint: str) -> dict[str, float]:
    import s3fs
    import torch

    began, cpu = time.perf_counter(), time.process_time()
    with s3fs.S3FileSystem(**servers.s3fs_options(endpoint)).open(f"{BUCKET}/torch.pt", "rb") as file:
        found = torch.load(file)
    assert found.numel() > 0
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def child_torch_save(endpoint: str) -> dict[str, float]:
    import s3fs
    import torch

    data = torch.from_numpy(frames())
    began, cpu = time.perf_counter(), time.process_time()
    with s3fs.S3FileSystem(**servers.s3fs_options(endpoint)).open(f"{BUCKET}/torch.pt", "wb") as file:
        torch.save(data, file)
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def child_archive_save(endpoint: str) -> dict[str, float]:
    import archive

    import_all()
    data, url = frames(), f"s3://{BUCKET}/saved-{time.time_ns()}"
    began, cpu = time.perf_counter(), time.process_time()
    with archive.create(url, storage_options=servers.s3fs_options(endpoint)).writer(compression=None) as w:
        write(w, data)
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def child_first_look(endpoint: str) -> dict[str, float]:
    """Open, filter, and one field of one episode, once imports are done."""
    import archive

    import_all()
    began, cpu = time.perf_counter(), time.process_time()
    arc = archive.open(f"s3://{BUCKET}/a", storage_options=servers.s3fs_options(endpoint))
    (found,) = arc.episodes.filter(episode_id="e7").read(fields=["reward"])
    seconds = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    assert len(found["reward"]) == 500
    return seconds | {"requests": float(arc.io_stats().requests)}


def import_all() -> None:
    """What a process that has read an archive before has imported, botocore and the clients included."""
    import archive

    arc = archive.create("memory://warm")
    with arc.writer() as w:
        w.add_episode({"obs": np.zeros((4, 2), np.uint8), "reward": np.zeros(4, np.float32)}, episode_id="x")
    archive.open("memory://warm").episodes.filter(episode_id="x").read()
    for name in ("s3fs", "aiobotocore.session", "obstore.store"):
        with contextlib.suppress(ImportError):
            __import__(name)


def write(w: Any, data: Any) -> None:
    for number, at in enumerate(range(0, len(data), 500)):
        part = data[at : at + 500]
        w.add_episode({"obs": part, "reward": np.ones(len(part), np.float32)}, episode_id=f"e{number}")


def starts() -> range:
    return range(0, BYTES, RANGE_BYTES)


def prepare(endpoint: str) -> None:
    import torch

    import archive

    servers.make_bucket(endpoint, BUCKET)
    data = frames()
    with archive.create(f"s3://{BUCKET}/a", storage_options=servers.s3fs_options(endpoint)).writer(
        compression=None
    ) as w:
        write(w, data)
    client, held = servers.s3_client(endpoint), io.BytesIO()
    client.put_object(Bucket=BUCKET, Key="raw", Body=np.resize(data, BYTES).tobytes())
    torch.save(torch.from_numpy(data), held)
    client.put_object(Bucket=BUCKET, Key="torch.pt", Body=held.getvalue())
    client.close()


@contextlib.contextmanager
def late(upstream: str) -> Iterator[str]:
    """The same server, each of whose answers begins 20 ms later; bytes pass as they come."""
    host, port = upstream.removeprefix("http://").split(":")
    loop = asyncio.new_event_loop()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while piece := await reader.read(1024**2):
                await asyncio.sleep(wait_s)
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port), limit=2**21)
        await asyncio.gather(relay(reader, back, LATENCY_S), relay(there, writer, 0))

    server = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0, limit=2**21))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def rounds(names: Sequence[str], endpoint: str) -> dict[str, list[dict[str, float]]]:
    """All in turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            found[name].append(common.child(__file__, name, endpoint))
    return found


def told(found: dict[str, list[dict[str, float]]], name: str, key: str = "wall_s") -> float:
    return statistics.median(one[key] for one in found[name])


def spread(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    return {name: sorted(round(one["wall_s"], 3) for one in runs) for name, runs in found.items()}


def compared(what: str, found: dict[str, Any], ours: str, theirs: str, least: float) -> common.Row:
    ratio = told(found, theirs) / told(found, ours)
    cpu = {name: round(told(found, name, "cpu_s"), 3) for name in (ours, theirs)}
    return common.bounded(what, ratio, least=least, wall_s=spread(found), cpu_s=cpu)


def measure() -> Sequence[common.Row]:
    servers.set_environment()
    rows = []
    with servers.seaweedfs() as endpoint:
        prepare(endpoint)
        with late(endpoint) as slow:
            for where, at in (("", endpoint), (", 20 ms", slow)):
                found = rounds(READERS, at)
                print(spread(found), file=sys.stderr)
                rows.append(compared(f"read against obstore raw{where}", found, "archive_obstore", "obstore_raw", 0.8))
                rows.append(compared(f"read against s3fs raw{where}", found, "archive_s3fs", "s3fs_raw", 0.9))
            found = rounds(("torch_save", "archive_save", "torch_load", "archive_obstore"), endpoint)
            print(spread(found), file=sys.stderr)
            rows.append(compared("save against torch.save through s3fs", found, "archive_save", "torch_save", 1.5))
            rows.append(compared("read against torch.load through s3fs", found, "archive_obstore", "torch_load", 3))
            found = rounds(("first_look",), slow)
            print(spread(found), file=sys.stderr)
            first = told(found, "first_look")
            rows.append(
                common.bounded("one field of one episode, 20 ms", first, most=0.25, unit="s", wall_s=spread(found))
            )
            requests = told(found, "first_look", "requests")
            rows.append(common.bounded("its requests, two of them together", requests, most=6, unit=""))
    return rows


CHILDREN = {name.removeprefix("child_"): made for name, made in globals().items() if name.startswith("child_")}

if __name__ == "__main__":
    common.main("s3: against raw clients, at once and with 20 ms a request", measure, CHILDREN)

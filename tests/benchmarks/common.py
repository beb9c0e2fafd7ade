"""Measuring: processes of their own, medians, peak memory, a table and JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Row(NamedTuple):
    """One thing measured. `target` is in words; `met` is None where there is no target."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None
    detail: dict[str, Any] | None = None


def bounded(what: str, value: float, *, most: float | None = None, least: float | None = None, unit: str = "x",
            **detail: Any) -> Row:  # fmt: skip
    """A row whose value has a bound: at most `most`, or at least `least`."""
    if most is not None:
        return Row(what, f"{value:,.3g} {unit}", f"<= {most:g} {unit}", value <= most, {"value": value, **detail})
    if least is not None:
        return Row(what, f"{value:,.3g} {unit}", f">= {least:g} {unit}", value >= least, {"value": value, **detail})
    return Row(what, f"{value:,.4g} {unit}", detail={"value": value, **detail})


def timed(work: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_s(work: Callable[[], Any], repeats: int = 3, *, before: Callable[[], Any] | None = None) -> float:
    """Median seconds of some calls; `before` runs ahead of each, untimed."""
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        times.append(timed(work))
    return statistics.median(times)


class Peak:
    """Peak resident memory within a `with` block, beyond what was resident at its start, in bytes."""

    def __enter__(self) -> Peak:
        self.before, self.most = resident_bytes(), 0
        self._stop = threading.Event()
        self._exact = _reset_peak()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        if not self._exact:
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._exact:
            self.most = _status_bytes("VmHWM")
        else:
            self._sampler.join()

    @property
    def extra_bytes(self) -> int:
        return max(0, self.most - self.before)

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, resident_bytes())


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _reset_peak() -> bool:
    """Linux forgets the high-water mark when 5 is written there."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def use_cores(count: str) -> None:
    """Have this process use so many cores, given in words of a command line; all for none."""
    if count:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(count)])


def used(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds, CPU seconds, page faults and peak memory that one call takes beyond what there was before."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF)
    with Peak() as peak:
        seconds = timed(work)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds, "user_s": after.ru_utime - before.ru_utime, "system_s": after.ru_stime - before.ru_stime,
        "extra_bytes": peak.extra_bytes, "faults": after.ru_minflt - before.ru_minflt,
    }  # fmt: skip


def memory_row(way: str, runs: Sequence[dict[str, Any]], most_mib: float | None) -> Row:
    """The largest peak of several runs of one way."""
    found = max(run["extra_bytes"] for run in runs) / 2**20
    return bounded(f"peak memory beyond the data, {way}", found, most=most_mib, unit="MiB")


def seconds_row(way: str, runs: Sequence[dict[str, Any]]) -> Row:
    """Median, spread and processor time of several runs of one way."""
    seconds = sorted(run["seconds"] for run in runs)
    cpu = {name: statistics.median(run[name] for run in runs) for name in ("user_s", "system_s", "faults")}
    return bounded(
        f"{way} ({seconds[0]:.2f} to {seconds[-1]:.2f}; {cpu['user_s']:.2f} user, {cpu['system_s']:.2f} system)",
        statistics.median(seconds), unit="s", least_s=seconds[0], most_s=seconds[-1], **cpu,
    )  # fmt: skip


def child(script: str, *arguments: object) -> dict[str, Any]:
    """Run a benchmark's own file again in a fresh process; what it printed as its last line, which is JSON."""
    command = [sys.executable, script, "--child", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def environment() -> dict[str, str]:
    """Of a child, which has the code compiled, as an installer leaves it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir(), "bench-compiled")),
    }


def report(title: str, rows: Sequence[Row], json_file: str | None = None) -> None:
    """Print a table, and write or print the same as JSON."""
    marks = {True: "met", False: "MISSED", None: ""}
    table = [("what", "measured", "target", ""), *((r.what, r.value, r.target, marks[r.met]) for r in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    print(f"\n{title}")
    for line in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    text = json.dumps({"title": title, "rows": [r._asdict() for r in rows]}, default=float)
    folder = os.environ.get("BENCH_JSON_FOLDER")
    if json_file is None and folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        json_file = str(Path(folder) / (title.partition(":")[0].replace(" ", "-") + ".json"))
    if json_file is None:
        print(text)
    else:
        Path(json_file).write_text(text + "\n")


def main(title: str, measure: Callable[[], Sequence[Row]], children: dict[str, Callable[..., Any]]) -> None:
    """What a benchmark does as a script: `--json FILE`, or (for its own use) `--child NAME ARGUMENTS`."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, *arguments = given.child
        print(json.dumps(children[name](*arguments), default=float))
        return
    report(title, measure(), given.json)


def read_archive(folder: str) -> Any:
    import archive

    return archive.open(f"{folder}/archive").episodes.read()


def read_archive_singly(folder: str) -> Any:
    import archive

    return [episode.read() for episode in archive.open(f"{folder}/archive").episodes]


def read_torch(folder: str) -> Any:
    import torch

    return torch.load(f"{folder}/data.pt", weights_only=True)


def ring_of(seed: int, envs: int, length: int) -> dict[str, Any]:
    """Fields of a ring of frames, actions and rewards."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        "obs": torch.randint(0, 256, (envs, length, 84, 84), dtype=torch.uint8, generator=generator),
        "action": torch.randint(0, 18, (envs, length), generator=generator),
        "reward": torch.rand(envs, length, generator=generator),
    }


def opened(where: str) -> Any:
    """The archive of a place that another process was told as JSON; made if it is not there."""
    import archive

    target = json.loads(where)
    return archive.open(target["url"], create=True, storage_options=target["options"])

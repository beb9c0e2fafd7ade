"""Pure, no I/O: what a run costs a store in a day, by cause: requests, the bytes that they carry, and the bytes that
stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from archive.costs import requests as of
from archive.costs.requests import Requests
from archive.costs.workload import DAY_S, Workload
from archive.store import GB, Prices

MONTH_DAYS = 30
_OBJECT_BYTES = 5_000  # of an object with steps beside these: its index, the descriptions of its arrays
_PART_BYTES = 8_000  # of a rank's part of a checkpoint beside columns and state
_COMMIT_BYTES = 10_000  # of a commit and its tables, without rows
_ROW_BYTES, _CHUNKS_BYTES = 80, 200  # of a segment in the tables; of the chunks of an object there
_SPAN_S = MONTH_DAYS * DAY_S


@dataclass(frozen=True)
class Spent:
    """The daily use of a store for one cause. requests: by verb.  uploaded, received: bytes.  stored: bytes, on average
    over the first month.  egress: bytes received that leave the region."""

    cause: str
    requests: Requests = field(default_factory=dict)
    uploaded: float = 0.0
    received: float = 0.0
    stored: float = 0.0
    egress: float = 0.0

    @property
    def writes(self) -> float:
        """Requests that make an object."""
        return sum(self.requests.get(verb, 0) for verb in ("create", "put", "copy"))

    @property
    def reads(self) -> float:
        """Requests that read one, or look whether it is there."""
        return sum(self.requests.get(verb, 0) for verb in ("get", "head"))

    @property
    def lists(self) -> float:
        """Requests that list objects."""
        return self.requests.get("list", 0)

    def dollars(self, prices: Prices) -> float:
        """Dollars a day."""
        carried = prices.dollars(self.requests, uploaded=self.uploaded, received=self.received)
        return carried + (self.egress * prices.egress_gb + self.stored * prices.gb_month / MONTH_DAYS) / GB


def causes(run: Workload) -> list[Spent]:
    """The use of a store in a day of this run, cause by cause; those without any are left out."""
    return [one for one in (*_written(run), *_kept_up(run), *_read(run)) if one != Spent(one.cause)]


def stays(rate_s: float, kept_s: float | None, now_s: float = _SPAN_S) -> float:
    """The average over a time of what grows at a rate and is kept for so long."""
    if kept_s is None or kept_s >= now_s:
        return rate_s * now_s / 2
    return rate_s * kept_s * (1 - kept_s / now_s / 2)


# -- writing -----------------------------------------------------------------------------------------------------------


def _written(run: Workload) -> Iterator[Spent]:
    checkpoints, objects = DAY_S / run.checkpoint_s, run.objects_s * DAY_S
    carried_s = run.bytes_s + run.objects_s * _OBJECT_BYTES
    if run.journals:
        looks = of.heartbeat(DAY_S, run.ranks, checkpoints)
        yield Spent("journal", of.together(of.ticks(objects), looks), uploaded=carried_s * DAY_S)
    else:
        yield Spent("shards", of.shards(objects), uploaded=carried_s * DAY_S)
    yield Spent("steps at rest", stored=stays(carried_s, run.kept_steps_s))

    part_bytes = run.ranks * (_PART_BYTES + run.state_bytes) + run.live_steps * run.column_bytes
    part_bytes += run.segments_s * run.checkpoint_s * _ROW_BYTES
    part_s = part_bytes / run.checkpoint_s
    yield Spent(
        "checkpoints",
        of.times(checkpoints, of.parts(run.ranks, run.wait_s)),
        uploaded=part_s * DAY_S,
        received=(run.ranks > 1) * part_s * DAY_S,
    )
    table_s = _COMMIT_BYTES / run.checkpoint_s + run.segments_s * _ROW_BYTES + run.objects_s * _CHUNKS_BYTES
    yield Spent(
        "commits",
        of.times(checkpoints, of.commit(run.ranks)),
        uploaded=table_s * DAY_S,
        received=checkpoints * run.ranks * _COMMIT_BYTES,
    )
    yield Spent("checkpoints at rest", stored=stays(part_s, run.kept_s) + stays(table_s, run.kept_steps_s))
    yield Spent("watch", of.watch(DAY_S, run.ranks, group=run.group))


# -- going on, letting go ----------------------------------------------------------------------------------------------


def _kept_up(run: Workload) -> Iterator[Spent]:
    live_s = run.live_steps / run.steps_s
    live, nbytes = live_s * run.objects_s, run.live_steps * (run.step_bytes + run.column_bytes)
    begun = [
        of.opened(run.ranks),
        of.session(run.ranks, journal=run.journals > 0, resumed=True, group=run.group),
        of.reading(live, nbytes, live_s / run.checkpoint_s, run.ranks),
    ]
    if run.journals:  # on average half an interval lies beyond the newest checkpoint
        begun.append(of.recovery(run.ranks, run.objects_s * run.checkpoint_s / 2))
    yield Spent("resumes", of.times(run.resumes_day, of.together(*begun)), received=run.resumes_day * nbytes)
    if run.kept_s is None:
        return
    day, commits = DAY_S / run.prunes_day, stays(1 / run.checkpoint_s, None)  # from one to the next; these never go
    going = {"states": run.ranks / run.checkpoint_s * day, "manifest": 4 / run.checkpoint_s * day}
    if run.kept_steps_s is not None:
        going["journal" if run.journals else "shards"] = run.objects_s * day
    let_go = sum(going.values())
    done = of.together(of.forgetting(day / run.checkpoint_s, let_go), of.prune(objects_there(run), commits, let_go))
    yield Spent("prunes", of.times(run.prunes_day, done))


def objects_there(run: Workload) -> dict[str, float]:
    """The number of objects in each folder that a prune lists, on average over the first month."""
    per_checkpoint = {"states": run.ranks, "manifest": 4.0}
    there = {folder: stays(count / run.checkpoint_s, run.kept_s) for folder, count in per_checkpoint.items()}
    steps = stays(run.objects_s, run.kept_steps_s)
    there |= dict.fromkeys(("jobs", "journal", "plans", "shards"), 0.0)
    return {**there, "journal" if run.journals else "shards": steps}


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(run: Workload) -> Iterator[Spent]:
    checkpoints = DAY_S / run.checkpoint_s
    if run.viewers:
        rows = run.segments_s * DAY_S * _ROW_BYTES  # the newest files are fetched again as they grow
        nbytes = run.viewers * (checkpoints * _COMMIT_BYTES + rows)
        looks = of.times(run.viewers, of.following(DAY_S, checkpoints))
        yield Spent("viewers", looks, received=nbytes, egress=run.egress * nbytes)
    if run.samples_s:
        nbytes = run.samples_s * run.sample_bytes * DAY_S
        yield Spent("training", of.drawing(run.samples_s * DAY_S), received=nbytes, egress=run.egress * nbytes)
    if run.exports_day:
        there, nbytes = stays(run.objects_s, run.kept_steps_s), stays(run.bytes_s, run.kept_steps_s)
        read = of.reading(there, nbytes, stays(1 / run.checkpoint_s, run.kept_steps_s))
        nbytes *= run.exports_day
        yield Spent("exports", of.times(run.exports_day, read), received=nbytes, egress=run.egress * nbytes)

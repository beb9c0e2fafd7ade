"""Maintenance: `verify`, `repair`, `policy`, `compact`, `jobs`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from archive.base import ExpiredError, NotFoundError, UsageError, plaintext, size
from archive.cli import options as opt
from archive.cli import output
from archive.cli.commands import MAINTAIN, command
from archive.cli.options import Target
from archive.cli.output import Output, Part, listed
from archive.observe import bar

if TYPE_CHECKING:
    from archive.jobs import Job
    from archive.maintain import Report


EXAMPLE = "episodes there, for example"
FAILED = ("episode_id", "error")
LOOK_S, LOOK_PART = 1.0, 0.1  # between looks at a job; the part of the time that they may take


@command(
    MAINTAIN,
    opt.option("--deep", "Read every byte, and every step as a reader does."),
    *opt.OF_JOB,
    looks_back=False,
)
def verify(target: Target, deep: bool, **how: Any) -> Output:
    """Check an archive against its checksums.

    Checks commits, tables, staged states and shards, and compares the tables with each other. Also checks journal
    objects newer than the last checkpoint; damage there is a warning. Objects that no commit names are listed.

    Exit code 1 if something is wrong. Exit code 2 if nothing is wrong, but shards of other archives were left out for
    want of --allow-base.
    """
    arc = target.open()
    with bar("verify", [arc]) as advance:
        report = arc.verify(deep, progress=advance, **how)
    code = 0 if report.sound else 1 if report.findings else 2
    return Output({"sound": report.sound} | asdict(report), _parts_of(report, deep, arc.url), code=code)


def _parts_of(report: Report, deep: bool, url: str) -> Iterator[Part]:
    looked = f"{report.commits} commits, {report.manifests} tables, {report.states} states, {report.shards} shards"
    looked += f", {report.journaled} objects of journals" if report.journaled else ""
    yield f"{looked}, {size(report.bytes)} of shards read{'' if deep else ' (--deep reads all)'}"
    contents = "" if deep else "; contents were not read: --deep does"
    if report.findings:
        yield [asdict(one) | {EXAMPLE: list(one.episodes)} for one in report.findings], ("object", "problem", EXAMPLE)
        yield from _judged(report, url, contents)
    elif report.sound:
        yield f"all sound{contents}"
    if report.warnings:
        yield "what was journaled since the newest checkpoint cannot all be recovered:"
        yield map(asdict, report.warnings), ("object", "problem")
    if report.notes:
        yield "what no commit names (a writer that died leaves it; so does a commit that was removed):"
        yield [{"object": one.object, "what": one.problem} for one in report.notes], ("object", "what")
    if report.not_allowed:
        options = " ".join(f"--allow-base {output.cell(url, limit=None)}" for url in report.not_allowed)
        yield (
            f"not checked: {sum(report.not_allowed.values())} shards that lie in other archives, which were not "
            f"allowed; if you trust them, add {options}"
        )


def _judged(report: Report, url: str, contents: str) -> Iterator[str]:
    """Sentences on the checkpoints that cannot be resumed, and on those to go on from instead."""
    from archive.checkpoint import resumption

    broken = {one.run for one in report.checkpoints if one.problem}
    for one in report.checkpoints:
        about = f"checkpoint {one.name!r} (commit {one.commit}) of run {one.run!r}"
        if one.problem:
            yield f"{about} cannot be resumed: {one.problem}"
        elif one.run in broken:
            yield f"{about} is the newest sound one{contents}; {resumption.go_on(url, one.commit)}"
        else:
            yield f"{about} is sound{contents}; nothing above concerns it"
    for run in sorted(broken - {one.run for one in report.checkpoints if not one.problem}):
        yield f"no checkpoint of run {run!r} is sound: put what is missing back from a copy"


@command(MAINTAIN, writes=True)
def repair(target: Target) -> Iterator[Output]:
    """Replace a damaged or missing newest commit.

    The archive goes on from the commit before it. Stop all writers first.
    """
    from archive import maintain

    storage = target.connect()
    try:
        number, they = maintain.damaged_commit(storage), "it"
        what = f"an empty commit in the place of the damaged commit {number}, and keep its bytes beside"
    except (UsageError, NotFoundError):
        if not (gone := maintain.missing_commits(storage)):
            raise
        number, they = gone.stop - 1, "they"
        what = f"empty commits in the place of those that are missing, {gone.start} to {number}"
    text = f"would put {what}; what only {they} made visible stays in the store, unseen"
    yield Output({"commit": number, "kept_as": None}, f"{text}. Stop all writers, then add --yes")
    done = maintain.repair(storage)
    kept = f"; the damaged bytes are kept as {done.kept_as}" if done.kept_as else ", nor do those before it"
    yield Output(asdict(done), f"commit {done.commit} now changes nothing{kept}")


@command(
    MAINTAIN,
    opt.argument("role", type=click.Choice(["reader", "writer", "pruner"])),
    opt.argument("url"),
    opt.option("--append-only", "Deny a writer to replace or delete any object, whatever else it is allowed."),
    looks_back=False,
)
def policy(target: Target, role: str, append_only: bool) -> Output:
    """Print the IAM policy that ROLE needs on S3.

    URL is s3://bucket/prefix, of one archive or of all below it. The command connects to nothing.
    """
    from archive.store import policy as policy_of

    document = policy_of(role, target.url, append_only=append_only)
    return Output(document, plaintext.as_json(document, indent=1))


@command(
    MAINTAIN,
    opt.option("--min-alive N", "Rewrite shards with a smaller live part.", type=click.FloatRange(0, 1), default=0.5),
    opt.option(
        "--min-full N",
        "Join shards of a buffer that have a smaller part of a full shard's bytes; 0: none.",
        type=click.FloatRange(0, 1),
        default=0.25,
    ),
    *opt.OF_JOB,
    writes=True,
)
def compact(target: Target, min_alive: float, min_full: float, **work: Any) -> Iterator[Output]:
    """Rewrite sparsely used and small shards into full ones.

    Old shards stay until `archive prune`.
    """
    import resharding
    from resharding import compactable

    arc = target.open()
    would = compactable(arc, min_alive=min_alive, min_full=min_full)
    text = f"would write {would.steps} live steps of {would.shards} thin or small shards anew; add --yes to do it"
    text = text if would.shards else "nothing to do: no shard is that thin, and few are that small"
    yield Output({"shards": would.shards, "steps": would.steps, "commit": None}, text)
    with bar("compact", [arc]) as advance:
        done = resharding.compact(arc, min_alive=min_alive, min_full=min_full, progress=advance, **work)
    text = f"{done.steps} steps out of {done.shards} shards were written anew" if done.shards else "nothing to do"
    yield Output({"shards": done.shards, "steps": done.steps, "commit": done.commit}, text)


@command(
    MAINTAIN,
    opt.argument("url"),
    opt.argument("name", required=False),
    opt.option("--follow", "Wait until it has ended, and draw a bar."),
    opt.option("--cancel", "End it: a driver that is at work on it stops, and `archive prune` deletes its results."),
    opt.limit("How many failing episodes to show"),
    writes=True,
)
def jobs(target: Target, name: str | None, follow: bool, cancel: bool, limit: int) -> Iterator[Output]:
    """List the jobs, or show one and the episodes that failed in it.

    A job is work over all that is stored, batch by batch: `episodes.map(fn, job="verifier-v2")`. It goes on by the same
    call. Steps that it has committed stay when it is cancelled.
    """
    from archive.jobs import COLUMNS

    if (follow or cancel) and name is None:
        raise UsageError("--follow and --cancel are of one job: give its name")
    found = target.open().jobs
    if name is None:
        yield listed(found.abouts, COLUMNS)
    else:
        job = found[name]
        if follow:
            _follow(job)
        if not cancel:
            yield _told(job, limit)
        elif (state := job.state) != "unfinished":
            raise UsageError(f"job {name!r} has been {state} already")
        else:
            yield _told(job, limit, "would end it here: what it has committed stays. Add --yes to do it")
            job.cancel()
            yield _told(job, limit)
    raise UsageError("--yes is for --cancel")


def _follow(job: Job) -> None:
    with bar(f"job {job.name}", of="batches") as advance:
        while True:
            began = time.monotonic()
            done, total, state = job.standing
            advance(done, total)
            if state != "unfinished":
                return
            time.sleep(max(LOOK_S, (time.monotonic() - began) / LOOK_PART))


def _told(job: Job, limit: int, *more: str) -> Output:
    """A job, and the episodes at which its function failed; None if a prune has deleted the list of them."""
    about = job.about
    try:
        failed = job.failed
    except ExpiredError:
        failed = None
    parts: list[Part] = [about | {"commits": len(about["commits"])}]
    if failed is None:
        parts.append("a prune has deleted the list of the episodes that failed, as the job has ended")
    elif failed:
        shown = [*failed.items()][: limit or None]
        parts.append(([dict(zip(FAILED, one, strict=True)) for one in shown], FAILED))
        parts += [f"{len(failed) - len(shown)} more: -n 0 shows all"] if len(shown) < len(failed) else []
    return Output(about | {"failures": failed}, [*parts, *more])

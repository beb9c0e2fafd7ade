"""Retention and labels: `label`, `labels`, `tag`, `tags`, `forget`, `undo`, `restore`, `prune`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from archive.base import UsageError, jsontree
from archive.cli import options as opt
from archive.cli.commands import KEEP, command
from archive.cli.options import Target
from archive.cli.output import Output, Part, listed
from archive.observe import bar

if TYPE_CHECKING:
    from archive.maintain import ForgetPlan, PrunePlan

TAG = ("name", "commit", "checkpoint", "run", "by", "created_at")
LABEL = ("episode_id", "key", "value", "by", "created_at", "commit")
BY = opt.option("--by NAME", "Your name, stored beside it.")


@command(
    KEEP,
    opt.argument("labels", nargs=-1, required=True, metavar="KEY=VALUE..."),
    opt.option("--id ids ID...", "Label this episode."),
    opt.where("Label the episodes that meet it, as in 'return > 10'."),
    BY,
    writes=True,
)
def label(target: Target, labels: tuple[str, ...], ids: tuple[str, ...], where: str | None, by: str | None) -> Output:
    """Set labels on episodes.

    As in `archive label URL --id e1 success=true`. VALUE may be JSON; null removes a label. The newest value of a key
    counts; earlier ones stay in the history.
    """
    given = opt.of_pairs(labels, "a label")
    if bool(ids) == (where is not None):
        raise UsageError("say which episodes are meant: by --id, or by --where")
    arc = target.open()
    found = arc.episodes if ids else arc.episodes.filter(where=where)
    names: list[str] = list(ids) or found.columns(["episode_id"])["episode_id"].to_pylist()
    arc.label(dict.fromkeys(names, given), by=by)
    commit = arc.head.number if names else None
    count = len(dict.fromkeys(names))
    text = f"{', '.join(given)} of {count} episode{'' if count == 1 else 's'}" + (f", commit {commit}" if names else "")
    return Output({"episodes": count, "labels": given, "commit": commit}, text)


@command(KEEP, opt.limit("How many rows, the newest"))
def labels(target: Target, limit: int) -> Output:
    """Show the label history, oldest first.

    `archive episodes` shows the values that count.
    """
    table = target.open().labels
    rows: list[dict[str, Any]] = (table.slice(max(0, table.num_rows - limit)) if limit else table).to_pylist()
    read = [row | {"value": None if row["value"] is None else jsontree.loads(row["value"])} for row in rows]
    return listed(read, LABEL)


@command(
    KEEP,
    opt.argument("name"),
    opt.option("--checkpoint NAME", "Tag this checkpoint; 'latest' is the newest whole one."),
    opt.IN_RUN,
    opt.option("--commit number N", "Tag this commit. Default: the newest.", type=int),
    BY,
    writes=True,
)
def tag(
    target: Target, name: str, checkpoint: str | None, run: str | None, number: int | None, by: str | None
) -> Output:
    """Name a checkpoint or a commit, and keep it.

    Other commands take the name as --commit.
    """
    if number is not None and (checkpoint or run):
        raise UsageError("--commit names a commit of its own: give it, or --checkpoint and --run")
    arc = target.open()
    what = opt.named_checkpoint(arc, checkpoint, run) if checkpoint or run else number
    made = arc.tag(name, what, by=by)
    named = f", checkpoint {made.checkpoint!r} of run {made.run!r}" if made.checkpoint else ""
    return Output(asdict(made), f"{made.name!r} is commit {made.commit}{named}")


@command(KEEP)
def tags(target: Target) -> Output:
    """List the tags, oldest first."""
    return listed([asdict(one) for one in target.open().tags.values()], TAG)


@command(
    KEEP,
    opt.option("--keep-last N", "Keep the newest N checkpoints of each run."),
    opt.option("--keep-every N", "Keep checkpoints whose step is a multiple of N."),
    opt.option("--keep-within TIME", "Keep checkpoints of the last 7d (s, m, h, d, w), by the store's clock."),
    opt.option("--keep-best METRIC[:min|max][:N]", "Keep the best checkpoints, as in return:3 or loss:min:3."),
    opt.option(
        "--episodes unreferenced|superseded",
        "Expire episodes that no kept checkpoint holds, or only steps that newer ones replaced.",
    ),
    opt.where("Expire episodes that meet it, as in 'return < 0'."),
    opt.option("--id ids ID...", "Expire this episode."),
    opt.of_run("Expire nothing of other runs."),
    opt.option("--redact", "Leave nothing of the episodes of --id: rewrite the shards that they share with others."),
    *opt.OF_JOB,
    writes=True,
)
def forget(
    target: Target,
    keep_last: int | None,
    keep_every: int | None,
    keep_within: str | None,
    keep_best: str | None,
    ids: tuple[str, ...],
    engine: str,
    workers: int | None,
    job: str | None,
    **asked: Any,
) -> Iterator[Output]:
    """Expire checkpoints and episodes (reversible until `prune`).

    Makes one commit and deletes nothing; `archive undo` reverses it. These stay whatever you ask: the newest checkpoint
    of each run and what its job resumed from, what a tag names, what another archive refers to, and the episodes of
    each checkpoint that stays. --engine, --workers and --job go with --redact.
    """
    from archive.checkpoint import keep_of

    keep = keep_of(keep_last, keep_every, keep_within, keep_best)
    arc = target.open()
    plan = arc.forget(keep, ids=ids or None, **asked)
    nothing = "nothing is to be forgotten" if plan.empty else ""
    yield _planned(plan, "" if plan.obstacles else nothing or "nothing is forgotten yet: add --yes to do it")
    with bar("forget", [arc]) as advance:
        done = plan.commit(engine=engine, workers=workers, job=job, progress=advance)
    yield _planned(done, nothing)


def _planned(plan: ForgetPlan | PrunePlan, *more: str, code: int = 0) -> Output:
    """A plan of what goes and what stays, and whether it was carried out."""
    parts: list[Part] = [f"{name}: {value}" for name, value in plan.about.items() if value is not None]
    for _, columns, rows in plan.tables:
        if rows:
            parts.append(([dict(zip(columns, row, strict=True)) for row in rows], columns))
    return Output(plan.to_json(), [*parts, *plan.warnings, *filter(None, more)], code=code)


@command(KEEP, writes=True)
def undo(target: Target) -> Iterator[Output]:
    """Bring back what the newest `forget` expired.

    What was written since stays.
    """
    arc = target.open()
    number = arc.forgotten_last.number
    text = f"would bring back what commit {number} expired: add --yes to do it"
    yield Output({"commit": None, "undoes": number}, text)
    head = arc.undo().head
    text = f"commit {head.number} brings back what commit {head.undoes} expired"
    yield Output({"commit": head.number, "undoes": head.undoes}, text)


@command(KEEP, opt.option("--commit number N", "The commit to restore.", type=int, required=True), writes=True)
def restore(target: Target, number: int) -> Iterator[Output]:
    """Restore an earlier commit as a new one.

    Open writers can no longer commit.
    """
    arc = target.open()
    since = arc.head.number - number
    text = f"would go back before the newest {since} commits, and end the sessions of all writers: add --yes to do it"
    yield Output({"commit": None, "restores": number}, text)
    head = arc.restore(number).head
    text = f"commit {head.number} is as commit {number} was; open new writers"
    yield Output({"commit": head.number, "restores": number}, text)


@command(
    KEEP,
    opt.option("--older-than TIME", "Delete only objects older than this: 90m, 24h or 7d.", default="24h"),
    opt.option("--force", "Allow less than an hour: you promise that nobody else is at work here."),
    opt.option("--per-second N", "Delete at most N objects a second.", type=opt.ABOVE_0),
    writes=True,
)
def prune(target: Target, older_than: str, force: bool, per_second: float | None) -> Iterator[Output]:
    """Garbage collection: delete expired and leftover objects.

    Deletes what `archive forget` expired and what crashed writers left behind, by the age that the store's clock tells.
    Exit code 1 if objects could not be deleted; the next prune tries them again.
    """
    arc = target.open()
    plan = arc.prune(older_than, force=force)
    yield _planned(plan, "" if plan.empty else "nothing is deleted yet: add --yes")
    with bar("prune", [arc]) as advance:
        done = plan.commit(per_second=per_second, progress=advance)
    yield _planned(done, code=1 if done.errors else 0)

"""Looking after an archive: whether all is there as it was written (`verify`, `repair`), which checkpoints and
episodes are to go (`forget`, `undo`, `restore`, `prune`), names for commits and labels of episodes (`tag`, `tags`,
`label`, `labels`), and what it needs of S3 (`policy`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from archive.base import NotFoundError, UsageError, size
from archive.cli import output
from archive.cli.options import Target, limit, named_checkpoint, of_pairs, of_run, on_archive, where
from archive.cli.output import bar

if TYPE_CHECKING:
    from archive.maintain import Report, UpkeepPlan

YES = click.option("--yes", is_flag=True, help="Do it; without this, say what would be done.")


@click.command()
@on_archive(time_travel=False)
@click.option("--deep", is_flag=True, help="Read every byte, and every step as a reader does.")
def verify(target: Target, deep: bool) -> None:
    """Check commits, tables, staged states and shards against their checksums, and tables against each other.

    It also checks what was journaled since the newest checkpoints; damage there is a warning. What no commit names is
    noted, with what it would have been.

    Exit code 1 if something is wrong; 2 if nothing is,
    but shards of other archives were left out for want of --allow-base.
    """
    from archive import maintain

    arc = target.open()
    with bar("verify", [arc]) as advance:
        total = len(arc.shards) + arc.head.number
        report = maintain.verify(arc, deep=deep, progress=lambda r: advance(r.shards + r.commits, total))
    target.answer({"sound": report.sound} | asdict(report), lambda: _show_report(report, deep, arc.url))
    if not report.sound:
        raise click.exceptions.Exit(1 if report.findings else 2)


def _show_judged(report: Report, url: str, contents: str) -> None:
    """Which checkpoints cannot be resumed, and what to go on from instead."""
    from archive.checkpoint import resumption

    broken = {one.run for one in report.checkpoints if one.problem}
    for one in report.checkpoints:
        about = f"checkpoint {one.name!r} (commit {one.commit}) of run {one.run!r}"
        if one.problem:
            output.say(f"{about} cannot be resumed: {one.problem}")
        elif one.run in broken:
            output.say(f"{about} is the newest sound one{contents}; {resumption.go_on(url, one.commit)}")
        else:
            output.say(f"{about} is sound{contents}; nothing above concerns it")
    for run in sorted(broken - {one.run for one in report.checkpoints if not one.problem}):
        output.say(f"no checkpoint of run {run!r} is sound: put what is missing back from a copy")


def _show_report(report: Report, deep: bool, url: str) -> None:
    looked = f"{report.commits} commits, {report.manifests} tables, {report.states} states, {report.shards} shards"
    looked += f", {report.journaled} objects of journals" if report.journaled else ""
    output.say(f"{looked}, {size(report.bytes)} of shards read{'' if deep else ' (--deep reads all)'}")
    contents = "" if deep else "; contents were not read: --deep does"
    if report.findings:
        example = "episodes there, for example"
        rows = [{"object": f.object, "problem": f.problem, example: list(f.episodes)} for f in report.findings]
        output.table(rows, ("object", "problem", example))
        _show_judged(report, url, contents)
    elif report.sound:
        output.say(f"all sound{contents}")
    if report.warnings:
        output.say("what was journaled since the newest checkpoint cannot all be recovered:")
        output.table([{"object": f.object, "problem": f.problem} for f in report.warnings], ("object", "problem"))
    if report.notes:
        output.say("what no commit names (a writer that died leaves it; so does a commit that was removed):")
        output.table([{"object": f.object, "what": f.problem} for f in report.notes], ("object", "what"))
    if report.not_allowed:
        options = " ".join(f"--allow-base {output.cell(url, limit=None)}" for url in report.not_allowed)
        output.say(
            f"not checked: {sum(report.not_allowed.values())} shards that lie in other archives, which were not "
            f"allowed; if you trust them, add {options}"
        )


@click.command()
@on_archive(time_travel=False, writes=True)
@YES
def repair(target: Target, yes: bool) -> None:
    """Go on from the commit before a damaged newest one, or without newest ones that are missing.

    Stop all writers first.
    """
    from archive import maintain
    from archive.store import Storage

    storage = Storage.connect(
        target.url, target.storage_options, deadline_s=target.deadline_s, single_writer=target.single_writer
    )
    if yes:
        done = maintain.repair(storage)
        kept = f"; the damaged bytes are kept as {done.kept_as}" if done.kept_as else ", nor do those before it"
        target.answer(asdict(done), f"commit {done.commit} now changes nothing{kept}")
        return
    try:
        number, they = maintain.damaged_commit(storage), "it"
        what = f"an empty commit in the place of the damaged commit {number}, and keep its bytes beside"
    except (UsageError, NotFoundError):
        if not (gone := maintain.missing_commits(storage)):
            raise
        number, they = gone.stop - 1, "they"
        what = f"empty commits in the place of those that are missing, {gone.start} to {number}"
    text = f"would put {what}; what only {they} made visible stays in the store, unseen"
    target.answer({"commit": number, "kept_as": None}, f"{text}. Stop all writers, then add --yes")


@click.command()
@on_archive(time_travel=False, writes=True)
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="The newest N checkpoints of each run stay.")
@click.option("--keep-every", type=click.IntRange(1), metavar="N", help="Those whose step is a multiple of N stay.")
@click.option("--keep-within", metavar="TIME", help="Those of the last 7d (s, m, h, d, w) stay, by the store's clock.")
@click.option("--keep-best", metavar="METRIC[:min|max][:N]", help="The best stay, as in return:3 or loss:min:3.")
@click.option(
    "--episodes",
    type=click.Choice(["unreferenced", "superseded"]),
    help="Episodes that no such checkpoint holds go, or only steps that newer ones took the place of.",
)
@where("Episodes that meet it may go, as in 'return < 0'.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="This episode may go. May be repeated.")
@of_run
@click.option("--redact", is_flag=True, help="Nothing of the episodes of --id may be left: shards are written anew.")
@YES
def forget(
    target: Target, keep_last: int | None, keep_every: int | None, keep_within: str | None, keep_best: str | None,
    ids: tuple[str, ...], yes: bool, **asked: Any,
) -> None:  # fmt: skip
    """Expire checkpoints and episodes, by one commit. Deletes nothing; `archive undo` takes it back.

    What stays whatever is asked: the newest of each run and what its job goes on with, what tags name, what other
    archives refer to, and episodes that a checkpoint that stays holds.
    """
    from archive.checkpoint import keep_of

    keep = keep_of(keep_last, keep_every, keep_within, keep_best)
    plan = target.open().forget(keep, ids=ids or None, dry_run=not yes, **asked)
    ending = "nothing is to be forgotten" if plan.empty else "nothing is forgotten yet: add --yes to do it"
    target.answer(plan.to_json(), lambda: _show_plan(plan, "" if plan.made or plan.obstacles else ending))


def _show_plan(plan: UpkeepPlan, ending: str) -> None:
    """Print what goes and what stays; `ending`, where it is not done yet."""
    for name, value in plan.about.items():
        if value is not None:
            output.say(f"{name}: {value}")
    for _, columns, rows in plan.tables:
        if rows:
            output.table([dict(zip(columns, row, strict=True)) for row in rows], columns)
    for warning in plan.warnings:
        output.say(warning)
    if ending:
        output.say(ending)


@click.command()
@on_archive(time_travel=False, writes=True)
@YES
def undo(target: Target, yes: bool) -> None:
    """Bring back what the newest `archive forget` let go of; what came since stays."""
    arc = target.open()
    if not yes:
        number = arc.forgotten_last.number
        text = f"would bring back what commit {number} let go of: add --yes to do it"
        target.answer({"commit": None, "undoes": number}, text)
        return
    head = arc.undo().head
    about = {"commit": head.number, "undoes": head.undoes}
    target.answer(about, f"commit {head.number} brings back what commit {head.undoes} let go of")


@click.command()
@on_archive(time_travel=False, writes=True)
@click.option("--commit", "number", type=int, required=True, metavar="N", help="Go back to this commit.")
@YES
def restore(target: Target, number: int, yes: bool) -> None:
    """Restore an earlier commit as a new one. Whoever writes now can no longer commit."""
    arc = target.open()
    if not yes:
        since = arc.head.number - number
        text = (
            f"would go back before the newest {since} commits, and end the sessions of all writers: add --yes to do it"
        )
        target.answer({"commit": None, "restores": number}, text)
        return
    head = arc.restore(number).head
    text = f"commit {head.number} is as commit {number} was; open new writers"
    target.answer({"commit": head.number, "restores": number}, text)


@click.command()
@on_archive(time_travel=False, writes=True)
@click.option("--older-than", default="24h", show_default=True, metavar="TIME", help="As 90m, 24h or 7d.")
@YES
@click.option("--force", is_flag=True, help="Permit less than an hour: you promise that nobody else is at work here.")
@click.option(
    "--per-second", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Delete at most N objects a second."
)
def prune(target: Target, older_than: str, yes: bool, force: bool, per_second: float | None) -> None:
    """Delete what was forgotten, and what crashes left behind, if that is older; by the store's clock.

    Exit code 1 if objects could not be deleted; the next prune tries them again.
    """
    arc = target.open()
    plan = arc.prune(older_than, force=force)
    if yes:
        with bar("prune", [arc]) as advance:
            plan = plan.commit(per_second=per_second, progress=advance)
    ending = "" if yes or plan.empty else "nothing is deleted yet: add --yes"
    target.answer(plan.to_json(), lambda: _show_plan(plan, ending))
    if plan.errors:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("role", type=click.Choice(["reader", "writer", "pruner"]))
@on_archive(time_travel=False)
def policy(target: Target, role: str) -> None:
    """Print what ROLE of the archive at URL needs of S3, and no more, as an IAM policy.

    URL: s3://bucket/prefix, of one archive or of all below it. Nothing is connected to.
    """
    from archive.store import policy as policy_of

    output.as_json(policy_of(role, target.url))


TAG = ("name", "commit", "checkpoint", "run", "by", "created_at")
LABEL = ("episode_id", "key", "value", "by", "created_at", "commit")


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("name")
@click.option("--checkpoint", metavar="NAME", help="Tag this checkpoint; `latest` is the newest whole one.")
@of_run
@click.option("--commit", "number", type=int, metavar="N", help="Tag this commit. Default: the newest.")
@click.option("--by", metavar="WHO", help="Who tags it.")
def tag(target: Target, name: str, checkpoint: str | None, run: str | None, number: int | None, by: str | None) -> None:
    """Name a checkpoint or a commit, for --commit of other commands. What it names is kept."""
    if number is not None and (checkpoint or run):
        raise UsageError("--commit names a commit of its own: give it, or --checkpoint and --run")
    arc = target.open()
    what = named_checkpoint(arc, checkpoint, run) if checkpoint or run else number
    made = arc.tag(name, what, by=by)
    named = f", checkpoint {made.checkpoint!r} of run {made.run!r}" if made.checkpoint else ""
    target.answer(asdict(made), f"{made.name!r} is commit {made.commit}{named}")


@click.command()
@on_archive()
def tags(target: Target) -> None:
    """The tags, oldest first."""
    target.table([asdict(one) for one in target.open().tags.values()], TAG)


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("labels", nargs=-1, required=True, metavar="KEY=VALUE...")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Of this episode. May be repeated.")
@where("Of the episodes that meet it, as in 'return > 10'.")
@click.option("--by", metavar="WHO", help="Who says it.")
def label(target: Target, labels: tuple[str, ...], ids: tuple[str, ...], where: str | None, by: str | None) -> None:
    """Set labels on episodes: `archive label URL --id e1 success=true`.

    VALUE may be JSON; null takes a label back. The newest of a key counts, all others are kept.
    """
    said = of_pairs(labels, "a label")
    if bool(ids) == (where is not None):
        raise UsageError("say which episodes are meant: by --id, or by --where")
    arc = target.open()
    found = arc.episodes if ids else arc.episodes.filter(where=where)
    names: list[str] = list(ids) or found.columns(["episode_id"])["episode_id"].to_pylist()
    arc.label(dict.fromkeys(names, said), by=by)
    commit = arc.head.number if names else None
    count = len(dict.fromkeys(names))
    text = f"{', '.join(said)} of {count} episode{'' if count == 1 else 's'}" + (f", commit {commit}" if names else "")
    target.answer({"episodes": count, "labels": said, "commit": commit}, text)


@click.command()
@limit("How many rows, of the newest; 0 for all.")
@on_archive()
def labels(target: Target, limit: int) -> None:
    """The label history, oldest first; `archive episodes` has the values that count."""
    from archive.base import jsontree

    table = target.open().labels
    rows: list[dict[str, Any]] = (table.slice(max(0, table.num_rows - limit)) if limit else table).to_pylist()
    read = [row | {"value": None if row["value"] is None else jsontree.loads(row["value"])} for row in rows]
    target.table(read, LABEL)

"""Tool: `archive verify`, `repair`: whether all is there as it was written, and going on where a commit is damaged."""

from __future__ import annotations

from dataclasses import asdict

import click

from archive.cli import output
from archive.cli.options import Target, on_archive
from archive.cli.progress import bar


@click.command()
@on_archive(time_travel=False)
@click.option("--deep", is_flag=True, help="Read every byte, not only what comes first.")
def verify(target: Target, deep: bool) -> None:
    """Check commits, tables, staged states and shards against their checksums.

    Exit code 1 if something is wrong; 2 if nothing is, but shards of other archives were left out for want of --allow-base.
    """
    from archive.maintain import maintenance

    arc = target.open()
    with bar("verify", [arc]) as advance:
        total = len(arc.shards) + arc.head.number
        report = maintenance.verify(arc, deep=deep, progress=lambda r: advance(r.shards + r.commits, total))
    if target.as_json:
        output.as_json({"sound": report.sound} | asdict(report))
    else:
        looked = f"{report.commits} commits, {report.manifests} tables, {report.states} states, {report.shards} shards"
        output.say(f"{looked}, {output.size(report.bytes)} of shards read{'' if deep else ' (--deep reads all)'}")
        if report.findings:
            rows = [(f.object, f.problem, list(f.episodes)) for f in report.findings]
            output.table(rows, ("object", "problem", "episodes there, for example"))
        elif report.sound:
            output.say("all sound")
        if report.not_allowed:
            output.say(_left_out(report.not_allowed))
    if not report.sound:
        raise click.exceptions.Exit(1 if report.findings else 2)


def _left_out(shards: dict[str, int]) -> str:
    """What was not looked at, and how to have it looked at."""
    options = " ".join(f"--allow-base {output.cell(url, limit=None)}" for url in shards)
    return (
        f"not checked: {sum(shards.values())} shards that lie in other archives, which were not allowed; if you trust them, "
        f"add {options}"
    )


@click.command()
@on_archive(time_travel=False, writes=True)
@click.option("--yes", is_flag=True, help="Do it; without this, say what would be done.")
def repair(target: Target, yes: bool) -> None:
    """Go on from the commit before a damaged newest one. Stop all writers first."""
    from archive.maintain import maintenance
    from archive.store import Storage

    storage = Storage.connect(
        target.url, target.storage_options, deadline_s=target.deadline_s, single_writer=target.single_writer
    )
    if not yes:
        number = maintenance.damaged_commit(storage)
        if target.as_json:
            output.as_json({"commit": number, "kept_as": None})
            return
        output.say(
            f"would put an empty commit in the place of the damaged commit {number}, and keep its bytes beside; what "
            "only it made visible stays in the store, unseen. Stop all writers, then add --yes"
        )
        return
    done = maintenance.repair(storage)
    if target.as_json:
        output.as_json(asdict(done))
    else:
        output.say(f"commit {done.commit} now changes nothing; the damaged bytes are kept as {done.kept_as}")

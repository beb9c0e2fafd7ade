"""Tool: `archive verify`, `repair`: whether all is there as it was written, and going on where a commit is damaged."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from archive.base import size
from archive.cli import output
from archive.cli.options import Target, on_archive
from archive.cli.progress import bar

if TYPE_CHECKING:
    from archive.maintain import maintenance


@click.command()
@on_archive(time_travel=False)
@click.option("--deep", is_flag=True, help="Read every byte, not only what comes first.")
def verify(target: Target, deep: bool) -> None:
    """Check commits, tables, staged states and shards against their checksums.

    Exit code 1 if something is wrong; 2 if nothing is,
    but shards of other archives were left out for want of --allow-base.
    """
    from archive.maintain import maintenance

    arc = target.open()
    with bar("verify", [arc]) as advance:
        total = len(arc.shards) + arc.head.number
        report = maintenance.verify(arc, deep=deep, progress=lambda r: advance(r.shards + r.commits, total))
    target.answer({"sound": report.sound} | asdict(report), lambda: _show(report, deep))
    if not report.sound:
        raise click.exceptions.Exit(1 if report.findings else 2)


def _show(report: maintenance.Report, deep: bool) -> None:
    looked = f"{report.commits} commits, {report.manifests} tables, {report.states} states, {report.shards} shards"
    output.say(f"{looked}, {size(report.bytes)} of shards read{'' if deep else ' (--deep reads all)'}")
    if report.findings:
        example = "episodes there, for example"
        rows = [{"object": f.object, "problem": f.problem, example: list(f.episodes)} for f in report.findings]
        output.table(rows, ("object", "problem", example))
    elif report.sound:
        output.say("all sound")
    if report.not_allowed:
        options = " ".join(f"--allow-base {output.cell(url, limit=None)}" for url in report.not_allowed)
        output.say(
            f"not checked: {sum(report.not_allowed.values())} shards that lie in other archives, which were not "
            f"allowed; if you trust them, add {options}"
        )


@click.command()
@on_archive(time_travel=False, writes=True)
@click.option("--yes", is_flag=True, help="Do it; without this, say what would be done.")
def repair(target: Target, yes: bool) -> None:
    """Go on from the commit before a damaged newest one. Stop all writers first."""
    from archive.maintain import repairing
    from archive.store import Storage

    storage = Storage.connect(
        target.url, target.storage_options, deadline_s=target.deadline_s, single_writer=target.single_writer
    )
    if yes:
        done = repairing.repair(storage)
        text = f"commit {done.commit} now changes nothing; the damaged bytes are kept as {done.kept_as}"
        target.answer(asdict(done), text)
        return
    number = repairing.damaged_commit(storage)
    text = (
        f"would put an empty commit in the place of the damaged commit {number}, and keep its bytes beside; what only "
        "it made visible stays in the store, unseen. Stop all writers, then add --yes"
    )
    target.answer({"commit": number, "kept_as": None}, text)

"""`cost`: the dollars of a run, from its figures or from an archive."""

from __future__ import annotations

from typing import Any

import click

from archive.cli import options as opt
from archive.cli.commands import MAINTAIN, command
from archive.cli.options import ABOVE_0, Target
from archive.cli.output import Output

_PART, _MUCH = click.FloatRange(0, 1), click.FloatRange(0)


@command(
    MAINTAIN,
    opt.argument("url", required=False, default=""),
    opt.of_run("The run whose figures count; needed if the archive has several."),
    opt.option("--store stores NAME...", "s3, s3-express, gcs or r2; the first one's prices order the causes."),
    opt.option("--ranks N", "Ranks of the world."),
    opt.option("--env-rows N", "Env rows of a rank."),
    opt.option("--steps-s N", "Steps that all ranks add in a second.", type=ABOVE_0),
    opt.option("--step-bytes N", "Bytes of a step, as stored.", type=ABOVE_0),
    opt.option("--episode-steps N", "Steps of an episode.", type=ABOVE_0),
    opt.option("--call-steps N", "Steps that one call of a writer adds.", type=_MUCH),
    opt.option("--journal-s SECONDS", "A journal that is so far behind at most; 0: none.", type=_MUCH),
    opt.option("--journal-ranks N", "Ranks that share a journal's objects, as those of a node may."),
    opt.option("--group/--no-group", "Whether the ranks have a process group of torch.", default=None),
    opt.option("--checkpoint-s SECONDS", "From one checkpoint to the next.", type=ABOVE_0),
    opt.option("--wait-s SECONDS", "That ranks wait there for the slowest.", type=_MUCH),
    opt.option("--live-steps N", "Steps in all buffers together.", type=_MUCH),
    opt.option("--column-bytes N", "Bytes of columns that change, a live step.", type=_MUCH),
    opt.option("--state-bytes N", "Bytes of other state, a rank.", type=_MUCH),
    opt.option("--keep-last N", "Retain the newest N checkpoints; without a rule all stay."),
    opt.option("--keep-within TIME", "Retain those that are younger, as in 7d."),
    opt.option("--forget checkpoints|unreferenced", "What goes with checkpoints that are not retained."),
    opt.option("--prunes-day N", "Prunes a day.", type=_MUCH),
    opt.option("--resumes-day N", "Resumes a day.", type=_MUCH),
    opt.option("--viewers N", "Viewers that follow the run.", type=click.IntRange(0)),
    opt.option("--samples-s N", "Random samples a second that no memory has.", type=_MUCH),
    opt.option("--sample-bytes N", "That each brings: the chunk that it lies in.", type=_MUCH),
    opt.option("--exports-day N", "How often a day all that is stored is read.", type=_MUCH),
    opt.option("--egress PART", "Part of what readers get that leaves the region.", type=_PART),
    looks_back=False,
)
def cost(
    target: Target,
    run: str | None,
    stores: tuple[str, ...],
    keep_last: int | None,
    keep_within: str | None,
    **given: Any,
) -> Output:
    """Tell what a run costs at S3, S3 Express, GCS and R2, by cause.

    Requests and bytes, in dollars a month by list prices with their date, the largest cause first; what makes it a
    tenth; limits of the stores that it comes near. With URL the figures are those of the run's newest checkpoints;
    options take their place. Without URL the command connects to nothing.
    """
    from archive.checkpoint import keep_of
    from archive.costs import cost as cost_of

    figures = {name: value for name, value in given.items() if value is not None}
    if "journal_s" in figures:
        figures["journal_s"] = figures["journal_s"] or None
    if (keep := keep_of(keep_last, None, keep_within, None)) is not None:
        figures["keep"] = keep
    arc = target.open() if target.url else None
    found = cost_of(arc, run=run, **({"stores": stores} if stores else {}), **figures)
    return Output(found.to_json(), str(found))

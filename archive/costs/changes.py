"""Pure, no I/O: what to change first in a run so that it costs a tenth, and the limits of stores that it comes near."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from archive.checkpoint import Keep
from archive.checkpoint import requests as asked
from archive.costs.causes import causes
from archive.costs.requests import IDLE_LOOK_S
from archive.costs.workload import Workload
from archive.store import Prices

WANTED, LEAST = 0.1, 0.02  # of the dollars: the aim; what a change must save
MOST_JOURNAL_S, MOST_CHECKPOINT_S = 60.0, 6 * 3600.0
NODE_RANKS, WINDOW_STEPS = 8, 16
NEAR = 0.5  # of what a store promises


@dataclass(frozen=True)
class Saving:
    """A change of a run, and the dollars a day that it costs with it and with those before. loses: what it gives up."""

    change: str
    loses: str
    dollars_day: float


class _Tried(NamedTuple):
    """A change that may save, what it gives up, and the run with it."""

    words: str
    run: Workload
    loses: str = ""


def dollars_day(run: Workload, prices: Prices) -> float:
    """The dollars of a day of this run."""
    return sum(one.dollars(prices) for one in causes(run))


def savings(run: Workload, prices: Prices) -> list[Saving]:
    """The changes that bring a run to a tenth of its cost, or as near as they do: first those that give up nothing, of
    these and of the others the one that saves most."""
    out: list[Saving] = []
    now = dollars_day(run, prices)
    wanted = WANTED * now
    for costly in (False, True):
        while now > wanted:
            done = {one.change for one in out}
            new = [one for one in _changes(run) if bool(one.loses) == costly and one.words not in done]
            tried = [(dollars_day(one.run, prices), one) for one in new]
            least, best = min(tried, default=(now, None), key=lambda one: one[0])
            if best is None or least > (1 - LEAST) * now:
                break
            now, run = least, best.run
            out.append(Saving(best.words, best.loses, now))
    return out


def _changes(run: Workload) -> Iterator[_Tried]:
    if run.journal_s is not None:
        yield from _of_journal(run, run.journal_s)
    if not run.group and run.ranks > 1:
        yield _Tried("a process group of torch: one rank looks for requests, not each", replace(run, group=True))
    if run.checkpoint_s < MOST_CHECKPOINT_S:
        rarer = min(10 * run.checkpoint_s, MOST_CHECKPOINT_S)
        loses = "a crash loses more" if run.journal_s is None else "a recovery reads more"
        yield _Tried(f"a checkpoint every {rarer / 3600:g} h", replace(run, checkpoint_s=rarer), loses)
    count = 3 if run.kept_steps_s is None or (run.kept_checkpoints or 0) > 3 else 1
    if run.keep != Keep(last=count):
        kept = replace(run, keep=Keep(last=count), forget="unreferenced", prunes_day=max(1.0, run.prunes_day))
        loses = "older checkpoints, and steps that only they hold"
        yield _Tried(f"keep=Keep(last={count}), forget='unreferenced', a prune a day", kept, loses)
    if run.samples_s:
        drawn = replace(run, samples_s=run.samples_s / WINDOW_STEPS)
        yield _Tried(f"windows of {WINDOW_STEPS} steps, or a larger cache: a range for each {WINDOW_STEPS}", drawn)
    if run.exports_day > 1 / 7:
        yield _Tried("an export a week", replace(run, exports_day=1 / 7), "exports are older")
    if run.egress:
        yield _Tried("read in the store's own region", replace(run, egress=0.0))


def _of_journal(run: Workload, journal_s: float) -> Iterator[_Tried]:
    if run.journal_ranks < (shared := min(NODE_RANKS, run.ranks)):
        yield _Tried(f'journal="node": {shared} ranks share an object', replace(run, journal_ranks=shared))
    if journal_s < MOST_JOURNAL_S:
        longer = min(10 * journal_s, MOST_JOURNAL_S)
        loses = f"a crash loses up to {longer:g} s"
        yield _Tried(f"journal_s={longer:g}, not {journal_s:g}", replace(run, journal_s=longer), loses)
    if run.call_steps < run.episode_steps:
        words = "whole episodes, by w.add_episode: no tick where nothing was added"
        loses = "an episode is durable once it has ended"
        yield _Tried(words, replace(run, call_steps=run.episode_steps), loses)


# -- limits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """Requests a second to one place at its busiest."""

    what: str
    prefix: str
    writes_s: float = 0.0
    reads_s: float = 0.0


def rates(run: Workload) -> list[Rate]:
    """The rates of a run's requests, where they are highest."""
    steps = "journal/" if run.journals else "shards/"
    together = f"{run.ranks:,} ranks that save a checkpoint at once"
    out = [
        Rate("the journal" if run.journals else "shards", steps, writes_s=run.objects_s),
        Rate(together, "states/", writes_s=run.ranks, reads_s=run.ranks),
        Rate(f"{run.ranks:,} ranks that wait for its commit", "commits/", reads_s=run.ranks),
        Rate("ranks that look for requests", "sessions/", reads_s=0.0 if run.group else run.ranks / asked.ASKED_POLL_S),
        Rate("random samples", steps, reads_s=run.samples_s),
        Rate("viewers", "commits/", reads_s=run.viewers / IDLE_LOOK_S),
    ]
    return [one for one in out if one.writes_s or one.reads_s]


def warnings(run: Workload, prices: Prices) -> list[str]:
    """Sentences on the limits of a store that a run comes near, or passes."""
    return [*_of_rates(run, prices), *_of_names(run, prices)]


def _of_rates(run: Workload, prices: Prices) -> Iterator[str]:
    for one in rates(run):
        for verb, rate, limit in (("writes", one.writes_s, prices.writes_s), ("reads", one.reads_s, prices.reads_s)):
            if limit is not None and rate >= NEAR * limit:
                words = "more than" if rate > limit else "near"
                yield (
                    f"{prices.store}: {one.what}: {rate:,.0f} {verb} a second below {one.prefix}, {words} the "
                    f"{limit:,.0f} that a {prices.within} takes at first; {prices.beyond}"
                )


def _of_names(run: Workload, prices: Prices) -> Iterator[str]:
    if prices.one_key_s is not None and prices.one_key_s * run.checkpoint_s <= 1 / NEAR:
        yield (
            f"{prices.store}: a commit every {run.checkpoint_s:g} s: it takes {prices.one_key_s:g} write a second of "
            "one name, and writers that meet try the same one"
        )

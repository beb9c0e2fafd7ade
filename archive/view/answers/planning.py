"""What would be done, before anybody does it: a resume on N ranks, and letting go. Nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archive.base import UsageError
from archive.view.answers.shown import Shown, checkpoint_at
from archive.view.web import Query, Reply, json_reply

if TYPE_CHECKING:
    from archive import Keep
    from resharding import Plan

MOST_RANKS = 1024
POLICIES = ("balanced", "interleaved", "by_trajectory")


def plan(shown: Shown, query: Query) -> Reply:
    """What resuming the checkpoint `number=` on `ranks=` takes by `policy=`: {about, moved: [[from, to, steps]], ranks:
    [{episodes, steps, bytes, requests}], dropped}."""
    made = planned(shown, query)
    totals = zip(made.episodes, made.steps, made.cost(), strict=True)
    rows: list[dict[str, Any]] = [{"episodes": episodes, "steps": steps, **cost} for episodes, steps, cost in totals]
    moved = [[source, target, steps] for (source, target), steps in sorted(made.moved.items())]
    return json_reply({"about": made.about, "moved": moved, "ranks": rows, "dropped": made.dropped})


def planned(shown: Shown, query: Query) -> Plan:
    """The plan of the checkpoint `number=` for `ranks=` by `policy=`; UsageError for more ranks than anybody waits for:
    MOST_RANKS, or those that the checkpoint has."""
    import resharding

    ck = checkpoint_at(shown.at(query), query.number("number", 0))
    ranks, policy = query.number("ranks", ck.world_size), query.text("policy") or POLICIES[0]
    most = max(MOST_RANKS, ck.world_size)
    if not 1 <= ranks <= most or policy not in POLICIES:
        raise UsageError(f"ranks={ranks}, policy={policy!r:.40}: 1 to {most} ranks by {', '.join(POLICIES)}")
    return resharding.plan(ck, ranks, policy=policy, tails="ignore")


def forgetting(shown: Shown, query: Query) -> Reply:
    """What forgetting would let go of, and why the rest stays: `last=`, `every=`, those `within=` "7d" and the `best=`
    (METRIC[:min|max][:N]) checkpoints are kept; `unreferenced=1` lets go of episodes that none of them holds, `where=`
    of those that meet it. Done is it elsewhere: `command` has the options of `archive forget`."""
    run, where = query.text("run") or None, query.text("where").strip() or None
    episodes = "unreferenced" if query.flag("unreferenced") else None
    made = shown.at(query).forget(_keep(query), episodes, where, run=run)
    return json_reply(made.to_json() | {"command": _command(query)})


def _keep(query: Query) -> Keep | None:
    """The policy that is asked for; None for none. UsageError for what is none."""
    from archive.checkpoint import keep_of

    last, every = query.number("last", 0) or None, query.number("every", 0) or None
    return keep_of(last, every, query.text("within").strip() or None, query.text("best").strip() or None)


def _command(query: Query) -> str:
    """What carries it out, to be copied."""
    import shlex

    options = ("last", "every", "within", "best")
    words = [word for name in options if (text := query.text(name).strip()) for word in (f"--keep-{name}", text)]
    words += [word for name in ("where", "run") if (text := query.text(name).strip()) for word in (f"--{name}", text)]
    return shlex.join([*words, *(["--episodes", "unreferenced"] if query.flag("unreferenced") else [])])

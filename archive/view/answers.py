"""Questions of the browser, and the function that answers each: of an archive that is shown, what is asked for."""

from __future__ import annotations

from collections.abc import Callable

from archive.view.checkpoints import checkpoint, checkpoints, column, forgetting, plan, tails
from archive.view.episode import episode, group, rollout
from archive.view.fields import curves, field_rows, steps
from archive.view.labels import next_unlabelled, offered, said_of, say, say_of_all
from archive.view.pictures import pictures, strip
from archive.view.shown import Shown, news
from archive.view.tables import (
    about,
    check,
    distributions,
    histograms,
    names,
    neighbours,
    rows,
    trend,
    values,
    writable,
)
from archive.view.wire import Query, Reply

Answer = Callable[[Shown, Query], Reply]

QUESTIONS: dict[str, Answer] = {  # a GET each
    "about": about,
    "writable": writable,
    "episodes": rows,
    "neighbours": neighbours,
    "histograms": histograms,
    "names": names,
    "values": values,
    "check": check,
    "strip": strip,
    "distributions": distributions,
    "trend": trend,
    "episode": episode,
    "pictures": pictures,
    "curves": curves,
    "steps": steps,
    "field-rows": field_rows,
    "rollout": rollout,
    "group": group,
    "labels": offered,
    "news": news,
    "checkpoints": checkpoints,
    "checkpoint": checkpoint,
    "column": column,
    "tails": tails,
    "plan": plan,
    "forgetting": forgetting,
    "unlabelled": next_unlabelled,
    "said": said_of,
}
CHANGES: dict[str, Answer] = {  # a POST each
    "labels": say,
    "labels-of-all": say_of_all,
}

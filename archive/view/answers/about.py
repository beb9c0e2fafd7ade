"""What is shown: the archive, its runs, its columns; and whether one may write."""

from __future__ import annotations

from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

KINDS = {  # of the columns of each table of episodes; those of labels are what they are
    "number": ("length", "return", "update_count_min", "update_count_max", "env_id", "rank", "commit"),
    "flag": ("complete", "terminated", "truncated"),
    "time": ("created_at",),
    "list": ("model_weights_uuids",),
    "json": ("metadata",),
}
_KIND = {name: kind for kind, names in KINDS.items() for name in names}


def about(shown: Shown, query: Query) -> Reply:
    """What a page needs before it shows anything: url, id, commit, runs, columns and their kinds."""
    arc = shown.at(query)
    return json_reply(
        {
            "url": arc.url,
            "id": arc.id,
            "commit": arc.head.number,
            "newest": shown.arc.head.number,
            "pinned": shown.arc.pinned,
            "runs": list(arc.head.runs),
            "columns": {name: _KIND.get(name, "text") for name in arc.index.names},
        }
    )


def writable(shown: Shown, query: Query) -> Reply:
    """Whether one may label here, and if not, why."""
    return json_reply({"why_not": shown.unwritable})

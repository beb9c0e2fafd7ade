"""Engine: what is shown: the archive, its runs, its columns; and whether one may write."""

from __future__ import annotations

from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply


def about(shown: Shown, query: Query) -> Reply:
    """What a page needs before it shows anything: url, id, commit, runs, columns and their types."""
    arc = shown.at(query)
    index = arc.index
    return json_reply(
        {
            "url": arc.url,
            "id": arc.id,
            "commit": arc.head.number,
            "newest": shown.arc.head.number,
            "pinned": shown.arc.pinned,
            "episodes": len(index),
            "runs": list(arc.runs),
            "buffers": index.column("buffer").unique().to_pylist(),
            "columns": {name: str(index.column(name).type) for name in index.names},
        }
    )

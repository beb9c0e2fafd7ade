"""Committing the rows of one rank, between checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from archive.checkpoint import fresh_rows
from archive.manifest import Addition, Attempt, Change, Commit, CommitLog, Place
from archive.saved import RankRows


class RowCommits:
    """Commits of kind "commit", of one writer. `known_at`: the commit up to which the ids that there are were read; -1
    if nobody asked for them."""

    def __init__(self, log: CommitLog, place: Place) -> None:
        self._log = log
        self._place = place
        self.known_at = -1

    def known_ids(self) -> set[str]:
        """The ids of all episodes that there are; others come to be known as they are committed."""
        self.known_at = self._log.learn_ids().number
        return self._log.ids.names

    def commit(self, rows: RankRows, message: str | None) -> Commit:
        """Make these rows visible, of which there are some."""
        place, adds = self._place, partial(self._added, rows, message)
        # The same rows have the same key: a repeated call finds what an earlier one made without knowing.
        key = f"{place.session}/{place.rank}/rows-{rows.next_sequence - 1}"
        who, ids_at = (place.run, place.session, place.rank), max(0, self.known_at)
        return self._log.commit(key, Change("commit", adds, [place.newest], *who, ids_at))

    def _added(self, rows: RankRows, message: str | None, parent: Commit, attempt: Attempt) -> Addition:
        place = self._place
        fresh, sequences = fresh_rows(parent, place, {place.rank: rows})
        runs = parent.runs_with({place.run: replace(parent.runs[place.run], sequences=sequences)})
        return fresh._asdict(), {"runs": runs, "message": message}

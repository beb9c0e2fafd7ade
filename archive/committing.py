"""Committing the rows of one rank, between checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from archive.base import DuplicateEpisodeError
from archive.checkpoint import RankRows, added, fresh_rows, ledger_files, stamped
from archive.manifest import Commit, CommitLog, Place, Snapshot, commits, tablefiles


class RowCommits:
    """Commits of kind "commit", of one writer. `known_at`: the commit up to which the ids that there are were read; -1
    if nobody asked for them."""

    def __init__(self, log: CommitLog, place: Place) -> None:
        self._storage = log.storage
        self._log = log
        self._place = place
        self.known_at = -1

    def known_ids(self) -> set[str]:
        """The ids of all episodes that there are."""
        self.known_at = self._log.catch_up().number
        return _ids(Snapshot(self._storage, self._log.head))

    def commit(self, rows: RankRows, claimed: Collection[str], message: str | None) -> Commit:
        """Make these rows visible, of which there are some; `claimed`: ids that the user gave to new episodes."""
        place = self._place

        def build(parent: Commit, attempt: int) -> Commit:
            commits.fence(parent, place.run, place.session)
            return self._draft(parent, rows, claimed, message, fold=attempt == 0)

        # The same rows have the same key: a repeated call finds what an earlier one made without knowing.
        return self._log.append(f"{place.session}/{place.rank}/rows-{rows.next_sequence - 1}", build)

    def _draft(
        self, parent: Commit, rows: RankRows, claimed: Collection[str], message: str | None, *, fold: bool
    ) -> Commit:
        """The commit of these rows, after writing the manifest files that it names."""
        place, storage = self._place, self._storage
        fresh, sequences = fresh_rows(parent, place, {place.rank: rows})
        self._check_claims(parent, claimed, fresh.segments["episode_id"].to_pylist())
        places = fresh.chunks
        chunk_file = tablefiles.write(storage, place.session, "chunks", places) if places.num_rows else None
        segments = stamped(fresh.segments, chunk_file)
        return parent.after(
            "commit",
            run=place.run,
            session=place.session,
            rank=place.rank,
            runs={**parent.runs, place.run: replace(parent.runs[place.run], sequences=sequences)},
            segments=tablefiles.add_rows(storage, place.session, "segments", parent, segments, fold=fold),
            chunks=chunk_file,
            added=added(fresh),
            message=message,
            **ledger_files(storage, place.session, parent, fresh.ledger, fold=fold),
        )

    def _check_claims(self, parent: Commit, claimed: Collection[str], fresh: Sequence[str]) -> None:
        """Ids given by the user may have been committed by another writer since they were claimed."""
        mine = set(claimed).intersection(fresh)
        if not mine or parent.number <= self.known_at:
            return
        clash = sorted(mine & _ids(Snapshot(self._storage, parent)))
        if clash:
            raise DuplicateEpisodeError(
                f"another writer committed an episode {clash[0]!r} at the same time ({len(clash)} in all); nothing was "
                "committed: write these episodes again under other ids, or with replace=True"
            )


def _ids(snapshot: Snapshot) -> set[str]:
    return set(snapshot.columns(["episode_id"])["episode_id"].to_pylist())

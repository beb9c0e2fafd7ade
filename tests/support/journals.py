"""Ranks that keep journals, tick by tick, and the plain model of what they held."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import archive
from archive import journal
from archive.base import layout
from archive.fields import dtypes
from archive.manifest import Commit, tables
from archive.shard import Member, groups, inflate
from archive.store import Storage


def keep(arc: archive.Archive, run: str, world_size: int, numbers: Mapping[int, int] | None = None) -> None:
    """Have the newest session of a run keep a journal, from these numbers on."""

    def build(parent: Commit, attempt: int) -> Commit:
        entry = replace(parent.runs[run], journal=numbers or dict.fromkeys(range(world_size), 0))
        made = parent.after("session", run=run, session=entry.session, runs={**parent.runs, run: entry})
        return replace(made, format=layout.with_feature(parent.format, layout.JOURNAL))

    arc._log().append(secrets.token_hex(8), build)
    arc.refresh()


class Rank:
    """A writer that journals what it has when it is told to."""

    def __init__(self, arc: archive.Archive, resume: Any = None, **options: Any) -> None:
        self.arc = arc
        self.writer = arc.writer(resume=resume, **options)
        self.storage: Storage = arc.storage
        self.number = 0
        self._done: set[int] = set()
        self._held = self._live()
        self._resumed = getattr(resume, "number", None)
        self._live_rows = None if resume is None else self._live_table()

    def _buffers(self) -> dict[str, Any]:
        return self.writer._buffers

    def _live_table(self) -> Any:
        from archive.write.cut import live_table

        w = self.writer
        parts = [
            live_table(name, (w.session, w.rank), b.live_set.runs(), b._foreign) for name, b in self._buffers().items()
        ]
        return tables.concat("live", parts)

    def _live(self) -> dict[str, set[tuple[str, int, int, int]]]:
        """Buffer -> addresses of its live steps."""
        out: dict[str, set[tuple[str, int, int, int]]] = {}
        for row in self._live_table().to_pylist():
            steps = range(row["lo"], max(row["hi"], row["lo"] + 1))
            stream = (row["session"], row["stream_rank"], row["stream_env"])
            out.setdefault(row["buffer"], set()).update((*stream, at) for at in steps)
        return out

    def tick(
        self, columns: Mapping[str, Any] | None = None, attributes: Mapping[str, Any] | None = None,
        progress: Any = None,
    ) -> list[str]:  # fmt: skip
        """Journal what came since the last time; the keys of its objects."""
        w = self.writer
        works = [work for work in w._sent() if id(work) not in self._done]
        self._done.update(map(id, works))
        written = w._pipeline.wait(works)
        now = self._live()
        parts: list[tuple[Any, list[Member]]] = []
        arrived: dict[str, set[tuple[str, int, int, int]]] = {}
        for one in written:
            if one.segments is None:
                continue
            for row in one.segments.to_pylist():
                steps = range(row["position"], row["position"] + max(row["length"], 1 if row["shard"] else 0))
                stream = (row["session"], row["rank"], row["env_id"])
                arrived.setdefault(row["buffer"], set()).update((*stream, at) for at in steps)
            parts.append((one.segments, [] if one.chunks is None else self._members(one.chunks)))
        gone = {
            name: sorted((self._held.get(name, set()) | arrived.get(name, set())) - now.get(name, set()))
            for name in {*self._held, *arrived}
        }
        self._held = now
        said = self._columns(columns or {})
        parts.append((tables.concat("segments", []), said[1]))
        keys = []
        for at, (segments, members) in enumerate(parts):
            last = at == len(parts) - 1
            keys.append(
                self._put(
                    segments,
                    members,
                    goes_on=not last,
                    gone={n: tuple((*g[:3], g[3], g[3] + 1) for g in of) for n, of in gone.items() if of}
                    if last
                    else {},
                    columns=said[0] if last else {},
                    attributes={"replay": {n: json.dumps(v) for n, v in (attributes or {}).items()}} if last else {},
                    progress=json.dumps(progress) if last and progress is not None else None,
                )
            )
        return keys

    def _members(self, chunks: Any) -> list[Member]:
        rows = chunks.to_pylist()
        data = self.storage.get(rows[0]["shard"])
        out = []
        for row in rows:
            part = data[row["offset"] : row["offset"] + row["size"]]
            plain = row["member"].endswith("zarr.json")
            out.append(
                Member(
                    row["member"],
                    inflate(part) if plain else part,
                    row["array"],
                    row["chunk"],
                    row["rows"],
                    row["crc32c"],
                )
            )
        return out

    def _columns(self, columns: Mapping[str, Any]) -> tuple[dict[str, Any], list[Member]]:
        """Values of all live steps of the main buffer, in live order."""
        if not columns:
            return {}, []
        rows = [row for row in self._live_table().to_pylist() if row["buffer"] == "replay" and row["hi"] > row["lo"]]
        steps = tuple((r["session"], r["stream_rank"], r["stream_env"], r["lo"], r["hi"]) for r in rows)
        stored = {name: dtypes.to_stored(np.asarray(value)) for name, value in columns.items()}
        arrays = {f"%columns/replay/{name}": array for name, (array, _) in stored.items()}
        said = {
            name: journal.JournalColumn(f"%columns/replay/{name}", logical, steps)
            for name, (_, logical) in stored.items()
        }
        return {"replay": said}, groups.encode(arrays, attributes={})

    def _put(self, segments: Any, members: list[Member], **said: Any) -> str:
        w = self.writer
        key = layout.journal_key(w.session, w.rank, self.number)
        shards = [None if s is None else key for s in segments["shard"].to_pylist()]
        rows = {
            "segments": tables.from_columns(
                "segments", {n: segments[n] for n in segments.column_names} | {"shard": shards}
            )
        }
        counts = {"segments": segments.num_rows}
        if self.number == 0 and self._live_rows is not None:
            rows["live"] = self._live_rows
            counts["live"] = self._live_rows.num_rows
        entry = journal.Entry(
            w.run, w.session, w.rank, self.number, secrets.token_hex(8), w._ids.sequence, rows=counts,
            resumed_from=self._resumed, **said,
        )  # fmt: skip
        self.storage.create(key, journal.pack(entry, journal.row_members(rows), members)[0])
        self.number += 1
        return key

    def checkpoint(self, step: int, **options: Any) -> Any:
        """A checkpoint, from which on the journal counts."""
        made = self.writer.checkpoint(step, **options).result(30)
        self._done.update(map(id, self.writer._pipeline.uncommitted()))
        self._held = self._live()
        keep(
            self.arc,
            self.writer.run,
            1,
            {**(self.arc.refresh().head.runs[self.writer.run].journal or {}), self.writer.rank: self.number},
        )
        return made

    def die(self) -> None:
        """The process is gone."""
        self.writer._end()

"""Reads ledgers, and what journals hold beyond the newest checkpoints, from what archive/FORMAT.md says, without this
library: `python -m tests.support.format_journal FOLDER` prints it, with all that format_reader finds, as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support import format_reader as reader
from tests.support.format_reader import Damaged, Row, demand

ENDS = ("trained", "dropped")  # a round, if said of all siblings

# -- ledgers -----------------------------------------------------------------------------------------------------------


def counts(session: str, row: Row, known: dict[str, Row]) -> bool:
    """Whether a row of the ledger table counts for a session: "trained" only if its weights know of it."""
    if row["state"] != "trained" or row["session"] == session or not reader.sees(session, row, known):
        return reader.sees(session, row, known)
    line = reader.ancestry(session, known)
    child = known[line[line.index(row["session"]) - 1]]
    trained = child["trained_below"].get(row["rank"])
    return trained is None or bool(row["sequence"] < trained)


def origins(rows: Sequence[Row]) -> dict[str, Row]:
    """As the reader has them, with how far each rank's rows "trained" count."""
    out = reader.origins(rows)
    for row in rows:
        out[row["session"]].setdefault("trained_below", {})[row["rank"]] = row.get("trained")
    return out


def in_order(rows: Sequence[Row], session: str, known: dict[str, Row]) -> list[Row]:
    """The rows that count for a session, in order."""
    line = reader.ancestry(session, known)
    seen = [row for row in rows if counts(session, row, known)]
    return sorted(seen, key=lambda row: (-line.index(row["session"]), row["commit"], row["rank"], row["sequence"]))


def fold(rows: Sequence[Row]) -> Row:
    """Key -> its newest round, how that stands, and its siblings."""
    rounds: dict[tuple[Any, int], Row] = {}
    for row in rows:
        if row["state"] == "cursor":
            continue
        at = (json.loads(row["key"]), row["round"])
        one = rounds.setdefault(at, {"round": row["round"], "ended": None, "siblings": {}})
        if row["state"] == "drawn":
            for sibling in range(row["siblings"]):
                one["siblings"].setdefault(sibling, ["drawn", None])
        elif row["sibling"] == -1 and row["state"] in ENDS:
            one["ended"] = row["state"]
        else:
            one["siblings"][row["sibling"]] = [row["state"], row["episode_id"]]
    newest = {key: rounds[key, number] for key, number in sorted(rounds, key=lambda at: at[1])}
    return {key: {"round": one["round"], "state": stands(one), "siblings": left(one)} for key, one in newest.items()}


def left(one: Row) -> Row:
    return {} if one["ended"] else {str(sibling): how for sibling, how in one["siblings"].items()}


def stands(one: Row) -> str:
    if one["ended"]:
        return str(one["ended"])
    states = {state for state, _ in one["siblings"].values()} - {"dropped"}
    if not states:
        return "dropped"
    return "drawn" if states == {"drawn"} else "started" if states & {"drawn", "started"} else "sealed"


def ledgers(root: Path, commit: Row, session: str) -> Row:
    """Name -> keys and cursor, as a session sees them at a commit."""
    known = origins(reader.table(root, commit.get("branches", [])))
    rows = in_order(reader.table(root, commit.get("ledger", [])), session, known)
    out: Row = {}
    for name in dict.fromkeys(row["ledger"] for row in rows):
        mine = [row for row in rows if row["ledger"] == name]
        cursors = [row for row in mine if row["state"] == "cursor"]
        out[name] = {"keys": fold(mine), "cursor": joint(cursors, session, known, commit)}
    return out


def joint(cursors: Sequence[Row], session: str, known: dict[str, Row], commit: Row) -> Any:
    """Up to where all ranks have read the data set."""
    line = reader.ancestry(session, known)
    entries = [entry for entry in commit["runs"].values() if entry["session"] == session]
    worlds = [{int(rank) for entry in entries for rank in (*entry["sequences"], *entry.get("journal", ()))}]
    worlds += [{int(rank) for rank in known[child]["seen"]} for child in line[:-1]]
    out = None
    for name, world in reversed(list(zip(line, worlds, strict=True))):
        said = {row["rank"]: json.loads(row["cursor"]) for row in cursors if row["session"] == name}
        if said:
            out = lowest([*said.values(), *([out] if world - said.keys() else [])])
    return out


def lowest(values: Sequence[Any]) -> Any:
    if None in values or not isinstance(values[0], (list, dict)):
        return None if None in values else min(values)
    if isinstance(values[0], list):
        return [lowest(parts) for parts in zip(*values, strict=True)]
    return {key: lowest([one[key] for one in values if key in one]) for one in values for key in one}


# -- journals ----------------------------------------------------------------------------------------------------------


class Entry(reader.Staged):
    """One object of a journal, whole and checked."""

    def __init__(
        self, root: Path, run: str, session: str, rank: int, number: int, members: Mapping[str, bytes] | None = None
    ) -> None:
        """members: of objects of nodes, by their names."""
        self.key = f"journal/{reader.escape(session)}/rank-{rank:05d}/{number:09d}.zip"
        super().__init__(root, self.key, (members or {}).get(f"rank-{rank:05d}-{number:09d}.zip"))
        told = [self.index[name] for name in ("run", "session", "rank", "number")]
        demand(told == [run, session, rank, number], f"place of {self.key}")
        demand(self.data[-22:-18] == b"PK\x05\x06", f"end of {self.key}")
        for row in self.members:
            data = self.bytes_of(row)
            body = data[:-4] if row["chunk"] >= 0 and row["array"] else data
            demand(len(data) == row["size"] and reader.crc32c(body) == row["crc32c"], f"{row['member']} of {self.key}")

    def rows(self, kind: str) -> list[Row]:
        if not self.index["rows"].get(kind):
            return []
        return list(pq.read_table(pa.BufferReader(self.file(f"{kind}.parquet"))).to_pylist())


def shared(root: Path, entry: Row) -> dict[str, bytes]:
    """The members of the objects of nodes, from those on of which something may lie beyond the checkpoint."""
    out: dict[str, bytes] = {}
    for node, first in entry.get("nodes", {}).items():
        folder = root / "journal" / reader.escape(entry["session"]) / f"node-{int(node):05d}"
        for number in itertools.count(first):
            if not (path := folder / f"{number:09d}.zip").exists():
                break
            with zipfile.ZipFile(path) as found:
                out = {n: found.read(n) for n in found.namelist() if n != "index.json"} | out
    return out


def entries(
    root: Path, run: str, session: str, rank: int, number: int, members: Mapping[str, bytes] | None = None
) -> Iterator[Entry]:
    """From a number on, until one is missing, torn or damaged."""
    while True:
        try:
            yield Entry(root, run, session, rank, number, members)
        except (FileNotFoundError, Damaged, ValueError):
            return
        number += 1


def tail(root: Path, run: str, entry: Row, rank: str) -> Row:
    """What a rank has journaled beyond the newest checkpoint, in ticks that are complete."""
    found = list(entries(root, run, entry["session"], int(rank), entry["journal"][rank], shared(root, entry)))
    while found and found[-1].index["goes_on"]:
        found.pop()
    new = entry["sequences"].get(rank, 0)
    segments = [row for one in found for row in one.rows("segments") if row["sequence"] >= new]
    said = [row for one in found for row in one.rows("ledger") if row["sequence"] >= new]
    return {
        "from": entry["journal"][rank],
        "next": entry["journal"][rank] + len(found),
        "gone": [gone for one in found for gone in one.index["gone"].get("replay", [])],
        "ledger": [[json.loads(row["key"]), row["sibling"], row["state"], row["episode_id"]] for row in said],
        "episodes": {row["episode_id"]: fields(found, row) for row in segments if row["length"]},
    }


def column(found: Sequence[Entry], name: str, buffer: str = "replay") -> dict[tuple[Any, ...], Any]:
    """Session, rank, env row and position of a step -> its newest value."""
    out: dict[tuple[Any, ...], Any] = {}
    for one in found:
        told = one.index["columns"].get(buffer, {}).get(name)
        if told is None:
            continue
        demand(("ranges" in told) == ("scattered columns" in one.index["format"]["features"]), "features")
        ranges = [(tuple(stream), lo, hi) for *stream, lo, hi in told["steps"]]
        if "ranges" in told:
            numbers = one.group()[told["ranges"]][:].tolist()
            gaps, lengths = iter(numbers[: len(numbers) // 2]), iter(numbers[len(numbers) // 2 :])
            for *stream, at, count in told["streams"]:
                for _ in range(count):
                    start = at + next(gaps)
                    at = start + next(lengths)
                    ranges.append((tuple(stream), start, at))
        places = [(*stream, at) for stream, lo, hi in ranges for at in range(lo, hi)]
        out |= dict(zip(places, one.group()[told["array"]][:].tolist(), strict=True))
    return out


def fields(found: Sequence[Entry], row: Row) -> Row:
    """The steps of a row of a journal's segments."""
    shards = reader.Shards(Path())
    shards._groups = {one.key: one.group() for one in found if one.key == row["shard"]}
    return dict(reader.episode(shards, [row], [])["fields"])


def read(root: Path) -> Row:
    """All that the reader finds; how the ledgers stand for each run, and the tails of its newest session by rank."""
    log = reader.commits(root)
    runs = reader.runs(root, log[-1])
    return {
        **reader.read(root),
        "ledgers": {run: ledgers(root, log[-1], entry["session"]) for run, entry in runs.items()},
        "tails": {
            run: {rank: tail(root, run, entry, rank) for rank in entry.get("journal", {})}
            for run, entry in runs.items()
        },
    }


if __name__ == "__main__":
    json.dump(read(Path(sys.argv[1])), sys.stdout)

"""Reads an archive from what archive/FORMAT.md says,
without this library: `python format_reader.py FOLDER` prints it as JSON.

Loads whole files and decodes whole shards: short, not fast.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


class Damaged(Exception):  # noqa: N818 (a finding)
    """The bytes are not what the format says."""


def demand(condition: object, what: str) -> None:
    if not condition:
        raise Damaged(what)


# -- checksums and keys ------------------------------------------------------------------------------------------------


@cache
def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(value >> 1) ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


def crc32c(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def escape(name: str) -> str:
    text = "".join(chr(b) if re.match(rb"[A-Za-z0-9_-]", bytes([b])) else f"%{b:02X}" for b in name.encode()) or "%"
    return "%5F" + text[1:] if text.startswith("__") else text


def load(root: Path, key: str) -> bytes:
    demand(all(part not in ("", ".", "..") and "\\" not in part for part in key.split("/")), f"key {key!r}")
    return (root / key).read_bytes()


def checked_lines(data: bytes, what: str) -> Any:
    """A line of JSON followed by its sha256."""
    line, _, digest = data.partition(b"\n")
    demand(hashlib.sha256(line).hexdigest() == digest.strip().decode(), f"checksum of {what}")
    return json.loads(line)


# -- commits and tables ------------------------------------------------------------------------------------------------


def check_format(block: Row, what: str) -> None:
    known = {"journal", "run files", "node journals"}
    demand(block["read"] == 2 and set(block["features"]) <= known, f"{what} needs format {block}")


def commits(root: Path) -> list[Row]:
    """All commits, each checked against the one before."""
    about = json.loads(load(root, "archive.json"))
    demand(about["magic"] == "trajectory-archive", "magic")
    check_format(about["format"], "archive.json")
    out: list[Row] = []
    parent = None
    while (path := root / f"commits/{(len(out) + 1) // 1000:06d}/{len(out) + 1:09d}.json").exists():
        data = path.read_bytes()
        commit = checked_lines(data, path.name)
        check_format(commit["format"], path.name)
        demand((commit["number"], commit["parent"]) == (len(out) + 1, parent), f"order of {path.name}")
        demand(commit["archive"] == about["id"], f"archive of {path.name}")
        parent = data.split(b"\n")[1].decode()
        out.append(commit)
    return out


def table(root: Path, refs: Iterable[Row | None]) -> list[Row]:
    rows: list[Row] = []
    for ref in filter(None, refs):
        data = load(root, ref["path"])
        demand((len(data), crc32c(data)) == (ref["bytes"], ref["crc32c"]), f"checksum of {ref['path']}")
        rows += pq.read_table(pa.BufferReader(data)).to_pylist()
    return rows


def runs(root: Path, commit: Row) -> Row:
    """The runs of a commit by name: those that it says itself, and those in files."""
    index = table(root, [commit.get("run_files")])
    rows = [row for ref in index for row in table(root, [ref])]
    names, firsts = [row["run"] for row in rows], [ref["first"] for ref in index]
    demand(names == sorted(set(names)) and firsts == sorted(set(firsts)), "order of runs")
    demand(set(firsts) <= set(names), "first runs of files")
    return {row["run"]: json.loads(row["entry"]) for row in rows} | commit["runs"]


def chunk_file(row: Row) -> Row | None:
    path = row["chunks"]
    return None if path is None else {"path": path, "bytes": row["chunks_bytes"], "crc32c": row["chunks_crc32c"]}


def origins(rows: Iterable[Row]) -> dict[str, Row]:
    """Session -> what it goes on from: the rows of each, as {"parent", "parent_run", "run",
    "seen": {rank: sequence}}."""
    out: dict[str, Row] = {}
    for row in rows:
        out.setdefault(row["session"], {**row, "seen": {}})["seen"][row["rank"]] = row["sequence"]
    return out


def ancestry(session: str, known: dict[str, Row]) -> list[str]:
    out = [session]
    while out[-1] in known:
        out.append(known[out[-1]]["parent"])
    return out


def sees(session: str, row: Row, known: dict[str, Row]) -> bool:
    """Whether a session sees a segment."""
    if row["session"] == session:
        return True
    line = ancestry(session, known)
    if row["session"] not in line:
        return False
    child = line[line.index(row["session"]) - 1]
    return bool(row["sequence"] < known[child]["seen"].get(row["rank"], 0))


def standing(rows: Sequence[Row], known: dict[str, Row]) -> list[Row]:
    """The rows of one episode that are not left behind."""
    runs = {o["parent"]: o["parent_run"] for o in known.values()} | {s: o["run"] for s, o in known.items()}
    order = list(dict.fromkeys(s for session in known for s in reversed(ancestry(session, known))))
    lines: dict[tuple[str, str], list[str]] = {}
    for session in order:
        lines.setdefault((ancestry(session, known)[-1], runs[session]), []).append(session)
    kept = [row for row in rows if row["session"] not in order]
    for line in lines.values():
        for session in reversed(line):
            if seen := [row for row in rows if sees(session, row, known)]:
                kept += seen
                break
    return [row for row in kept if row["sequence"] >= 0]


def chains(rows: Sequence[Row], known: dict[str, Row]) -> dict[str, list[Row]]:
    """Episode id -> its segments, oldest first."""
    place = {f"{row['session']}:{row['rank']}:{row['sequence']}": row for row in rows}
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(row["episode_id"], []).append(row)
    out = {}
    for name, mine in of.items():
        first: dict[Any, int] = {}
        for at, row in enumerate(mine):
            first.setdefault((row["commit"], row["session"], row["rank"]), at)
        age = {id(r): (r["commit"], first[r["commit"], r["session"], r["rank"]], r["sequence"]) for r in mine}
        chain = [max(standing(mine, known), key=lambda row: age[id(row)])]
        while (before := place.get(chain[0]["predecessor"] or "")) is not None:
            chain.insert(0, before)
        out[name] = chain
    return out


def labels(said: Sequence[Row], chain: Sequence[Row]) -> Row:
    """What is said of an episode."""
    mine = {(row["session"], row["rank"], row["sequence"]) for row in chain}
    of = [row for row in said if (row["session"], row["rank"], row["sequence"]) in mine]
    newest = {row["key"]: row["value"] for row in of}
    return {key: json.loads(value) for key, value in newest.items() if value is not None}


# -- shards ------------------------------------------------------------------------------------------------------------


def open_group(members: Sequence[Row], data_of: Any) -> Any:
    """The Zarr group of members (name, array, chunk, rows, crc32c), whose bytes `data_of` gives, all checked."""
    import zarr
    from zarr.buffer import cpu

    stored: dict[str, Any] = {}
    chunks: dict[str, list[int]] = {}
    for row in members:
        data = data_of(row)
        if row["chunk"] < 0:
            demand(crc32c(data) == row["crc32c"], f"checksum of {row['member']}")
            data = data if data[:1] == b"{" else zlib.decompress(data, -15)
        else:
            demand(int.from_bytes(data[-4:], "little") == row["crc32c"], f"chunk {row['member']} is another one")
            chunks.setdefault(row["array"], []).append(row["chunk"])
        stored[row["member"]] = cpu.Buffer.from_bytes(data)
    group = zarr.open_group(zarr.storage.MemoryStore(stored, read_only=True), mode="r", zarr_format=3)
    for path, array in group.members(max_depth=None):
        if isinstance(array, zarr.Array) and array.size:
            demand(sorted(chunks[path]) == list(range(-(-array.shape[0] // array.chunks[0]))), f"chunks of {path}")
    return group


class Shards:
    """The groups of shards, opened when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self._groups = root, dict[str, Any]()

    def group(self, row: Row) -> Any:
        key = row["shard"]
        if key not in self._groups:
            members = [c for c in table(self.root, [chunk_file(row)]) if c["shard"] == key]
            self._groups[key] = open_group(members, lambda c: self._bytes(key, c))
        return self._groups[key]

    def _bytes(self, key: str, row: Row) -> bytes:
        head, inside, _ = key.partition(".zip/")  # a member of an object of a node's journal
        data = load(self.root, f"{head}.zip" if inside else key if key.endswith(".zip") else f"{key}/{row['member']}")
        return data[row["offset"] : row["offset"] + row["size"]]


# -- fields ------------------------------------------------------------------------------------------------------------


def logical(rows: Any, dtype: str, shape: Sequence[int]) -> Row | list[Any]:
    """Stored rows as {"dtype", "shape", "data"}: strings as they are, all else as hexadecimal bytes."""
    if dtype == "json":
        return [json.loads(text) for text in rows]
    if dtype == "str":
        return {"dtype": "str", "shape": list(rows.shape), "data": rows.ravel().tolist()}
    if rows.dtype.kind in "OT":
        rows = rows.astype(dtype)
    elif re.match(r"bfloat16|float8", dtype):
        pass
    elif rows.dtype != (plain := np.dtype([tuple(f) for f in json.loads(dtype)] if dtype[0] == "[" else dtype)):
        times = plain.kind in "mM"
        rows = rows.view(plain.newbyteorder("<")) if times else rows.astype(plain) if plain.kind in "biufc" else rows
    return {"dtype": dtype, "shape": [len(rows), *shape], "data": np.ascontiguousarray(rows).tobytes().hex()}


def field_of(shards: Shards, chain: Sequence[Row], spec: Row) -> Any:
    if spec["axis"] in ("dict", "none"):
        return {} if spec["axis"] == "dict" else None
    name = "/".join(map(escape, spec["path"]))
    segments = [row for row in chain if row["shard"] is not None]
    read = {"ragged": ragged, "offset": offset, "free": free, "step": followed if "next_of" in spec else step}[
        spec["axis"]
    ]
    parts = read(shards, segments, name, spec)
    if spec["axis"] == "ragged":
        return [logical(rows, spec["dtype"], spec["shape"]) for rows in parts]
    rows = np.concatenate(parts)
    if not spec.get("scalar"):
        return logical(rows, spec["dtype"], spec["shape"])
    value = logical(rows[-1:], spec["dtype"], [])
    return value | {"shape": []} if isinstance(value, dict) else value


def extent(row: Row, name: str) -> tuple[int, int]:
    found = [e for e in row["extents"] or () if e["field"] == name]
    return (found[0]["start"], found[0]["start"] + found[0]["rows"]) if found else (0, 0)


def step(shards: Shards, segments: Sequence[Row], name: str, spec: Row) -> list[Any]:
    return [shards.group(s)[name][s["start"] : s["start"] + s["length"]] for s in segments]


def free(shards: Shards, segments: Sequence[Row], name: str, spec: Row) -> list[Any]:
    return [shards.group(s)[name][slice(*extent(s, name))] for s in segments]


def offset(shards: Shards, segments: Sequence[Row], name: str, spec: Row) -> list[Any]:
    parts = free(shards, segments, name, spec)
    last = max(i for i, rows in enumerate(parts) if len(rows) or i == 0)
    return [rows if i == last else rows[: s["length"]] for i, (s, rows) in enumerate(zip(segments, parts, strict=True))]


def ragged(shards: Shards, segments: Sequence[Row], name: str, spec: Row) -> list[Any]:
    out: list[Any] = []
    for values, lengths in zip(
        free(shards, segments, name, spec), step(shards, segments, f"{name}%lengths", spec), strict=True
    ):
        demand(lengths.sum() == len(values), f"lengths of {name}")
        out += np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
    return out


def followed(shards: Shards, segments: Sequence[Row], name: str, spec: Row) -> list[Any]:
    out = []
    for s in segments:
        group, (lo, hi) = shards.group(s), extent(s, name)
        kept, places = group[name][lo:hi], group[f"{name}%places"][lo:hi]
        rows = np.empty((s["length"], *kept.shape[1:]), kept.dtype)
        if s["length"] > 1:
            rows[:-1] = group[spec["next_of"]][s["start"] + 1 : s["start"] + s["length"]]
        rows[places] = kept
        out.append(rows)
    return out


STREAM = ("session", "buffer", "rank", "env_id")


def spec_of(row: Row, name: str) -> Row | None:
    """What the schema of a row's shard says of a field."""
    specs = json.loads(row["schema"])["fields"]
    return next((spec for spec in specs if "/".join(map(escape, spec["path"])) == name), None)


def places_of(name: str, late: Sequence[Row], chain: Sequence[Row]) -> list[tuple[Row, int] | None]:
    """For each step of an episode the row and the row of its shard where a late field counts; None: it has none."""
    steps = [(s, i) for s in chain for i in range(s["length"])]
    own = [(s, s["start"] + i) if spec_of(s, name) else None for s, i in steps]
    number = {(*(s[key] for key in STREAM), s["position"] + i): n for n, (s, i) in enumerate(steps)}
    out = list(own)
    for row in late:
        for i in range(row["length"]) if name in row["fields"] else ():
            n = number.get((*(row[key] for key in STREAM), row["position"] + i))
            if n is not None:
                out[n] = own[n] if row["dropped"] else (row, row["start"] + i)
    return [] if out == own else out


def late_fields(shards: Shards, late: Sequence[Row], chain: Sequence[Row]) -> Iterator[tuple[list[str], Any]]:
    """Fields that came later: (path, value) of those that all steps have."""
    for name in sorted({name for row in late for name in row["fields"]}):
        places = [place for place in places_of(name, late, chain) if place]
        if places and len(places) == sum(s["length"] for s in chain):
            spec = spec_of(places[0][0], name)
            assert spec is not None
            rows = np.concatenate([shards.group(row)[name][at : at + 1] for row, at in places])
            yield spec["path"], logical(rows, spec["dtype"], spec["shape"])


def episode(shards: Shards, chain: Sequence[Row], late: Sequence[Row]) -> Row:
    tail = chain[-1]
    specs = {tuple(f["path"]): f for row in chain for f in json.loads(row["schema"])["fields"]}
    fields: Row = {}
    for path, spec in specs.items():
        node = fields
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = field_of(shards, chain, spec)
    for names, value in late_fields(shards, late, chain):
        node = fields
        for key in names[:-1]:
            node = node.setdefault(key, {})
        node[names[-1]] = value
    return {
        "fields": fields,
        "length": tail["episode_start"] + tail["length"],
        "complete": chain[0]["first"] and tail["last"],
        "terminated": tail["terminated"],
        "return": tail["return"],
        "weights": list(dict.fromkeys(w for row in chain for w in row["model_weights_uuids"])),
        "made_by": [made for row in chain for made in made_by(row)],
        "metadata": json.loads(tail["metadata"] or "null"),
    }


def made_by(row: Row) -> list[list[Any]]:
    """Weights and update count of each step of a segment."""
    if row.get("weights") is not None:
        runs = [[run["steps"], run["model_weights_uuid"], run["update_count"]] for run in row["weights"]]
        demand(sum(steps for steps, _, _ in runs) == row["length"], "weights of a segment")
        return [[uuid, count] for steps, uuid, count in runs for _ in range(steps)]
    uuids, (low, high) = row["model_weights_uuids"], (row["update_count_min"], row["update_count_max"])
    return [[uuids[0] if len(uuids) == 1 else None, low if low == high else None]] * row["length"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Staged:
    """One rank's staged object: its index, and members by name."""

    def __init__(self, root: Path, key: str, data: bytes | None = None) -> None:
        self.data = load(root, key) if data is None else data
        demand(self.data[30:40] == b"index.json" and self.data[28:30] == b"\0\0", f"head of {key}")
        self.base = 40 + int.from_bytes(self.data[22:26], "little")
        self.index = checked_lines(self.data[40 : self.base], key)
        names = ("member", "array", "chunk", "rows", "offset", "size", "crc32c")
        self.members = [dict(zip(names, m, strict=True)) for m in self.index["members"]]

    def bytes_of(self, row: Row) -> bytes:
        return self.data[self.base + row["offset"] :][: row["size"]]

    def file(self, name: str) -> bytes:
        (row,) = (m for m in self.members if m["member"] == name)
        demand(crc32c(self.bytes_of(row)) == row["crc32c"], f"checksum of {name}")
        return self.bytes_of(row)

    def group(self) -> Any:
        return open_group([m for m in self.members if m["array"] or m["chunk"] < 0], self.bytes_of)


def live_steps(rows: Sequence[Row], segments: Sequence[Row]) -> list[list[Any]]:
    """Each live step in live order as [rank, buffer, env, position, episode, step of the episode]."""
    where: dict[tuple[Any, ...], tuple[str, int]] = {}
    for s in segments:
        for i in range(s["length"]):
            key = (s["session"], s["buffer"], s["rank"], s["env_id"], s["position"] + i)
            where[key] = (s["episode_id"], s["episode_start"] + i)
    out = []
    for row in rows:
        stream = (row["session"], row["buffer"], row["stream_rank"], row["stream_env"])
        for i in range(row["hi"] - row["lo"]):
            place = [row["rank"], row["buffer"], row["env_id"], row["position"] + i]
            out.append([*place, *where[(*stream, row["lo"] + i)]])
    return out


def checkpoint(root: Path, commit: Row, segments: Sequence[Row]) -> Row:
    about = commit["checkpoint"]
    columns: Row = {}
    attributes: Row = {}
    ranks = [Staged(root, rank["key"]) for rank in about["ranks"]]
    for staged in ranks:
        for buffer, entries in staged.index["columns"].items():
            for name, entry in entries.items():
                rows = Staged(root, entry["object"]).group()[entry["array"]][:]
                columns.setdefault(f"{buffer}/{name}", []).append(logical(rows, entry["dtype"], entry["shape"]))
        for entries in staged.index["attributes"].values():
            for name, entry in entries.items():
                attributes.setdefault(name, {}).update(json.loads(Staged(root, entry["object"]).file(entry["member"])))
    return {
        "step": about["step"],
        "live": live_steps(table(root, [commit["live"]]), segments),
        "columns": columns,
        "attributes": attributes,
        "progress": json.loads(ranks[0].index["progress"]),
    }


def serving(root: Path, log: Sequence[Row], row: Row) -> tuple[Row, list[Row]]:
    """The commit of a checkpoint, and the segments in which its steps are found."""
    tables_of = log[(row.get("manifest") or row["commit"]) - 1]
    return log[row["commit"] - 1], table(root, tables_of["segments"])


def tags(root: Path, head: Row) -> Row:
    """Name -> what it names."""
    rows = table(root, head.get("tags", []))
    return {row["name"]: {k: row[k] for k in ("checkpoint", "run", "by")} | {"commit": row["target"]} for row in rows}


def read(root: Path, number: int | None = None) -> Row:
    """Everything in the archive as of a commit, the newest by default, as JSON."""
    log = commits(root)[:number]
    segments = table(root, log[-1].get("segments", []))
    known = origins(table(root, log[-1].get("branches", [])))
    shards = Shards(root)
    named = {row["name"]: row for row in table(root, log[-1].get("checkpoints", []))}
    said = table(root, log[-1].get("labels", []))
    late = table(root, log[-1].get("late", []))
    found = chains(segments, known).items()
    return {
        "episodes": {name: episode(shards, chain, late) for name, chain in found},
        "labels": {name: labels(said, chain) for name, chain in found},
        "tags": tags(root, log[-1]),
        "checkpoints": {name: checkpoint(root, *serving(root, log, row)) for name, row in named.items()},
    }


if __name__ == "__main__":
    json.dump([read(Path(place)) for place in sys.argv[1:]], sys.stdout)

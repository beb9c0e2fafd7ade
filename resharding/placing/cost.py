"""What reading a share takes, from the chunk tables: requests and bytes. Reads no data."""

from __future__ import annotations

from typing import Any

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.fields import schema
from archive.manifest import Located
from archive.read import Part, Reader, Selection, Slice, episode_job
from resharding.placing.source import schemas_of


def read_cost(reader: Reader, offsets: Ints, pieces: Located, parts_of: Any) -> dict[str, int]:
    """Requests, bytes, and bytes of the shards touched, of reading these pieces; `offsets`: where each episode begins.

    `parts_of(episodes)` gives the parts of some episodes; asked only for those whose fields are not one row a step.
    """
    if not len(pieces.row):
        return {"requests": 0, "bytes": 0, "shard_bytes": 0}
    texts, codes = schemas_of(reader.snapshot, pieces.row)
    schemas = [schema.loads(text) for text in texts]
    plain = np.array([all(f.per_step or not f.dtype for f in s.fields) for s in schemas], bool)[codes]
    whole = np.logical_and.reduceat(plain, offsets[:-1])
    mine = np.repeat(whole, np.diff(offsets))
    fields = [[f.name for f in s.fields if _has_rows(f)] for s in schemas]
    slices = _plain_slices(reader, pieces.pick(mine), fields, codes[mine])
    groups = parts_of(np.flatnonzero(~whole))
    slices += _other_slices(reader, groups)
    shards, first = _shards(reader, pieces.row)
    reader.load_indexes(list(reader.segments(first).values()))
    plan = reader.plan(slices)
    touched = sum(reader.shard_bytes(s) for s in shards)
    return {"requests": plan.requests, "bytes": plan.fetched_bytes, "shard_bytes": touched}


def _has_rows(spec: schema.FieldSpec) -> bool:
    return bool(spec.dtype) and 0 not in spec.shape


def _shards(reader: Reader, rows: Ints) -> tuple[list[str], list[int]]:
    """The shards of rows of the segments table, and a row of each."""
    column = reader.snapshot.take(np.unique(rows), ["shard"])["shard"].combine_chunks()
    known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    codes, at = np.unique(column.indices.to_numpy(zero_copy_only=False)[known], return_index=True)
    names = column.dictionary.to_pylist()
    return [names[int(c)] for c in codes], np.unique(rows)[known[at]].tolist()


def _plain_slices(reader: Reader, pieces: Located, fields: list[list[str]], codes: Ints) -> list[Slice]:
    """Of segments whose row i is step i: neighbouring rows joined."""
    if not len(pieces.row):
        return []
    table = reader.snapshot.take(pieces.row, ["shard", "start"])
    shard = table["shard"].combine_chunks()
    start = table["start"].fill_null(0).to_numpy()
    names, place = shard.dictionary.to_pylist(), shard.indices.to_numpy(zero_copy_only=False)
    out: list[Slice] = []
    order = np.argsort(place, kind="stable")
    heads = np.flatnonzero(np.r_[True, np.diff(place[order]) != 0])
    for group in np.split(order, heads[1:]):
        lo, hi = merge_runs(*(start[group] + edge[group] for edge in (pieces.lo, pieces.hi)))
        runs = list(zip(lo.tolist(), hi.tolist(), strict=True))
        name = names[int(place[group[0]])]
        out += [Slice(name, f, a, b) for f in fields[int(codes[group[0]])] for a, b in runs]
    return out


def _other_slices(reader: Reader, groups: list[list[Part]]) -> list[Slice]:
    segments = reader.segments([p.row for group in groups for p in group])
    selection = Selection()
    jobs = (episode_job([(segments[p.row], p) for p in group], selection) for group in groups)
    return [s for job in jobs for _, s in job.slices()]

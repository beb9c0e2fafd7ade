"""Everything that reads what others wrote: valid seeds of it, how they are made invalid, and what reads them.

A parser is a line of PARSERS. Whatever it is given, it returns or raises an error of the library, in bounded time and
memory: `tests/support/fuzzing/running.py` sees to that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from archive import tables
from archive.base import jsontree, seconds_of
from tests.support.fuzzing import bombs, foreign, manifests, objects, plans, values
from tests.support.fuzzing.mutating import mutated_bytes, mutated_json


@dataclass(frozen=True)
class Parser:
    """One parser. seeds: makes valid input below an empty folder; mutate: makes invalid input of a seed; parse: reads;
    or reader: makes what reads, below a folder.  bombs: inputs that are tried each time.  plain: the input that a seed
    itself is."""

    seeds: Callable[[Path], Sequence[Any]]
    mutate: Callable[[Any, Random], Any]
    parse: Callable[[Any], object] = repr
    reader: Callable[[Path], Callable[[Any], object]] | None = None
    bombs: Callable[[Sequence[Any]], Iterable[Any]] = lambda seeds: ()
    plain: Callable[[Any], Any] = lambda seed: seed

    def as_input(self, seed: Any) -> Any:
        return self.plain(seed)


def json_text(seed: Any) -> str:
    return json.dumps(seed)


def foreign_parser(seeds: Any, read: Any, bombs: Any = lambda seeds: ()) -> Parser:
    return Parser(seeds, foreign.mutated_files, reader=lambda tmp: foreign.importer(read, tmp), bombs=bombs)


def text_parser(read: Callable[[str], object], *seeds: str) -> Parser:
    return Parser(lambda tmp: seeds, values.mutated_text, read)


PARSERS: dict[str, Parser] = {
    "commit": Parser(
        manifests.commit_seeds, manifests.mutated_commit, manifests.read_commit, plain=manifests.commit_file,
        bombs=bombs.commit_bombs,
    ),
    "small": Parser(
        manifests.small_seeds, manifests.mutated_small, manifests.read_small, plain=manifests.small_file,
        bombs=bombs.small_bombs,
    ),
    "tables": Parser(
        manifests.table_seeds, manifests.mutated_table_file, manifests.read_table,
        plain=lambda seed: (seed[0], tables.dumps(seed[1])), bombs=bombs.parquet_bombs,
    ),
    "staged": Parser(objects.staged_seeds, objects.mutated_object, objects.read_staged),
    "result": Parser(objects.result_seeds, objects.mutated_object, objects.read_result),
    "journal": Parser(objects.journal_seeds, objects.mutated_object, objects.read_journal),
    "shard": Parser(
        objects.shard_seeds, objects.mutated_shard, objects.read_shard,
        plain=lambda seed: (json.dumps(seed[0]).encode(), seed[1]), 
        bombs=lambda seeds: [*objects.shard_bombs(seeds), *bombs.shard_bombs(seeds)],
    ),
    "packed": Parser(objects.packed_seeds, mutated_bytes, objects.read_packed_metadata, bombs=bombs.packed_bombs),
    "tree": Parser(
        values.tree_seeds, values.mutated_tree, values.read_tree, plain=lambda seed: (json.dumps(seed[0]), seed[1]),
        bombs=bombs.tree_bombs,
    ),
    "json": Parser(values.json_seeds, mutated_json, jsontree.loads, plain=json_text, bombs=bombs.text_bombs),
    "schema": Parser(values.schema_seeds, mutated_json, values.read_schema, plain=json_text, bombs=bombs.text_bombs),
    "condition": Parser(
        lambda tmp: values.CONDITIONS, values.mutated_condition, reader=lambda tmp: values.condition_reader(),
        bombs=bombs.condition_bombs,
    ),
    "duration": text_parser(lambda text: seconds_of(text, "older_than"), "24h", "7d", "90m", "1w", "3s"),
    "url": text_parser(values.read_url, "s3://b/a/b", "memory://x", "file:///tmp/x", "/tmp/x", "gs://b@c/d?e=f"),
    "plan": Parser(plans.plan_seeds, mutated_json, reader=lambda tmp: plans.plan_reader(), plain=json_text,
        bombs=bombs.text_bombs),
    "ledger": Parser(plans.ledger_seeds, plans.mutated_rows, plans.fold_rows),
    "sample": Parser(
        values.sample_seeds, values.mutated_sample, values.read_sample,
        plain=lambda seed: (seed[0], json.dumps(seed[1])),
    ),
    "controller": Parser(
        values.controller_seeds, values.mutated_tree, values.read_controller,
        plain=lambda seed: (json.dumps(seed[0]), seed[1]),
    ),
    "packets": Parser(values.packet_seeds, values.mutated_packets, values.read_packets),
    "whole": Parser(values.whole_seeds, values.mutated_whole, values.read_whole, plain=lambda root: (root, [])),
    "npz": foreign_parser(foreign.npz_seeds, foreign.read_npz, bombs.npz_bombs),
    "hdf5": foreign_parser(foreign.hdf5_seeds, foreign.read_npz),
    "lerobot": foreign_parser(foreign.lerobot_seeds, foreign.read_lerobot),
    "film": foreign_parser(foreign.filmed_seeds, foreign.read_film),
    "kept film": foreign_parser(foreign.filmed_seeds, foreign.keep_film),
    "alf": foreign_parser(foreign.alf_seeds, foreign.read_alf),
    "rlinf": foreign_parser(foreign.rlinf_seeds, foreign.read_rlinf),
}  # fmt: skip

"""Pure, no I/O: the declarations of the manifest's tables: columns, nulls, bounds of numbers, rules for several
columns, and the segments that a row is of. Readers of tables rely on all of that (`tables.loads`); the tables of
archive/FORMAT.md are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from archive.arrays import Steps, numbers, row_codes

if TYPE_CHECKING:
    import pyarrow as pa

MOST_SIBLINGS = 1 << 20  # of a prompt: each takes a byte while it is in flight
MOST_RANKS = 100_000  # of a world: keys have five digits for them
MOST = (1 << 48) - 1  # rows, steps, bytes, commits: more than ever occur, and their sums fit into 64 bits
LEAST_INT, MOST_INT = -(1 << 63), (1 << 63) - 1
ADDRESS = ("session", "rank", "sequence")  # of a segment
STREAM = ("session", "buffer", "rank", "env_id")
STRETCH = (*STREAM, "position", "length")  # steps of a stream
EPISODE = ("episode_id",)
LIVE_STREAM = ("session", "buffer", "stream_rank", "stream_env")
CHUNK_FILE = ("chunks", "chunks_bytes", "chunks_crc32c")  # the file with the chunks of a row's shard


class TableColumn(NamedTuple):
    """A column: its type, least and greatest number, and the rows that may have nulls."""

    kind: str
    least: int = LEAST_INT
    most: int = MOST_INT
    nulls: bool = False  # in any row
    given: str = ""  # in no row that has this other column
    dropped: str = ""  # in no row without this flag
    late: bool = False  # its rules for nulls hold for committed rows alone
    new: bool = False  # files of earlier versions do not have it: null there
    prose: bool = False  # long texts, which are never read row by row
    meaning: str = ""  # for archive/FORMAT.md; empty: the next column's text covers it
    absent: str = "never"  # the case in which it is null

    def says(self, meaning: str) -> Self:
        return self._replace(meaning=meaning)

    def between(self, least: int, most: int) -> Self:
        return self._replace(least=least, most=most)

    def where(self, other: str, absent: str) -> Self:
        """The column, null where another column is given."""
        return self._replace(given=other, absent=absent)

    def unless(self, flag: str) -> Self:
        """The column, null unless a flag is set."""
        return self._replace(dropped=flag, absent=flag)

    def or_null(self, absent: str = "never") -> Self:
        """The column, null in any row: readers accept that also where no writer does it."""
        return self._replace(nulls=True, absent=absent)

    @property
    def once_committed(self) -> Self:
        return self._replace(late=True)

    @property
    def added(self) -> Self:
        """The column, which files of earlier versions lack."""
        return self._replace(new=True)


class Rule(NamedTuple):
    """A rule for values of several columns together: a text, and a test that finds a violation in a table."""

    columns: tuple[str, ...]
    wrong: str
    broken: Callable[[pa.Table], bool]


class Table(NamedTuple):
    """A table of the manifest."""

    columns: Mapping[str, TableColumn]
    rules: tuple[Rule, ...] = ()
    of: tuple[str, ...] = ()  # ADDRESS, STRETCH or EPISODE: the columns that name a row's segments
    listed: bool = False  # each commit repeats its parent's list of files
    about: tuple[str, ...] = ()  # among rows with the same values in these (of lists: in an entry) the last counts
    told: tuple[str, ...] = ()  # the columns that tell rows apart, in any archive


def _turned(table: pa.Table) -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(pc.less(table["hi"], table["lo"])).as_py())


def _mixed(table: pa.Table) -> bool:
    """True if names, the first column, do not grow."""
    names = table[0].to_pylist()
    return any(before >= after for before, after in pairwise(names))


def _twice(table: pa.Table) -> bool:
    """True if a step is in two live ranges."""
    (stream,) = row_codes(table.select(LIVE_STREAM))
    runs = Steps(stream, numbers(table["lo"]), numbers(table["hi"])).placed
    return bool(runs.length.sum() != runs.union().length.sum())


def _unfit(table: pa.Table) -> bool:
    """True if weights are of other steps than those of their segment."""
    import pyarrow.compute as pc

    runs, length = table["weights"].combine_chunks(), numbers(table["length"])
    steps = pc.struct_field(pc.list_flatten(runs), "steps")
    if steps.null_count or pc.any(pc.or_(pc.less(steps, 1), pc.greater(steps, MOST))).as_py():
        return True
    told = np.zeros(len(length), np.int64)
    np.add.at(told, numbers(pc.list_parent_indices(runs)), numbers(steps))
    return bool((numbers(runs.is_valid()) & (told != length)).any())


_ENDS = Rule(("lo", "hi"), "a hi that cannot be", _turned)
_APART = Rule((*LIVE_STREAM, "lo", "hi"), "the same step in two runs", _twice)
_TEXT, _NAME, _PROSE = TableColumn("string"), TableColumn("dict"), TableColumn("dict", prose=True)
_NUMBER, COUNT = TableColumn("int64"), TableColumn("int64", 0, MOST)
_START = _NUMBER.between(-MOST, MOST)  # the reader of the rows gives their shard
_SEQUENCE = _NUMBER.between(LEAST_INT, MOST)
_RANK, _CHECKSUM = TableColumn("int32", 0, MOST_RANKS - 1), TableColumn("uint32")
_FLAG, _DOUBLE, _TIME = TableColumn("bool"), TableColumn("double"), TableColumn("timestamp")
_TEXTS, _EXTENTS = TableColumn("strings"), TableColumn("extents")
_OF_COMMIT = COUNT.says("number of the commit that brought the row")
_BY = _NAME.or_null("not told")

_SEGMENTS = {
    "episode_id": _TEXT.says("the episode"),
    "session": _NAME,
    "buffer": _NAME,
    "rank": _RANK.says("who wrote it, and where; with `env_id` the stream"),
    "env_id": _NUMBER.says("env row; -1: added without one"),
    "position": COUNT.says("of its first step in the stream; see Addresses"),
    "sequence": _SEQUENCE.says("counts segments (and ledger rows) of a session and rank; below 0: cut by a compaction"),
    "predecessor": _TEXT.or_null("first of its chain").says("`session:rank:sequence` of the one before in its episode"),
    "replaces": _FLAG.or_null().says("it begins a new revision, in place of whatever else there is of its id"),
    "shard": _NAME.or_null("closing row").says("key of the shard"),
    "start": _START.where("shard", "closing row"),
    "length": COUNT.says("its rows [start, start + length) of arrays on the step axis"),
    "extents": _EXTENTS.or_null("none such").says("where rows lie of fields (paths) without one row a step"),
    "schema": _PROSE.says("JSON of the shard's schema, below"),
    "model_weights_uuids": _TEXTS.or_null("never (may be empty)").says("distinct weights of its steps, in order"),
    "update_count_min": _NUMBER.or_null("unknown"),
    "update_count_max": _NUMBER.or_null("unknown").says("least and greatest update count of its steps"),
    "weights": TableColumn("weights").or_null("all alike").added.says("of each run of steps"),
    "first": _FLAG.or_null().says("it holds the episode's first step"),
    "last": _FLAG.or_null().says("it holds (or closes after) the episode's last step"),
    "terminated": _FLAG.or_null("not ended here, or not said"),
    "truncated": _FLAG.or_null("not ended here, or not said").says("how the episode ended"),
    "reason": _NAME.or_null("not ended so").says(
        'why it ended without a last step: "gap", "interrupted", or the user\'s words'
    ),
    "episode_start": COUNT.says("steps of the episode before this segment"),
    "return": _DOUBLE.or_null("no such field").says("sum of the reward field over the episode so far"),
    "metadata": _TEXT.or_null("none").says("JSON value: the episode's metadata"),
    "created_at": _TIME.or_null().says("when it was collected for its commit"),
    "commit": COUNT.once_committed.says("number of the commit that brought it"),
    "chunks": _NAME.where("shard", "no shard").once_committed,
    "chunks_bytes": COUNT.where("shard", "no shard").once_committed,
    "chunks_crc32c": _CHECKSUM.where("shard", "no shard").once_committed.says("file of its shard's chunk rows"),
}
_CHUNKS = {
    "shard": _NAME.says("key of the shard, in the archive of this file; must lie below `shards/` or `journal/`"),
    "member": _TEXT.says("name of the member: `zarr.json`, `<array>/zarr.json`, `<array>/c/<chunk>/0...`"),
    "array": _NAME.says("path of the array; empty for metadata"),
    "chunk": TableColumn("int32", -1).says("number of the chunk along axis 0, from 0 without gaps; -1 for metadata"),
    "rows": COUNT.says("rows of a chunk of this array (the last one may hold fewer); 0 for metadata"),
    "offset": COUNT,
    "size": COUNT.says("bytes [offset, offset + size) of the shard's object; directory: 0, of `<shard>/<member>`"),
    "crc32c": _CHECKSUM.says("of a chunk: the number in its own last four bytes; of metadata: of these bytes"),
}
_LIVE = {
    "rank": _RANK,
    "buffer": _NAME.says("whose buffer, which"),
    "env_id": _NUMBER,
    "position": COUNT.says("env row of that buffer (-1 for none), and where in it the run begins"),
    "session": _NAME,
    "stream_rank": _RANK,
    "stream_env": _NUMBER.says("the stream of the steps (same buffer name)"),
    "lo": COUNT,
    "hi": COUNT.says("it is steps [lo, hi) of the stream, from `position` on; lo = hi: an episode without steps"),
}
_CHECKPOINTS = {
    "commit": COUNT.says("its commit"),
    "run": _NAME,
    "session": _NAME,
    "name": _TEXT.says("whose it is, what it is called"),
    "step": _NUMBER.says("the training step"),
    "world_size": TableColumn("int32", 1, MOST_RANKS).says("ranks of its world"),
    "whole": _FLAG.says("all ranks are in it"),
    "replay_saved": _FLAG.says("buffers are in it"),
    "metrics": _TEXT.says("JSON value"),
    "created_at": _TIME.says("when it was committed"),
    "manifest": COUNT.or_null("it is its own").added.says("the commit whose tables have its steps"),
}
_BRANCHES = {
    "session": _NAME,
    "run": _NAME.says("the session that resumed, and its run"),
    "parent": _NAME,
    "parent_run": _NAME.says("the session that made the checkpoint, and its run"),
    "rank": _RANK,
    "sequence": _SEQUENCE.says("segments of this rank of `parent` below `sequence` are in the checkpoint"),
    "resumed_from": COUNT.says("number of the commit with the checkpoint, in the archive in which it was"),
    "commit": _OF_COMMIT,
    "trained": COUNT.or_null("as `sequence` (or no column)").added.says(
        'of ledger rows "trained" only those below it count'
    ),
}
_FORGOTTEN = {
    "key": _TEXT.says("the object; of a directory shard, its folder"),
    "bytes": COUNT.says("how many it had, as the store said"),
    "commit": COUNT.says("number of the commit that let go of it"),
}
_PRUNED = {
    "key": _TEXT,
    "bytes": COUNT.says("the object, and its size"),
    "reason": _NAME.says('"forgotten": a commit let go of it, or of those that named it; "left behind": none ever did'),
    "commit": COUNT.says("number of that commit"),
}
_LABELS = {
    "episode_id": _TEXT.says("the episode"),
    "session": _NAME,
    "rank": _RANK,
    "sequence": _SEQUENCE.says("the episode's newest segment when it was said"),
    "key": _NAME.says("what it is about"),
    "value": _TEXT.or_null("the label is taken back").says("JSON value"),
    "by": _BY.says("who said it"),
    "created_at": _TIME.says("when"),
    "commit": _OF_COMMIT,
}
_LATE = {
    "session": _NAME,
    "buffer": _NAME,
    "rank": _RANK,
    "env_id": _NUMBER.says("the stream of the steps"),
    "position": COUNT,
    "length": COUNT.between(1, MOST).says("its steps [position, position + length)"),
    "shard": _NAME.unless("dropped"),
    "start": _START.unless("dropped").says("its shard, and rows [start, start + length) of step arrays"),
    "extents": _EXTENTS.or_null("none such").says("as in the segments table"),
    "schema": _PROSE.unless("dropped").says("JSON of the shard's schema"),
    "fields": _TEXTS.says("paths (escaped, joined) of the fields"),
    "provenance": _PROSE.or_null("not told").says("JSON value: what made it (function, version, weights)"),
    "by": _BY.says("who added it"),
    "dropped": _FLAG.says("the fields are taken away from these steps"),
    "created_at": _TIME.once_committed.says("when"),
    "commit": _OF_COMMIT.once_committed,
    "chunks": _NAME.unless("dropped").once_committed,
    "chunks_bytes": COUNT.unless("dropped").once_committed,
    "chunks_crc32c": _CHECKSUM.unless("dropped").once_committed.says("file of its shard's chunk rows"),
}
_BATCHES = {
    "batch": COUNT.says("number of the batch"),
    "number": _NUMBER.or_null("items of a job that have names").says("an item of it, such as an episode's place"),
    "name": _TEXT.or_null("items of a job that have numbers").says("an item of it, such as a shard's key"),
}
_FAILED = {
    "batch": COUNT.says("number of the batch"),
    "episode_id": _TEXT.says("the episode at which a job's function failed"),
    "error": _TEXT.says("class and text of the error"),
}
_MOVED = {
    "shard": _NAME.says("key of the new shard of a range of steps that was moved"),
    "start": _START.says("where it begins there"),
    "extents": _EXTENTS.or_null("none such").says("as in the segments table"),
    "schema": _PROSE.says("JSON of the shard's schema"),
}
_TAGS = {
    "name": _TEXT.says("of the tag; there is one row of a name"),
    "target": COUNT.says("the commit that it names; of a checkpoint one whose tables have it, not always its own"),
    "checkpoint": _TEXT.or_null("a commit was"),
    "run": _TEXT.or_null("a commit was").says("what was tagged, if a checkpoint was"),
    "by": _TEXT.or_null("not told").says("who tagged it"),
    "created_at": _TIME.says("when"),
    "commit": _OF_COMMIT,
}
_RUNS = {
    "run": _TEXT.says("the name of the run; it is in one file of an index, once"),
    "entry": _TEXT.says("JSON: the object that `runs` of a commit would have"),
}
_RUNFILES = {
    "first": _TEXT.says("the first run in the file"),
    "path": _TEXT.says("key of the file"),
    "rows": COUNT,
    "bytes": COUNT,
    "crc32c": _CHECKSUM.says("as a commit says of a file"),
}
_LEDGER = {
    "ledger": _NAME.says("the name of the ledger"),
    "key": _TEXT.says('JSON value (ASCII), a string or an integer: the prompt; `null` in a row of state "cursor"'),
    "round": COUNT.says("counts how often the key was drawn, from 0"),
    "sibling": _NUMBER.between(-1, MOST_SIBLINGS - 1).says("which rollout of the prompt, from 0; -1: all of them"),
    "state": _NAME.says('"drawn", "started", "sealed", "trained", "dropped"; "cursor": of the data set'),
    "siblings": _NUMBER.between(0, MOST_SIBLINGS)
    .or_null("other states")
    .says('of "drawn": how many rollouts were planned, at most 2^20'),
    "episode_id": _TEXT.or_null("other states").says(
        'of "sealed": the episode; its rows come in the same commit, or came before'
    ),
    "model_weights_uuid": _NAME.or_null("not told"),
    "update_count": _NUMBER.or_null("not told").says("with which weights, after which update"),
    "reason": _NAME.or_null("not told").says('of "dropped": why'),
    "cursor": _TEXT.or_null("other states").says('of "cursor": JSON value, where the data set\'s reader stands'),
    "session": _NAME,
    "rank": _RANK,
    "sequence": _SEQUENCE.says("who said it; numbered with the rank's segments"),
    "created_at": _TIME.says("when it was said"),
    "commit": _OF_COMMIT.or_null("staged, journaled"),
}
_WEIGHED = Rule(("weights", "length"), "weights of other steps than it has", _unfit)

_OF_LATE = ("length", "provenance", "by", "dropped", "created_at")

TABLES = {
    "segments": Table(_SEGMENTS, (_WEIGHED,), listed=True),
    "chunks": Table(_CHUNKS),
    "live": Table(_LIVE, (_ENDS, _APART)),
    "checkpoints": Table(_CHECKPOINTS, listed=True),
    "branches": Table(_BRANCHES, listed=True),
    "forgotten": Table(_FORGOTTEN, listed=True),
    "pruned": Table(_PRUNED),
    "runs": Table(_RUNS, (Rule(("run",), "runs that are not in the order of their names", _mixed),)),
    "runfiles": Table(_RUNFILES, (Rule(("first",), "files that are not in the order of their runs", _mixed),)),
    "labels": Table(_LABELS, of=ADDRESS, listed=True, about=(*ADDRESS, "key"), told=("value", "by", "created_at")),
    "late": Table(_LATE, of=STRETCH, listed=True, about=(*STREAM, "position", "fields"), told=_OF_LATE),
    "tags": Table(_TAGS, listed=True),
    "ledger": Table(_LEDGER, of=EPISODE, listed=True),
    "batches": Table(_BATCHES),
    "failed": Table(_FAILED),
    "moved": Table(_MOVED),
}
LISTED = tuple(kind for kind, table in TABLES.items() if table.listed)
SHARDED = tuple(kind for kind in LISTED if "chunks" in TABLES[kind].columns)  # their rows name shards
FOLLOWING = tuple(kind for kind, table in TABLES.items() if table.of)  # their rows go with those of segments

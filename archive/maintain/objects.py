"""The objects that commits lead to, how many bytes they have, and to which other archives refer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from archive import tables
from archive.base import CorruptManifestError, CorruptStateError, layout, plainjson
from archive.manifest import Commit, FileRef, Pin, attempts, new_session, tablefiles
from archive.store import Storage
from archive.tables import among

if TYPE_CHECKING:
    import pyarrow as pa

_FEW = 100  # objects, that are asked for by name: a LIST of all there are takes the longer, the more there are
_FOLDERS = ("journal", "manifest", "shards", "states")
Sizes = dict[str, int]  # key -> bytes


def sizes(storage: Storage, keys: Collection[str]) -> Sizes:
    """How many bytes each object has, as the store says; a shard that is a directory is one. 0: it is gone already."""
    if len(keys) <= _FEW and not any(key.endswith(".zarr") for key in keys):
        return storage.sizes(sorted(keys))
    out = dict.fromkeys(sorted(keys), 0)
    for folder in sorted({key.partition("/")[0] for key in keys} & {*_FOLDERS}):
        for one in storage.scan(folder):
            key = one.key if one.key in out else "/".join(one.key.split("/")[:2])
            if key in out:
                out[key] += one.bytes
    return out


def no_longer(storage: Storage, before: Collection[str], after: Collection[str]) -> Sizes:
    """The objects that were led to before and are not after, but for the lists of prunes: who was stalled reads them.

    CorruptManifestError if there is one that a prune could not delete.
    """
    keys = {key for key in before if not key.endswith(layout.PRUNED)}.difference(after)
    check_made(storage, keys)
    return sizes(storage, keys)


def check_made(storage: Storage, keys: Iterable[str]) -> None:
    """Refuse to let go of, or to delete, what is no shard, object of a journal, staged object or manifest file of the
    archive: a table that names such a thing is damaged, or made up."""
    strange = [key for key in keys if layout.session_of(key) is None]
    if strange:
        raise CorruptManifestError(
            f"a table of the archive at {storage.url} has {strange[0]!r:.200} among the objects, which is no shard, no "
            "staged object and no manifest file: nothing was deleted and nothing committed; run `archive verify`"
        )


def note_forgotten(
    storage: Storage, parent: Commit, gone: Sizes, back: Collection[str] = ()
) -> tuple[FileRef, ...]:  # fmt: skip
    """The files of the forgotten table with these objects added, and those taken out that are led to again.

    Few files are made of many: those that are folded into the new one are objects that go, too.
    """
    present = parent.files("forgotten")
    keep = attempts.files_to_keep([f.rows for f in present], [f.bytes for f in present], len(gone) + len(present))
    if back:
        keep = 0
    gone = gone | {ref.path: ref.bytes for ref in present[keep:]}
    new = tables.from_columns(
        "forgotten", {"key": list(gone), "bytes": list(gone.values()), "commit": [parent.number + 1] * len(gone)}
    )
    older = tablefiles.load(storage, "forgotten", present[keep:])
    table = tables.concat("forgotten", [_without(older, back), new])
    return (*present[:keep], tablefiles.write(storage, new_session(), "forgotten", table)) if table.num_rows else ()


def _without(table: pa.Table, keys: Collection[str]) -> pa.Table:
    return table.filter(~among(table["key"], keys))


def read_pins(storage: Storage) -> dict[str, str]:
    """Key of a shard or chunk file -> URL of an archive that refers to it."""
    keys = [f"pins/{name}" for name in storage.list("pins") if name.endswith(".json")]
    out: dict[str, str] = {}
    for key, data in zip(keys, storage.get_all(keys), strict=True):
        where = storage.full_url(key)
        value = plainjson.parse(data, what=where, error=CorruptStateError, max_depth=plainjson.MAX_DEPTH)
        pin = Pin.from_json(value, what=where, error=CorruptStateError, remedy="put it back from a copy")
        out |= dict.fromkeys(pin.objects, pin.url)
    return out

"""What other archives refer to: the objects that their pins list."""

from __future__ import annotations

from archive.base import CorruptStateError, plainjson
from archive.manifest import Pin
from archive.store import Storage


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

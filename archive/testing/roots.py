"""Does no I/O of its own: places for a test's archive, and for tests of a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from archive.store import Storage

if TYPE_CHECKING:
    from archive import Archive


@dataclass
class EmptyRoot:
    """A root that nothing lies below, for one test: `archive.open(root.url, storage_options=root.storage_options)`."""

    url: str
    storage_options: dict[str, Any] = field(default_factory=dict)

    def connect(self, **settings: Any) -> Storage:
        """Give a storage of its own, as another process would have it."""
        return Storage.connect(self.url, self.storage_options, **settings)

    def create(self, **settings: Any) -> Archive:
        """Make an archive there, as `archive.create` does."""
        import archive

        return archive.create(self.url, storage_options=self.storage_options, **settings)

    def open(self, **settings: Any) -> Archive:
        """Open the archive there, as `archive.open` does."""
        import archive

        return archive.open(self.url, storage_options=self.storage_options, **settings)

    def clear(self) -> None:
        """Delete all that lies there."""
        storage = self.connect()
        storage.delete_many(one.key for one in storage.scan(""))


def url_of(where: Any) -> str:
    """The URL of an archive, of a root, or of what `archive.open` takes, as the library writes it."""
    return Storage.connect(getattr(where, "url", where)).url


def is_within(url: str, place: str) -> bool:
    """True if a root is that place, or is below it."""
    return not place or url == place or url.startswith(f"{place.rstrip('/')}/")

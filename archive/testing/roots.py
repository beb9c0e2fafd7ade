"""Does no I/O of its own: where a store is tested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from archive.store import Storage


@dataclass
class EmptyRoot:
    """A root on the store under test that nothing lies below, for one test."""

    url: str
    storage_options: dict[str, Any] = field(default_factory=dict)

    def connect(self, **settings: Any) -> Storage:
        """Give a storage of its own, as another process would have it."""
        return Storage.connect(self.url, self.storage_options, **settings)

"""Where episodes of other archives go to, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from archive import Archive
from archive import open as open_archive
from archive.base import NotFoundError
from archive.store import Storage

Progress = Callable[[int, int], None]


class How(TypedDict, total=False):
    """How episodes get to another archive; see `merge`."""

    copy: bool
    verify: bool
    storage_options: Mapping[str, Any] | None
    allow_bases: bool | Sequence[str]
    single_writer: bool
    progress: Progress | None


@dataclass(frozen=True)
class Destination:
    """Another archive, which need not be there yet, and how episodes get to it; see `merge`."""

    to: Any
    copy: bool = False
    verify: bool = False
    storage_options: Mapping[str, Any] | None = None
    allow_bases: bool | Sequence[str] = ()
    single_writer: bool = False
    progress: Progress | None = None

    @property
    def url(self) -> str:
        """The URL of an archive that is not there yet."""
        return Storage.connect(self.to, self.storage_options).url

    def source(self, url: Any) -> Archive:
        """An archive that episodes come from; as it is if it is open."""
        if isinstance(url, Archive):
            return url
        return open_archive(url, storage_options=self.storage_options, allow_bases=self.allow_bases)

    def present(self) -> Archive | None:
        """The archive as it is now; None if it is not there."""
        if isinstance(self.to, Archive):
            return self.to.refresh()
        try:
            return self._opened(create=False)
        except NotFoundError:
            return None

    def created(self) -> Archive:
        """The archive, which is made if it is not there."""
        return self.to.refresh() if isinstance(self.to, Archive) else self._opened(create=True)

    def _opened(self, *, create: bool) -> Archive:
        return open_archive(
            self.to, create=create, storage_options=self.storage_options, allow_bases=self.allow_bases,
            single_writer=self.single_writer,
        )  # fmt: skip

    def moved(self, done: int, total: int) -> None:
        """Say how many of the shards of a source are there."""
        if self.progress is not None:
            self.progress(done, total)


def taken_from(options: dict[str, Any]) -> How:
    """What of some options says how episodes get to another archive, taken out of them."""
    names = [one.name for one in fields(Destination) if one.name in options and one.name != "to"]
    how: Any = {name: options.pop(name) for name in names}
    return how  # type: ignore[no-any-return]

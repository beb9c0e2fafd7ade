"""Episode ids and segment numbers of one writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

from archive.base import DuplicateEpisodeError, FieldError, Undo, check_text
from archive.manifest import Place
from archive.write.episoderecords import NewEpisodes


class Ids:
    """Episode ids of one writer: new ones, and the claim to those that the user gives."""

    def __init__(self, place: Place, known: Callable[[], Set[str]], undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self._prefix = f"{place.session}-{place.rank:05d}-"
        self._count = 0
        self.sequence = 0  # of the next segment of this rank and session, over all buffers
        self._load = known
        self._known: Set[str] | None = None  # of what is committed; others' come to it as it goes
        self._own: set[str] = set()  # given by the user
        self._new: list[str] = []  # claimed by the call under way

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """What is claimed within is given back if the call is refused."""
        self._new.clear()
        try:
            yield
        except BaseException:
            self._own.difference_update(self._new)
            raise

    def take(self, count: int) -> int:
        """So many new ids: the number of the first; the others follow."""
        self._count += count
        return self._count - count

    def name(self, number: int) -> str:
        """The new id of that number."""
        return f"{self._prefix}{number:09d}"

    def episodes(self, metadata: dict[str, Any], fields: str, *, replace: bool) -> NewEpisodes:
        """What begins episodes of these fields; an id that is known is refused, unless they are to `replace` others."""

        def claim(name: str) -> bool:
            return self.claim(check_text(name, "episode_id"), replace=replace)

        return NewEpisodes(claim, self.take, self.name, metadata, fields)

    def check_new(self, name: str | None) -> None:
        """Refuse to replace a known episode by one of which no step is given."""
        if name is not None and self._is_known(name):
            raise FieldError(
                f"no steps were given for episode {name!r}, which would be replaced by one of length 0; nothing was "
                "changed: to change its metadata, read it and add it again whole (with its weights, update count and "
                f"flags), w.add_episode(arc.episodes[{name!r}].read(), episode_id={name!r}, replace=True, "
                f"metadata={{...}})"
            )

    def _is_known(self, name: str) -> bool:
        if self._known is None:
            self._known = self._load()
        return name in self._known or name in self._own or name.startswith(self._prefix)

    def claim(self, name: str, *, replace: bool) -> bool:
        """Whether the id takes the place of another, if there is one: it may be committed meanwhile. One that is known
        and replaces none is refused."""
        known = self._is_known(name)
        if known and not replace:
            raise DuplicateEpisodeError(
                f"the archive already has an episode {name!r}; give another id, or replace=True (with all of its "
                "steps) for a new revision"
            )
        self._undo.member(self._own, name)
        if name not in self._own:
            self._own.add(name)
            self._new.append(name)
        return replace

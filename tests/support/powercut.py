"""A disk that loses at a power cut what was not synced.

disk = Disk(folder)
with disk.recorded():
    ...                                  # all that the library does to files below the folder is written down
left = disk.left(cut, LEAST)             # the files that are there, had the power gone after so many operations
left = disk.left(cut, Chance(seed))      # of what was not synced some is there, in any order; bytes are torn, or zeros

Bytes of a file are kept by a sync of that file alone; its name by a sync of the folder that the name is in, and that of
a folder by one of the folder above. Nothing orders what was not synced.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FOLDER = -1  # the target of an entry that is a folder; of files it is a number
Target = int | None  # None: there is no such entry
Tree = dict[str, bytes | None]  # path -> bytes of a file; None: a folder


class Written(NamedTuple):
    file: int
    data: bytes


class Synced(NamedTuple):
    file: int


class Entered(NamedTuple):
    """A name in a folder gets a target."""

    folder: str
    name: str
    target: Target


class FolderSynced(NamedTuple):
    folder: str


Operation = Written | Synced | Entered | FolderSynced


class Killed(BaseException):
    """The process was killed here."""


class Survival:
    """What is there after a power cut: only what was synced."""

    def entry(self, states: Sequence[Target]) -> Target:
        """One of the targets that a name has had since its folder was synced, the one of then first."""
        return states[0]

    def data(self, synced: bytes, written: bytes) -> bytes:
        """The bytes of a file to which some were written since it was synced."""
        return synced


LEAST = Survival()


class Chance(Survival):
    """Some of the rest is there, too."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def entry(self, states: Sequence[Target]) -> Target:
        return self._chance.choice(states)

    def data(self, synced: bytes, written: bytes) -> bytes:
        kept = written[: self._chance.randint(0, len(written))]
        return synced + self._chance.choice([kept, bytes(len(written)), kept + bytes(len(written) - len(kept))])


class Everything(Survival):
    """All is there, as programs saw it."""

    def entry(self, states: Sequence[Target]) -> Target:
        return states[-1]

    def data(self, synced: bytes, written: bytes) -> bytes:
        return synced + written


@dataclass
class _File:
    synced: bytes = b""
    written: bytes = b""

    def sync(self) -> None:
        self.synced, self.written = self.synced + self.written, b""


@dataclass
class _Folder:
    synced: dict[str, Target] = field(default_factory=dict)
    changed: list[tuple[str, Target]] = field(default_factory=list)

    def sync(self) -> None:
        self.synced |= dict(self.changed)
        self.changed = []

    def left(self, survival: Survival) -> dict[str, Target]:
        states = {name: [target] for name, target in self.synced.items()}
        for name, target in self.changed:
            states.setdefault(name, [None]).append(target)
        return {name: survival.entry(of) for name, of in states.items()}


class Disk:
    """A folder whose entries are on the disk, and all that is done below it while it is recorded."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._base = str(base)
        self._lock = threading.RLock()
        self._opened: dict[int, int | str] = {}  # descriptor -> the file, or the folder
        self._named: dict[str, int] = {}
        self._files = 0
        self._life: int | None = None  # operations until the process is killed
        self.operations: list[Operation] = []

    @property
    def now(self) -> int:
        """How many operations there were."""
        return len(self.operations)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """All that is done below the folder is written down; nothing is synced to the true disk."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "close", "write", "writev", "fsync", "link", "replace", "unlink", "mkdir"):
                patch.setattr(os, name, partial(self._recorded, getattr(self, f"_on_{name}"), getattr(os, name)))
            yield

    @contextmanager
    def killed_after(self, count: int) -> Iterator[None]:
        """The process that works inside is killed after so many operations, if it has more."""
        self._life = count
        try:
            with suppress(Killed):
                yield
        finally:
            self._life = None

    def left(self, cut: int, survival: Survival = LEAST) -> Tree:
        """The files and folders that are there, had the power gone after so many operations."""
        files: defaultdict[int, _File] = defaultdict(_File)
        folders: defaultdict[str, _Folder] = defaultdict(_Folder)
        for one in self.operations[:cut]:
            match one:
                case Written(file, data):
                    files[file].written += data
                case Synced(file):
                    files[file].sync()
                case Entered(folder, name, target):
                    folders[folder].changed.append((name, target))
                case FolderSynced(folder):
                    folders[folder].sync()
        contents = {number: survival.data(file.synced, file.written) for number, file in files.items()}
        return dict(_walked("", {path: folder.left(survival) for path, folder in folders.items()}, contents))

    def seen(self) -> Tree:
        """The files and folders that programs see now."""
        found = sorted(self.base.rglob("*"))
        return {str(one.relative_to(self.base)): None if one.is_dir() else one.read_bytes() for one in found}

    def settle(self) -> None:
        """What was put there without the code under test is on the disk."""
        known = self.left(self.now, Everything())
        for path, data in self.seen().items():
            if known.get(path, b"") != data:
                self._plant(path, data)

    def _plant(self, path: str, data: bytes | None) -> None:
        folder, _, name = path.rpartition("/")
        self._files += 1
        self._named[path] = target = FOLDER if data is None else self._files
        self.operations += [Written(target, data or b""), Synced(target), Entered(folder, name, target)]
        self.operations.append(FolderSynced(folder))

    def _recorded(self, record: Callable[..., Any], real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        with self._lock:
            return record(real, *args, **more)

    def _do(self, operation: Operation, work: Callable[[], Any]) -> Any:
        if self._life is not None:
            if self._life == 0:
                raise Killed
            self._life -= 1
        done = work()
        self.operations.append(operation)
        return done

    def _key(self, path: Any) -> str | None:
        """The path from the folder on; None elsewhere."""
        path = os.fspath(path)
        return path[len(self._base) + 1 :] if isinstance(path, str) and path.startswith(f"{self._base}/") else None

    def _entry(self, path: Any, target: Target, work: Callable[[], Any]) -> Any:
        """A name gets a target, or is taken away."""
        key = self._key(path)
        if key is None:
            return work()
        folder, _, name = key.rpartition("/")
        done = self._do(Entered(folder, name, target), work)
        self._named.pop(key, None)
        if target is not None:
            self._named[key] = target
        return done

    def _on_open(self, real: Callable[..., int], path: Any, flags: int, *args: Any, **more: Any) -> int:
        key, work = self._key(path), partial(real, path, flags, *args, **more)
        if flags & os.O_DIRECTORY and (key is not None or path == self._base):
            descriptor = work()
            self._opened[descriptor] = key or ""
            return descriptor
        if key is None or not flags & os.O_EXCL:
            return work()
        self._files += 1
        descriptor = int(self._entry(path, self._files, work))
        self._opened[descriptor] = self._files
        return descriptor

    def _on_close(self, real: Callable[[int], None], descriptor: int) -> None:
        self._opened.pop(descriptor, None)
        real(descriptor)

    def _on_write(self, real: Callable[..., int], descriptor: int, data: Any) -> int:
        return self._on_writev(lambda _, parts: real(descriptor, parts[0]), descriptor, [data])

    def _on_writev(self, real: Callable[..., int], descriptor: int, parts: Sequence[Any]) -> int:
        file = self._opened.get(descriptor)
        if not isinstance(file, int):
            return real(descriptor, parts)
        return int(self._do(Written(file, b"".join(parts)), lambda: _all(real(descriptor, parts), parts)))

    def _on_fsync(self, real: Callable[[int], None], descriptor: int) -> None:
        match self._opened.get(descriptor):
            case int(file):
                self._do(Synced(file), lambda: None)
            case str(folder):
                self._do(FolderSynced(folder), lambda: None)
            case _:
                real(descriptor)

    def _on_link(self, real: Callable[..., None], source: Any, target: Any) -> None:
        self._entry(target, self._named.get(self._key(source) or ""), lambda: real(source, target))

    def _on_replace(self, real: Callable[..., None], source: Any, target: Any) -> None:
        """One operation for programs, two for the disk: the old name may be kept as well."""
        self._entry(target, self._named.get(self._key(source) or ""), lambda: real(source, target))
        self._entry(source, None, lambda: None)

    def _on_unlink(self, real: Callable[..., None], path: Any, **more: Any) -> None:
        self._entry(path, None, lambda: real(path, **more))

    def _on_mkdir(self, real: Callable[..., None], path: Any, *args: Any) -> None:
        self._entry(path, FOLDER, lambda: real(path, *args))


def _all(count: int, parts: Sequence[Any]) -> int:
    assert count == sum(map(len, parts)), "the true disk took them all at once"
    return count


def _walked(folder: str, folders: dict[str, dict[str, Target]], contents: dict[int, bytes]) -> Iterator[Any]:
    """What is found from the top; names in a folder whose own name is lost are lost, too."""
    for name, target in folders.get(folder, {}).items():
        path = f"{folder}/{name}".removeprefix("/")
        if target == FOLDER:
            yield path, None
            yield from _walked(path, folders, contents)
        elif target is not None:
            yield path, contents.get(target, b"")


def replant(disk: Disk, tree: Tree) -> None:
    """Let programs find these files and folders, and no others."""
    shutil.rmtree(disk.base)
    disk.base.mkdir()
    for path, data in tree.items():
        if data is None:
            (disk.base / path).mkdir()
        else:
            (disk.base / path).write_bytes(data)

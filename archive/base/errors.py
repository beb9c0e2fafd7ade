"""Every error this library raises, grouped by what a handler would do, and the import of optional packages.

ArchiveError
├── UsageError (ValueError)               the call is wrong: change it; nothing was written
│   ├── FieldError                        a field's name, dtype, shape or axis
│   ├── DuplicateEpisodeError             an episode id that the archive already has
│   ├── ColumnError                       a column does not cover the live steps exactly
│   ├── StateError                        a state tree holds something that cannot be stored
│   ├── CapacityError                     more steps or episodes than there is room for
│   │   └── EmptyBufferError (RuntimeError) a buffer has nothing to sample
│   ├── ClosedError                       the writer was closed
│   ├── ReadOnlyError (TypeError)         a value of the archive is read-only
│   └── MissingPackageError (ImportError) an optional package is not installed; the message names it
├── NotFoundError (LookupError)           no archive, commit, checkpoint or episode of that name
│   └── NothingThereError (FileNotFoundError) no archive at that URL, or nothing to load in it
├── AlreadyExistsError (FileExistsError)  an object or archive is already there
├── StorageError (OSError)                the store failed; the cause is chained
│   ├── MissingObjectError (FileNotFoundError)
│   ├── AccessDeniedError (PermissionError)
│   ├── StorageFullError
│   ├── ShortReadError                    fewer bytes than asked for
│   ├── DeadlineError (TimeoutError)      retried until the deadline
│   └── AmbiguousWriteError               a create-only put may or may not have happened
├── IntegrityError (ValueError)           bytes are there and wrong; never returned as values
│   ├── CorruptChunkError
│   ├── CorruptCommitError
│   ├── CorruptManifestError
│   ├── CorruptStateError
│   └── UnsafePathError                   a name from the bucket leads outside the archive
├── UpgradeError                          written by a newer format: upgrade the library
├── ConflictError                         another process writes here, too
│   ├── SupersededError                   a newer session of this run has started
│   ├── SessionInUseError                 this rank of this session already has a writer
│   ├── ExpiredError                      another process forgot or pruned what this call needs
│   ├── NotExclusiveError                 the store has no create-only put
│   └── CommitUnknownError                the store gave no answer, so the commit may be made or not
├── JobError (RuntimeError)               a job stopped; what it finished stays, and the same call goes on
├── NotDurableError (TimeoutError)        additions are not in the journal by the deadline
└── CheckpointError                       a checkpoint does not fit the call
    ├── RanksMissingError (TimeoutError)  some ranks have not staged by the deadline
    └── PartialCheckpointError            saved without all ranks; needs allow_missing=True

Each message says what, where, and what to do.
"""

from __future__ import annotations

import importlib
from typing import Any

from archive.base.plaintext import visible as _visible


class ArchiveError(Exception):
    """Root of all errors of this library. Its text acts on no terminal, whatever names it holds."""

    def __str__(self) -> str:
        return _visible(super().__str__())


class UsageError(ArchiveError, ValueError):
    """The call is wrong; nothing was written."""


class FieldError(UsageError):
    """A field's name, dtype, shape or axis cannot be stored or read as asked."""


class DuplicateEpisodeError(UsageError):
    """The archive already has an episode of this id."""


class ColumnError(UsageError):
    """A column or attribute does not cover the live steps or episodes exactly."""


class StateError(UsageError):
    """A state tree holds something that cannot be stored without pickle."""


class CapacityError(UsageError):
    """More steps or episodes than there is room for."""


class EmptyBufferError(CapacityError, RuntimeError):
    """A buffer has nothing to sample."""


class ClosedError(UsageError):
    """The writer was closed."""


class ReadOnlyError(UsageError, TypeError):
    """A value of the archive is read-only: a change of it would be lost."""


class MissingPackageError(UsageError, ImportError):
    """The call needs a package that is not installed, or does not load."""


def package(module: str, user: str, install: str) -> Any:
    """The module of an optional package; MissingPackageError says what `user` needs and what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise MissingPackageError(f"{user} needs {module} ({e}): pip install {install}") from e


class NotFoundError(ArchiveError, LookupError):
    """No archive, commit, checkpoint, episode or field of that name."""

    def __str__(self) -> str:  # a LookupError may print the repr of its argument
        return _visible(str(self.args[0])) if self.args else ""


class NothingThereError(NotFoundError, FileNotFoundError):
    """No archive at that URL, or nothing to load in it."""


class AlreadyExistsError(ArchiveError, FileExistsError):
    """An object or archive of that name is already there."""


class StorageError(ArchiveError, OSError):
    """The store failed; the cause is chained."""


class MissingObjectError(StorageError, FileNotFoundError):
    """An object that should be there is not."""


class AccessDeniedError(StorageError, PermissionError):
    """The store refused the request."""


class StorageFullError(StorageError):
    """No space left."""


class ShortReadError(StorageError):
    """The store answered with fewer bytes than were asked for."""


class DeadlineError(StorageError, TimeoutError):
    """A request was retried until its deadline."""


class AmbiguousWriteError(StorageError):
    """A create-only put may or may not have happened."""


class IntegrityError(ArchiveError, ValueError):
    """Bytes are there and wrong."""


class CorruptChunkError(IntegrityError):
    """A chunk of a shard does not match its checksum."""


class CorruptCommitError(IntegrityError):
    """A commit is damaged."""


class CorruptManifestError(IntegrityError):
    """A manifest file is damaged."""


class CorruptStateError(IntegrityError):
    """A staged state is damaged."""


class UnsafePathError(IntegrityError):
    """A name found in the bucket leads outside the archive's root."""


class UpgradeError(ArchiveError):
    """Written by a newer format than this library reads."""


class ConflictError(ArchiveError):
    """Another process writes here, too."""


class SupersededError(ConflictError):
    """A newer session of this run has started."""


class SessionInUseError(ConflictError):
    """This rank of this session already has, or had, a writer."""


class ExpiredError(ConflictError):
    """Another process deleted (forgot or pruned) what this call needs."""


class NotExclusiveError(ConflictError):
    """The store has no create-only put."""


class CommitUnknownError(ConflictError):
    """The store gave no answer, so the commit may be made or not; the same call may be repeated."""


class JobError(ArchiveError, RuntimeError):
    """A job stopped; what it finished stays, and the same call goes on from there."""


class NotDurableError(ArchiveError, TimeoutError):
    """Additions are not durable by the deadline; they are kept, and will be."""


class CheckpointError(ArchiveError):
    """A checkpoint does not fit the call."""


class RanksMissingError(CheckpointError, TimeoutError):
    """Some ranks have not staged by the deadline."""


class PartialCheckpointError(CheckpointError):
    """Saved without all ranks; needs allow_missing=True."""

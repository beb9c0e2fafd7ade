"""What every room may use: names, keys and errors. Plain values come in; checked ones, or the library's errors, go out.

Being imported, it imports the standard library only, so that `import archive` is quick."""

from __future__ import annotations

from archive.base import forking, jsontree, layout, plainjson, plaintext, shutdown
from archive.base.byterange import ByteRange
from archive.base.cached import cached_property
from archive.base.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    AmbiguousWriteError,
    ArchiveError,
    CapacityError,
    CheckpointError,
    ClosedError,
    ColumnError,
    CommitUnknownError,
    ConflictError,
    CorruptChunkError,
    CorruptCommitError,
    CorruptManifestError,
    CorruptStateError,
    DeadlineError,
    DuplicateEpisodeError,
    EmptyBufferError,
    FieldError,
    IntegrityError,
    MissingObjectError,
    MissingPackageError,
    NotExclusiveError,
    NotFoundError,
    NothingThereError,
    PartialCheckpointError,
    RanksMissingError,
    ReadOnlyError,
    SessionInUseError,
    ShortReadError,
    StateError,
    StorageError,
    StorageFullError,
    SupersededError,
    UnsafePathError,
    UpgradeError,
    UsageError,
)
from archive.base.forking import in_child
from archive.base.layout import ARCHIVE_KEY, agreement_folder, agreement_key, request_key
from archive.base.logs import make_visible
from archive.base.losses import Counts, Losses
from archive.base.names import check_text, escape, escape_path, show, unescape_path
from archive.base.parallel import Job, in_order
from archive.base.plainjson import misshapen
from archive.base.plaintext import MAX_PAGE_BYTES, one_line, size, visible
from archive.base.readonly import frozen
from archive.base.treecodec import Decoder, Encoder, array_from_bytes, is_shape, is_simple_dtype
from archive.base.undo import Undo
from archive.base.version import __version__
from archive.base.waiting import Patience, ranks

__all__ = [
    "ARCHIVE_KEY",
    "MAX_PAGE_BYTES",
    "AccessDeniedError",
    "AlreadyExistsError",
    "AmbiguousWriteError",
    "ArchiveError",
    "ByteRange",
    "CapacityError",
    "CheckpointError",
    "ClosedError",
    "ColumnError",
    "CommitUnknownError",
    "ConflictError",
    "CorruptChunkError",
    "CorruptCommitError",
    "CorruptManifestError",
    "CorruptStateError",
    "Counts",
    "DeadlineError",
    "Decoder",
    "DuplicateEpisodeError",
    "EmptyBufferError",
    "Encoder",
    "FieldError",
    "IntegrityError",
    "Job",
    "Losses",
    "MissingObjectError",
    "MissingPackageError",
    "NotExclusiveError",
    "NotFoundError",
    "NothingThereError",
    "PartialCheckpointError",
    "Patience",
    "RanksMissingError",
    "ReadOnlyError",
    "SessionInUseError",
    "ShortReadError",
    "StateError",
    "StorageError",
    "StorageFullError",
    "SupersededError",
    "Undo",
    "UnsafePathError",
    "UpgradeError",
    "UsageError",
    "__version__",
    "agreement_folder",
    "agreement_key",
    "array_from_bytes",
    "cached_property",
    "check_text",
    "escape",
    "escape_path",
    "forking",
    "frozen",
    "in_child",
    "in_order",
    "is_shape",
    "is_simple_dtype",
    "jsontree",
    "layout",
    "make_visible",
    "misshapen",
    "one_line",
    "plainjson",
    "plaintext",
    "ranks",
    "request_key",
    "show",
    "shutdown",
    "size",
    "unescape_path",
    "visible",
]

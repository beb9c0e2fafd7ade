"""Pure, no I/O: the S3 permissions that a reader, a writer and a pruner of an archive need, and no more."""

from __future__ import annotations

from typing import Any

from archive.base import UsageError
from archive.store.root import parse_root

READER = ("s3:GetObject",)
WRITER = (*READER, "s3:PutObject", "s3:AbortMultipartUpload")
PRUNER = (*WRITER, "s3:DeleteObject")
OBJECT_ACTIONS = {"reader": READER, "writer": WRITER, "pruner": PRUNER}
DELETES = ("s3:DeleteObject", "s3:DeleteObjectVersion")
LIST, VERSIONING = "s3:ListBucket", "s3:GetBucketVersioning"

# A request that makes an object (a PUT, a copy, the end of an upload in parts), unless it says that there is to be
# none. What begins an upload in parts, and brings one, cannot say that. A store that does not tell these apart denies.
_REPLACES = {"Null": {"s3:if-none-match": "true"}, "BoolIfExists": {"s3:ObjectCreationOperation": "true"}}

_WITHOUT = {"reader": "writes nothing", "pruner": "deletes"}


def policy(role: str, url: object, *, append_only: bool = False) -> dict[str, Any]:
    """An IAM policy as JSON for a "reader", a "writer" or a "pruner" of the archive at an s3:// URL, or of all archives
    below it.

    A writer may not delete: it never needs to. A pruner may write, too, because its list is a commit. append_only: a
    writer that may add objects, but is denied to replace one and to delete one, whatever else it is allowed.
    UsageError for another role, or a URL of no bucket.
    """
    if role not in OBJECT_ACTIONS:
        raise UsageError(f"{role!r} is no role; there are {', '.join(OBJECT_ACTIONS)}")
    if append_only and role != "writer":
        raise UsageError(f"append_only is for a writer: a {role} {_WITHOUT[role]}")
    root = parse_root(url, None)
    if root.protocol not in ("s3", "s3a"):
        raise UsageError(f"{root.url} is in no bucket of S3: policies like this are for s3:// URLs")
    bucket, _, prefix = root.url.partition("://")[2].partition("/")
    below = f"arn:aws:s3:::{bucket}/{prefix}/*" if prefix else f"arn:aws:s3:::{bucket}/*"
    listing: dict[str, Any] = {"Effect": "Allow", "Action": LIST, "Resource": f"arn:aws:s3:::{bucket}"}
    if prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": [prefix, f"{prefix}/*"]}}
    statements = [{"Effect": "Allow", "Action": list(OBJECT_ACTIONS[role]), "Resource": below}, listing]
    if role == "pruner":
        statements.append({"Effect": "Allow", "Action": VERSIONING, "Resource": f"arn:aws:s3:::{bucket}"})
    if append_only:
        statements.append({"Effect": "Deny", "Action": "s3:PutObject", "Resource": below, "Condition": _REPLACES})
        statements.append({"Effect": "Deny", "Action": list(DELETES), "Resource": below})
    return {"Version": "2012-10-17", "Statement": statements}

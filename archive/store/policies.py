"""Pure, no I/O: the S3 permissions that a reader, a writer and a pruner of an archive need, and no more."""

from __future__ import annotations

from typing import Any

from archive.base import UsageError
from archive.store.root import parse_root

READER = ("s3:GetObject",)
WRITER = (*READER, "s3:PutObject")
PRUNER = (*WRITER, "s3:DeleteObject")
OBJECT_ACTIONS = {"reader": READER, "writer": WRITER, "pruner": PRUNER}
LIST, VERSIONING = "s3:ListBucket", "s3:GetBucketVersioning"


def policy(role: str, url: object) -> dict[str, Any]:
    """An IAM policy as JSON for a "reader", a "writer" or a "pruner" of the archive at an s3:// URL, or of all archives
    below it.

    A writer may not delete: it never needs to. A pruner may write, too, because its list is a commit.
    UsageError for another role, or a URL of no bucket.
    """
    if role not in OBJECT_ACTIONS:
        raise UsageError(f"{role!r} is no role; there are {', '.join(OBJECT_ACTIONS)}")
    root = parse_root(url, None)
    if root.protocol not in ("s3", "s3a"):
        raise UsageError(f"{root.url} is in no bucket of S3: policies like this are for s3:// URLs")
    bucket, _, prefix = root.url.partition("://")[2].partition("/")
    below = f"{bucket}/{prefix}/*" if prefix else f"{bucket}/*"
    objects = {"Effect": "Allow", "Action": list(OBJECT_ACTIONS[role]), "Resource": f"arn:aws:s3:::{below}"}
    listing: dict[str, Any] = {"Effect": "Allow", "Action": LIST, "Resource": f"arn:aws:s3:::{bucket}"}
    if prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": [prefix, f"{prefix}/*"]}}
    statements = [objects, listing]
    if role == "pruner":
        statements.append({"Effect": "Allow", "Action": VERSIONING, "Resource": f"arn:aws:s3:::{bucket}"})
    return {"Version": "2012-10-17", "Statement": statements}

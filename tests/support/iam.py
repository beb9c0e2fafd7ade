"""Pure, no I/O: what a request to S3 asks for, and whether policies allow it, by the rules that AWS documents.

An explicit deny counts over any allow, and what nothing allows is denied. Conditions of a statement hold together, and
one of several values is enough. Of a condition key that a request does not have, a comparison is false, one with
`IfExists` true, and `Null` says so. Anything else in a policy is an error: it would be taken for permitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

Policy = Mapping[str, Any]
_KEYS = {"Sid", "Effect", "Action", "Resource", "Condition"}


@dataclass(frozen=True)
class Asked:
    """One right that a request takes. context: condition keys, in lower case, and their values."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def allowed(policies: Sequence[Policy], asked: Asked) -> bool:
    """True if an allow of these policies covers it, and no deny does."""
    effects = {one["Effect"] for policy in policies for one in policy["Statement"] if _covers(one, asked)}
    assert effects <= {"Allow", "Deny"}
    return effects == {"Allow"}


def permits(policies: Sequence[Policy], method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bool:
    """True if all that a request takes is allowed."""
    return all(allowed(policies, one) for one in rights(method, path, headers, body))


def _covers(statement: Mapping[str, Any], asked: Asked) -> bool:
    assert set(statement) <= _KEYS, statement
    actions = any(_like(one.lower(), asked.action.lower()) for one in _list(statement["Action"]))
    resources = any(_like(one, asked.resource) for one in _list(statement["Resource"]))
    return (
        actions
        and resources
        and all(
            _holds(operator, _list(wanted), asked.context.get(key.lower()))
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def _holds(operator: str, wanted: Sequence[str], found: str | None) -> bool:
    """True if one condition key of a request is as a policy has it."""
    bare = operator.removesuffix("IfExists")
    if bare == "Null":
        return (found is None) in [value == "true" for value in wanted]
    if found is None:
        return bare != operator or bare in ("StringNotEquals", "StringNotLike")
    same = {
        "StringEquals": lambda: found in wanted,
        "StringNotEquals": lambda: found not in wanted,
        "StringLike": lambda: any(_like(one, found) for one in wanted),
        "StringNotLike": lambda: not any(_like(one, found) for one in wanted),
        "Bool": lambda: found.lower() in [value.lower() for value in wanted],
    }
    return same[bare]()


def _like(pattern: str, text: str) -> bool:
    """True if a text is as a pattern with * and ? says, which also stand for slashes."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text, re.DOTALL) is not None


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


# -- requests ----------------------------------------------------------------------------------------------------------

_OF_PARTS = {"GET": "s3:ListMultipartUploadParts", "DELETE": "s3:AbortMultipartUpload"}
_PLAIN = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "DELETE": "s3:DeleteObject"}


def rights(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Iterator[Asked]:
    """The rights that a path-style request takes, as S3 documents them."""
    place, _, query = path.partition("?")
    bucket, _, key = unquote(place).lstrip("/").partition("/")
    names = dict(parse_qsl(query, keep_blank_values=True))
    low = {name.lower(): value for name, value in headers.items()}
    arn = f"arn:aws:s3:::{bucket}/{key}"
    if "versioning" in names:
        yield Asked("s3:GetBucketVersioning", f"arn:aws:s3:::{bucket}")
    elif not key and method == "GET":
        yield Asked("s3:ListBucket", f"arn:aws:s3:::{bucket}", {"s3:prefix": names.get("prefix", "")})
    elif "delete" in names:
        for one in re.findall(rb"<Key>(.*?)</Key>", body):
            yield Asked("s3:DeleteObject", f"arn:aws:s3:::{bucket}/{one.decode()}")
    elif "uploadId" in names and method in _OF_PARTS:
        yield Asked(_OF_PARTS[method], arn)
    elif method in ("PUT", "POST"):
        yield Asked("s3:PutObject", arn, _of_write(names, low))
        if source := low.get("x-amz-copy-source"):
            yield Asked("s3:GetObject", f"arn:aws:s3:::{unquote(source).lstrip('/')}")
    else:
        yield Asked(_PLAIN[method], arn)


def _of_write(names: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """The condition keys of a request that makes an object, or begins one, or brings a part of it."""
    makes = not ("uploads" in names or "partNumber" in names)
    given = {key: headers[key] for key in ("if-none-match", "if-match", "x-amz-copy-source") if key in headers}
    return {"s3:objectcreationoperation": str(makes).lower()} | {f"s3:{key}": value for key, value in given.items()}

"""A writer that may only add: all that the library does is allowed, and nothing that is there can be replaced or
deleted with its credentials, though the client be another program."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import AccessDeniedError, UsageError
from archive.checkpoint import requests
from archive.store import Storage
from archive.store.policies import policy
from archive.testing import assert_whole, steps
from tests.support import servers
from tests.support.backends import Proxied, bucket_and_key, s3_options
from tests.support.iam import Asked, allowed, permits, rights
from tests.support.places import ROOT
from tests.support.roles import APPENDER, BELOW
from tests.support.sampling import few_of

clients = pytest.mark.parametrize("proxied", few_of(["moto", "s3fs"], 1), indirect=True)


def twice(data: dict[str, Any]) -> dict[str, Any]:
    return {"twice": data["reward"] * 2}


def live(url: str, options: dict[str, Any], *more: str) -> None:
    """All that jobs do with an archive and beside it, but for prunes: it is made, written, journaled, resumed,
    labelled, mapped, compacted, forgotten and brought back, and merged into others, by reference and as a copy."""
    how: dict[str, Any] = {"storage_options": options, "deadline_s": 20}
    arc = archive.create(url, **how)
    w = arc.writer(journal_s=60.0)
    w.append(steps(3, 7), env_ids=0, first=[True, False, False])
    w.checkpoint(7, state={"n": 1, "a": np.arange(5)}, columns={"p": np.arange(3.0)}, wait=True)
    w.append(steps(3, 10), env_ids=0)
    w.sync()
    w.close()
    arc = archive.open(url, **how)
    with arc.writer(resume=resharding.plan(arc.checkpoints.latest, world_size=1).share(0)) as w:
        for number in range(4):
            w.add_episode(steps(2, number), episode_id=f"e{number}")
            w.commit()
        w.checkpoint(8, wait=True)
    arc = arc.refresh()
    arc.label({"e0": {"good": True}})
    arc.refresh().tag("paper", arc.checkpoints.latest)
    requests.post(arc.storage)
    arc.refresh().episodes.filter(episode_id=["e0", "e1"]).map(twice, ["reward"], ["twice"], job="score")
    resharding.compact(arc.refresh(), min_alive=1.0, min_full=1.0, job="tidy")
    arc.refresh().forget(archive.Keep(last=1), dry_run=False)
    arc.refresh().undo()
    for number, target in enumerate(more):
        resharding.merge([url], target, copy=bool(number), storage_options=options, allow_bases=True)
        assert len(archive.open(target, allow_bases=True, **how).episodes) == len(arc.refresh().episodes)
    assert arc.refresh().checkpoints.latest is not None


@contextlib.contextmanager
def of_role(proxied: Proxied, *documents: Any) -> Iterator[None]:
    """Requests that these policies do not allow are refused meanwhile."""
    proxied.proxy.policies, proxied.proxy.refused = documents, []
    try:
        yield
    finally:
        proxied.proxy.policies = ()


@clients
def test_all_that_jobs_do_is_allowed_and_nothing_there_can_change(proxied: Proxied) -> None:
    url, options = f"{proxied.url}/42", proxied.storage_options
    with of_role(proxied, policy("writer", proxied.url, append_only=True)):
        live(url, options, f"{url}-by-reference", f"{url}-copied")
        copies = [one for one in proxied.proxy.refused if one.startswith("PUT ")]
        assert proxied.proxy.refused == copies  # by the store itself, of objects: these are streamed instead
        for where in (url, f"{url}-by-reference", f"{url}-copied"):
            assert_whole(archive.open(where, storage_options=options, allow_bases=True))
        assert not attacked(proxied, url)
    with of_role(proxied, policy("reader", proxied.url)):
        assert len(archive.open(url, storage_options=options).episodes.read(["reward"])) > 2
        assert proxied.proxy.refused == []
    with of_role(proxied, policy("pruner", proxied.url)):
        plan = archive.open(url, storage_options=options).prune(older_than="0s", force=True, dry_run=False)
        assert plan.errors == {}
        assert proxied.proxy.refused == []


def attacked(proxied: Proxied, url: str) -> list[str]:
    """Try all that another program could do with these credentials to an object of each kind; what was changed."""
    bucket, prefix = bucket_and_key(url)
    keys = [one.key for one in Storage.connect(url, s3_options(proxied.name, proxied.endpoint)).scan("")]
    kinds = {kind_of(key): key for key in keys}
    assert set(kinds) >= {"archive.json", "commits", "sessions", "shards", "states", "manifest", "journal", "requests"}
    assert set(kinds) >= {"jobs/round", "jobs/plan", "jobs/kind", "jobs/fold", "jobs/made", "jobs/end", "pins"}
    past, client = servers.s3_client(proxied.endpoint), servers.s3_client(proxied.proxy.endpoint)
    changed, plain = [], f"{prefix}/{kinds['archive.json']}"
    for kind, name in kinds.items():
        place = {"Bucket": bucket, "Key": f"{prefix}/{name}"}
        before = past.get_object(**place)["Body"].read()
        for what, attack in attacks(client, place, f"{bucket}/{plain}").items():
            code = refusal(attack)
            if code not in ("AccessDenied", "PreconditionFailed") or past.get_object(**place)["Body"].read() != before:
                changed.append(f"{kind}: {what}: {code}")
    past.close()
    client.close()
    return changed


def kind_of(key: str) -> str:
    first, _, rest = key.partition("/")
    return f"{first}/{rest.rpartition('/')[2].partition('-')[0]}" if first == "jobs" else first


def attacks(client: Any, place: dict[str, str], source: str) -> dict[str, Callable[[], Any]]:
    def in_parts(**how: Any) -> None:
        upload = client.create_multipart_upload(**place)["UploadId"]  # neither this
        tag = client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"of another")["ETag"]  # nor this changes
        parts = {"Parts": [{"ETag": tag, "PartNumber": 1}]}
        client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts, **how)

    def copied_in_parts() -> None:
        upload = client.create_multipart_upload(**place)["UploadId"]
        client.upload_part_copy(**place, UploadId=upload, PartNumber=1, CopySource=source)
        client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": []})

    bucket, key = place["Bucket"], place["Key"]
    return {
        "put": lambda: client.put_object(**place, Body=b"of another"),
        "put if it is as known": lambda: client.put_object(**place, Body=b"of another", IfMatch="x"),
        "put if nothing is there": lambda: client.put_object(**place, Body=b"of another", IfNoneMatch="*"),
        "copy": lambda: client.copy_object(**place, CopySource=source),
        "in parts": in_parts,
        "copied in parts": copied_in_parts,
        "delete": lambda: client.delete_object(**place),
        "delete a version": lambda: client.delete_object(**place, VersionId="null"),
        "delete some": lambda: client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}]}),
    }


def refusal(attack: Callable[[], Any]) -> str:
    from botocore.exceptions import ClientError

    try:
        attack()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return "done"


def test_nothing_else_puts_without_a_condition() -> None:
    """What replaces a damaged commit, and files of users that are no archive's."""
    putting = re.compile(r"(?:storage|target)\.put(?:_many)?\(")
    files = [path for room in ("archive", "resharding") for path in (ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if putting.search(path.read_text())}
    others = {one for one in found if not one.startswith(("archive/adapters/", "archive/testing/"))}
    assert others == {"archive/maintain/evidence.py", "archive/store/smallfiles.py", "resharding/exports.py"}


def test_parts_are_allowed_if_their_end_is_on_condition() -> None:
    of = [policy("writer", "s3://b/runs", append_only=True)]
    key, star = "/b/runs/42/states/s/step-1/rank-00000.zip", {"If-None-Match": "*"}
    assert permits(of, "POST", f"{key}?uploads", {})
    assert permits(of, "PUT", f"{key}?partNumber=1&uploadId=u", {})
    assert permits(of, "POST", f"{key}?uploadId=u", star)
    assert permits(of, "DELETE", f"{key}?uploadId=u", {})
    assert not permits(of, "POST", f"{key}?uploadId=u", {})
    assert not permits(of, "POST", f"{key}?uploadId=u", {"If-Match": '"x"'})
    for name in ("archive.json", "commits/000000/000000001.json", "x"):
        assert permits(of, "PUT", f"/b/runs/{name}", star)
        assert not permits(of, "PUT", f"/b/runs/{name}", {})
        assert not permits(of, "PUT", f"/b/other/{name}", star)
        assert not permits(of, "PUT", f"/b/runs/{name}", {"x-amz-copy-source": "/b/runs/x"})
        assert not permits(of, "DELETE", f"/b/runs/{name}", {})


def test_what_else_is_allowed_does_not_undo_it() -> None:
    """A user may have other policies: of an earlier role, or of an administrator."""
    all_of_s3 = {"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    of = [policy("writer", "s3://b/runs", append_only=True), policy("pruner", "s3://b"), all_of_s3]
    put, place = "s3:PutObject", "arn:aws:s3:::b/runs/x"
    for action in ("s3:DeleteObject", "s3:DeleteObjectVersion"):
        assert not allowed(of, Asked(action, place))
    assert not allowed(of, Asked(put, place))  # a store that does not say what is made
    assert not allowed(of, Asked(put, place, {"s3:objectcreationoperation": "true"}))
    assert allowed(of, Asked(put, place, {"s3:objectcreationoperation": "false"}))
    assert allowed(of, Asked(put, place, {"s3:objectcreationoperation": "true", "s3:if-none-match": "*"}))
    assert allowed(of, Asked(put, "arn:aws:s3:::b/elsewhere"))


def test_it_is_for_writers() -> None:
    for role in ("reader", "pruner"):
        with pytest.raises(UsageError, match=f"append_only is for a writer: a {role} "):
            policy(role, "s3://b/runs", append_only=True)
    both = [policy("writer", "s3://b/runs", append_only=only)["Statement"] for only in (False, True)]
    assert both[1][: len(both[0])] == both[0]
    assert [one["Effect"] for one in both[1][len(both[0]) :]] == ["Deny", "Deny"]


def test_seaweedfs_lets_it_add_and_delete_nothing(seaweedfs_endpoint: str) -> None:
    """It does not know the keys of the conditions: it takes the policy, but refuses no put."""
    options = servers.user_options(seaweedfs_endpoint, APPENDER)
    url = f"{BELOW}/append-only"
    live(url, options)
    storage = Storage.connect(url, options, deadline_s=10)
    with pytest.raises(AccessDeniedError):
        storage.delete(["archive.json"])
    assert_whole(archive.open(url, storage_options=options))


# -- the rules themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "wanted", "found", "holds"),
    [
        ("Null", "true", None, True), ("Null", "true", "x", False),
        ("Null", "false", None, False), ("Null", "false", "x", True),
        ("Bool", "true", "true", True), ("Bool", "true", "false", False), ("Bool", "true", None, False),
        ("BoolIfExists", "true", None, True), ("BoolIfExists", "true", "false", False),
        ("StringEquals", "a*", "ab", False), ("StringEquals", ["a", "b"], "b", True),
        ("StringEquals", "a", None, False),
        ("StringLike", ["a*"], "a/b/c", True), ("StringLike", "a?", "a", False),
        ("StringNotEquals", "a", None, True), ("StringNotEquals", "a", "a", False),
        ("StringNotLike", "a*", "b", True), ("StringEqualsIfExists", "a", None, True),
    ],
)  # fmt: skip
def test_conditions(operator: str, wanted: Any, found: str | None, holds: bool) -> None:
    statement = {"Effect": "Allow", "Action": "s3:Get*", "Resource": "arn:aws:s3:::b/*"}
    document = {"Statement": [{**statement, "Condition": {operator: {"s3:Key": wanted}}}]}
    asked = Asked("s3:GetObject", "arn:aws:s3:::b/x", {} if found is None else {"s3:key": found})
    assert allowed([document], asked) is holds


def test_a_deny_counts_over_allows_and_nothing_is_allowed_by_itself() -> None:
    allow = {"Effect": "Allow", "Action": ["s3:PutObject", "s3:Get*"], "Resource": "arn:aws:s3:::b/a?/*"}
    deny = {"Effect": "Deny", "Action": "S3:PUT*", "Resource": "*"}
    get, put = (Asked(f"s3:{name}Object", "arn:aws:s3:::b/a1/x/y") for name in ("Get", "Put"))
    assert allowed([{"Statement": [allow]}], put)
    assert not allowed([], put)
    assert not allowed([{"Statement": [allow]}], Asked("s3:GetObject", "arn:aws:s3:::b/a/x"))
    assert allowed([{"Statement": [allow, deny]}], get)
    assert not allowed([{"Statement": [allow]}, {"Statement": [deny]}], put)
    with pytest.raises((AssertionError, KeyError)):
        allowed(
            [{"Statement": [{**allow, "Condition": {"NumericLessThan": {"s3:x": "1"}}}]}],
            Asked("s3:PutObject", "arn:aws:s3:::b/a1/x", {"s3:x": "0"}),
        )


def test_what_requests_take() -> None:
    def of(method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> list[tuple[str, str]]:
        return [(one.action, one.resource[13:]) for one in rights(method, path, headers or {}, body)]

    assert of("GET", "/b?list-type=2&prefix=a%2F") == [("s3:ListBucket", "b")]
    assert of("GET", "/b?versioning") == [("s3:GetBucketVersioning", "b")]
    assert of("HEAD", "/b/a%20b/c") == [("s3:GetObject", "b/a b/c")]
    assert of("PUT", "/b/x", {"X-Amz-Copy-Source": "c/y"}) == [("s3:PutObject", "b/x"), ("s3:GetObject", "c/y")]
    assert of("DELETE", "/b/x?uploadId=1") == [("s3:AbortMultipartUpload", "b/x")]
    some = b"<Delete><Object><Key>x</Key></Object><Object><Key>y</Key></Object></Delete>"
    assert of("POST", "/b?delete", body=some) == [("s3:DeleteObject", "b/x"), ("s3:DeleteObject", "b/y")]

"""Least rights: what each role's policy permits is what it needs, tried against servers that enforce policies."""

from __future__ import annotations

import json
import math
import re
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from click.testing import CliRunner

import archive
import resharding
from archive import cli
from archive.base.errors import AccessDeniedError, AlreadyExistsError, UsageError
from archive.store import Storage, writes
from archive.store.drivers import s3
from archive.store.policies import policy
from archive.testing import small_archive, steps
from tests.support import servers
from tests.support.iam import rights
from tests.support.proxy import FaultProxy
from tests.support.roles import BELOW, ROLES, ROLES_BUCKET, users_of_moto
from tests.support.sampling import few_of

TRANSPORTS = ("obstore", "s3fs")
each = pytest.mark.parametrize("transport", few_of(TRANSPORTS, 1))
WHERE = [("moto", "obstore"), ("seaweedfs", "obstore"), ("moto", "s3fs"), ("seaweedfs", "s3fs")]
on_moto = pytest.mark.parametrize(("server", "transport"), few_of(WHERE, 1))
on_seaweedfs = pytest.mark.parametrize(("server", "transport"), few_of([WHERE[1], WHERE[0], *WHERE[2:]], 1))


@dataclass
class World:
    """An archive where the users of `roles` work, and the options of each."""

    endpoint: str
    url: str
    options: dict[str, dict[str, Any]]

    @property
    def beside(self) -> str:
        """An archive that no user may get at."""
        return self.url.replace("/runs/", "/runs-of-others/")

    def open(self, role: str, transport: str, **how: Any) -> archive.Archive:
        options = self.options[role] | {"transport": transport}
        return archive.open(self.url, storage_options=options, deadline_s=10, **how)


@contextmanager
def enforced(endpoint: str) -> Iterator[None]:
    """From now on moto lets nobody do what no policy of theirs permits."""

    def after(requests: float) -> None:
        plain = {"Content-Type": "text/plain"}  # else the server takes it for a form
        url = f"{endpoint}/moto-api/reset-auth"
        said = urllib.request.Request(url, data=str(requests).encode(), headers=plain, method="POST")
        with urllib.request.urlopen(said, timeout=30):
            pass

    after(0)
    try:
        yield
    finally:
        after(math.inf)


@pytest.fixture(scope="module")
def roles_of_moto(moto_endpoint: str) -> dict[str, dict[str, Any]]:
    servers.make_bucket(moto_endpoint, ROLES_BUCKET)
    return users_of_moto(moto_endpoint)


@pytest.fixture(scope="module")
def roles_of_seaweedfs(seaweedfs_endpoint: str) -> dict[str, dict[str, Any]]:
    return {role: servers.user_options(seaweedfs_endpoint, role) for role in ROLES}


@pytest.fixture
def world(request: pytest.FixtureRequest, server: str) -> Iterator[World]:
    endpoint, options = (request.getfixturevalue(name) for name in (f"{server}_endpoint", f"roles_of_{server}"))
    made = World(endpoint, f"{BELOW}/{uuid.uuid4().hex[:8]}", options)
    for url in (made.url, made.beside):
        small_archive(url, 2, checkpoints=True, storage_options=servers.s3fs_options(endpoint))
    with enforced(endpoint) if server == "moto" else nullcontext():
        yield made


def read(world: World, role: str, transport: str) -> None:
    """All that a reader does, at once and in parts."""
    arc = world.open(role, transport)
    assert len(arc.episodes.read()) == 2
    arc.episodes[0].read(start=1, stop=3)
    ck = arc.checkpoints.latest
    assert ck is not None
    ck.state(0)
    resharding.plan(ck, world_size=2).share(1).read()
    assert world.open(role, transport, commit=1).head.number == 1
    assert (list(arc.tags), arc.tails("main") is not None) == ([], True)


def write(world: World, role: str, transport: str) -> None:
    """What a job does: begins, checkpoints, journals, is killed, recovers, resumes, labels, forgets."""
    arc = world.open(role, transport)
    w = arc.writer(journal_s=60.0)
    w.append(steps(3, 7), env_ids=0)
    w.checkpoint(7, state={"n": 1}, wait=True)
    w.append(steps(3, 10), env_ids=0)
    w.sync()
    w.close()
    share = resharding.plan(world.open(role, transport).checkpoints.latest, world_size=1).share(0)
    with world.open(role, transport).writer(resume=share) as w:
        w.append(steps(2, 20), env_ids=0)
        w.checkpoint(8, wait=True)
    arc = arc.refresh()
    arc.label({"e0": {"good": True}})
    arc.refresh().tag(f"paper-{transport}", arc.checkpoints.latest)
    arc.refresh().forget(archive.Keep(last=1), dry_run=False)


def leave(world: World, role: str, transport: str) -> str:
    """Put a shard that a session which has ended never committed."""
    arc = world.open(role, transport)
    ended = world.open(role, transport, commit=1).head.session
    left = next(one.key for one in arc.storage.scan("shards") if ended in one.key)
    left = re.sub(r"shards/[0-9a-f]{8}", "shards/deadbeef", left)
    arc.storage.put(left, b"of a commit that was never made")
    return left


def break_off(world: World, proxy: FaultProxy, transport: str) -> None:
    """Begin an upload in parts whose name is taken by its end: the parts are removed."""
    arc = world.open("writer", transport)
    proxy.add("status", method="POST", conditional=True, status=412, code="PreconditionFailed", times=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writes, "LARGEST_PUT_BYTES", 7)
        patch.setattr(s3, "_PART_BYTES", 4)
        with pytest.raises(AlreadyExistsError):
            arc.storage.create("states/large", bytes(8))


def prune(world: World, role: str, transport: str) -> Any:
    return world.open(role, transport).prune(older_than="0s", force=True, dry_run=False)


def refused(*calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(AccessDeniedError, match="check the credentials"):
            call()


@on_moto
def test_a_reader_reads_all_and_changes_nothing(world: World, transport: str) -> None:
    read(world, "reader", transport)
    arc = world.open("reader", transport)
    refused(
        lambda: arc.storage.put("x", b""), lambda: arc.storage.create("x", b""),
        lambda: arc.storage.delete(["archive.json"]), lambda: arc.label({"e0": {"x": 1}}),
    )  # fmt: skip


@on_moto
def test_a_writer_does_all_that_jobs_do_and_deletes_nothing(world: World, transport: str) -> None:
    read(world, "writer", transport)
    write(world, "writer", transport)
    arc = world.open("writer", transport)
    with pytest.raises(AccessDeniedError):
        arc.storage.delete(["archive.json"])
    left = leave(world, "writer", transport)
    errors = prune(world, "writer", transport).errors
    assert left in errors
    assert all("check the credentials" in error for error in errors.values())
    assert len(world.open("reader", transport).episodes.read()) >= 2


@on_seaweedfs
def test_a_pruner_prunes(world: World, transport: str) -> None:
    write(world, "pruner", transport)
    left = leave(world, "pruner", transport)
    plan = prune(world, "pruner", transport)
    assert not world.open("pruner", transport).storage.exists(left), plan
    assert world.open("reader", transport).checkpoints.latest is not None


@on_seaweedfs
def test_nobody_gets_at_what_lies_beside(world: World, transport: str) -> None:
    for role in ROLES:
        beside = Storage.connect(world.beside, world.options[role] | {"transport": transport}, deadline_s=10)
        refused(
            partial(beside.get, "archive.json"), partial(beside.list, ""),
            partial(beside.put, "x", b""), partial(beside.delete, ["archive.json"]),
        )  # fmt: skip
        with pytest.raises(AccessDeniedError):
            archive.open(world.beside, storage_options=beside.root.options, deadline_s=10)


# -- what is asked for is what is permitted ----------------------------------------------------------------------------


@each
def test_requests_take_just_the_rights_of_their_role(moto_endpoint: str, transport: str) -> None:
    """No right is asked for that a policy lacks, and none is in it that nothing asks for."""
    bucket = f"policies-{uuid.uuid4().hex[:8]}"
    servers.make_bucket(moto_endpoint, bucket)
    with FaultProxy(moto_endpoint) as proxy:
        options = servers.s3fs_options(proxy.endpoint)
        world = World(moto_endpoint, f"s3://{bucket}/runs/42", dict.fromkeys(ROLES, options))
        small_archive(world.url, 2, checkpoints=True, storage_options=options)
        uses: dict[str, Callable[[], Any]] = {
            "reader": lambda: read(world, "reader", transport),
            "writer": lambda: (write(world, "writer", transport), break_off(world, proxy, transport)),
            "pruner": lambda: (leave(world, "pruner", transport), prune(world, "pruner", transport)),
        }  # fmt: skip
        asked: set[str] = set()
        for role, call in uses.items():
            first = len(proxy.log)
            call()
            asked |= {
                right.action for one in proxy.log[first:] for right in rights(one.method, one.path, {}, one.deletes)
            }
            permitted = {
                action
                for statement in policy(role, world.url)["Statement"]
                for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
            }
            assert asked == permitted, role


# -- the documents themselves ------------------------------------------------------------------------------------------


def test_a_policy_is_for_one_prefix_of_one_bucket() -> None:
    reader = policy("reader", "s3://bucket/a/b/")
    assert [one["Resource"] for one in reader["Statement"]] == ["arn:aws:s3:::bucket/a/b/*", "arn:aws:s3:::bucket"]
    assert reader["Statement"][1]["Condition"] == {"StringLike": {"s3:prefix": ["a/b", "a/b/*"]}}
    whole = policy("pruner", "s3://bucket")
    assert whole["Statement"][0]["Resource"] == "arn:aws:s3:::bucket/*"
    assert all("Condition" not in one for one in whole["Statement"])
    assert "*" not in json.dumps([one["Action"] for role in ROLES for one in policy(role, "s3://b/x")["Statement"]])


@pytest.mark.parametrize(("role", "url"), [("owner", "s3://bucket/x"), ("reader", "memory://x"), ("reader", "/x")])
def test_other_roles_and_stores_are_refused(role: str, url: str) -> None:
    with pytest.raises(UsageError):
        policy(role, url)


def test_the_command_prints_it() -> None:
    done = CliRunner().invoke(cli.main, ["policy", "writer", "s3://bucket/runs"])
    assert json.loads(done.stdout) == policy("writer", "s3://bucket/runs")
    only = CliRunner().invoke(cli.main, ["policy", "writer", "s3://bucket/runs", "--append-only"])
    assert json.loads(only.stdout) == policy("writer", "s3://bucket/runs", append_only=True)
    refused = CliRunner().invoke(cli.main, ["policy", "pruner", "s3://bucket/runs", "--append-only"])
    assert refused.exit_code == 2
    assert "--append-only is for a writer: a pruner deletes" in refused.output
    assert CliRunner().invoke(cli.main, ["policy", "writer", "/tmp/x"]).exit_code == 2

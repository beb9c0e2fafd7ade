"""merge, split and filter: episodes of some archives become visible in another, by reference or as copies."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import CorruptChunkError, DuplicateEpisodeError, SessionInUseError, UnsafePathError, UsageError
from archive.testing import steps
from tests.support.backends import make_backend
from tests.support.tampering import body, commit_files, inverted, same, write_some
from tests.support.transfers import Place, before_commit, failing_put, holds


@pytest.fixture(params=("memory", "local", "moto"))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(make_backend(request, request.param, tmp_path))


@pytest.fixture
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(make_backend(request, "local", tmp_path))


def files(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


# -- by reference --------------------------------------------------------------------------------------------------


def test_merge_by_reference(place: Place) -> None:
    place.source("a", 0, 5)
    place.source("b", 5, 4)
    urls = [place.url("a"), place.url("b")]
    merged = resharding.merge(urls, to=place.url("to"), allow_bases=urls, **place.options)
    assert holds(merged, range(9))
    assert merged.head.kind == "merge"
    assert "shards/" not in merged.storage.list("")
    assert {b.url for b in merged.head.bases.values()} == {place.open(n).url for n in "ab"}
    again = place.open("to", allow_bases=[*urls])
    assert holds(again, range(9))
    chosen = again.episodes.filter(model_weights_uuid="w1", update_count=(2, 8), where="terminated")
    assert [e.id for e in chosen] == ["e4"]
    assert same(chosen.read("obs")[0]["obs"], steps(8, 4)["obs"])


def test_reference_pins_the_objects_in_the_source(place: Place) -> None:
    source = place.source("a", 0, 4)
    target = resharding.merge([place.url("a")], to=place.url("to"), **place.options)
    (name,) = source.storage.list("pins")
    pin = json.loads(source.storage.get(f"pins/{name}"))
    assert (pin["archive"], pin["url"]) == (target.id, target.url)
    assert set(source.shards) <= set(pin["objects"])
    assert {c.chunks.path for c in source.commits if c.chunks} <= set(pin["objects"])


def test_a_second_merge_adds_a_pin_and_keeps_the_first(local: Place) -> None:
    source = local.source("a", 0, 2)
    resharding.merge([local.url("a")], to=local.url("to"))
    first = set(source.shards)
    with source.writer() as w:
        w.add_episode(steps(3), episode_id="late")
    resharding.merge([local.url("a")], to=local.url("to"))
    pins = [json.loads(source.storage.get(f"pins/{n}")) for n in source.storage.list("pins")]
    assert len(pins) == 2
    pinned = {key for pin in pins for key in pin["objects"]}
    assert first | set(source.refresh().shards) <= pinned


def test_references_of_references(place: Place) -> None:
    """c refers to b, which refers to a: one table, two bases, each read where it lies."""
    bottom = place.source("a", 0, 3)
    urls = [place.url(n) for n in "ab"]
    resharding.merge([urls[0]], to=urls[1], **place.options)
    with place.open("b").writer() as w:
        w.add_episode(
            steps(7, 3),
            episode_id="e3",
            model_weights_uuid="w0",
            update_count=3,
            terminated=False,
            metadata={"trajectory_id": 30},
        )
    merged = resharding.merge([urls[1]], to=place.url("c"), allow_bases=urls, **place.options)
    assert holds(merged, range(4))
    assert len(merged.head.bases) == 2
    assert len(bottom.storage.list("pins")) == 2  # b's and c's
    with pytest.raises(UnsafePathError):
        place.open("c", allow_bases=urls[1]).episodes["e0"].read()
    assert same(place.open("c", allow_bases=urls[1]).episodes["e3"].read(), steps(7, 3))
    copied = resharding.merge([place.open("c", allow_bases=urls)], to=place.url("d"), copy=True, **place.options)
    assert not copied.head.bases
    assert holds(place.open("d"), range(4))


def test_reference_to_another_kind_of_store_is_refused(local: Place) -> None:
    local.source("a", 0, 1)
    with pytest.raises(UsageError, match="copy=True"):
        resharding.merge([local.url("a")], to="memory://elsewhere-of-references")
    with pytest.raises(archive.errors.NotFoundError):
        archive.open("memory://elsewhere-of-references")


# -- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_merge_with_copy(place: Place, layout: str) -> None:
    place.source("a", 0, 5, layout)
    place.source("b", 5, 4, layout)
    merged = resharding.merge([place.url("a"), place.url("b")], to=place.url("to"), copy=True, **place.options)
    assert holds(merged, range(9))
    assert not merged.head.bases
    assert place.open("a").storage.list("pins") == []
    for name in "ab":  # on its own feet
        storage = place.open(name).storage
        storage.delete([f"shards/{n}" for n in storage.list("shards") if not n.endswith("/")])
    if layout == "packed":
        assert holds(place.open("to"), range(9))


def test_merge_from_one_kind_of_store_to_another(place: Place, tmp_path: Path) -> None:
    place.source("a", 0, 3)
    source = place.open("a")
    merged = resharding.merge([source], to=tmp_path / "other", copy=True)
    assert holds(merged, range(3))


def test_merging_again_adds_what_is_new_only(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    source = place.source("a", 0, 4)
    merged = resharding.merge([source], to=place.url("to"), copy=True, **place.options)
    number = merged.head.number
    with failing_put(monkeypatch, -1) as put:
        again = resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert (again.head.number, put, again.storage.stats.copy) == (number, [], 0)
    with source.writer() as w:
        w.add_episode(
            steps(8, 4),
            episode_id="e4",
            model_weights_uuid="w1",
            update_count=4,
            terminated=True,
            metadata={"trajectory_id": 40},
        )
    with failing_put(monkeypatch, -1) as put:
        again = resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert (again.head.number, len(put) + again.storage.stats.copy) == (number + 1, 1)
    assert again.head.added == {"segments": 1}
    assert holds(place.open("to"), range(5))


def test_episodes_that_go_on_and_revisions_follow(local: Place) -> None:
    source = archive.create(local.url("a"))
    w = source.writer()
    w.append(steps(5, 1), env_ids=0, episode_ids="long")
    w.add_episode(steps(3, 2), episode_id="revised")
    w.commit()
    for copy in (True, False):
        resharding.merge([local.url("a")], to=local.url(f"to{copy}"), copy=copy)
    w.append(steps(4, 3), env_ids=0, episode_ids="long", last=True)
    w.add_episode(steps(6, 4), episode_id="revised", replace=True)
    w.close()
    for copy in (True, False):
        merged = resharding.merge([local.url("a")], to=local.url(f"to{copy}"), copy=copy, allow_bases=True)
        assert len(merged.episodes) == 2
        assert merged.episodes["long"].complete
        assert same(
            merged.episodes["long"].read("obs")["obs"], np.concatenate([steps(5, 1)["obs"], steps(4, 3)["obs"]])
        )
        assert same(merged.episodes["revised"].read(), steps(6, 4))


def test_ids_are_never_renumbered(local: Place) -> None:
    local.source("a", 0, 3)
    other = archive.create(local.url("b"))
    with other.writer(rank=3, world_size=4, session="s") as w:
        names = [w.add_episode(steps(3, i)) for i in range(2)]
    merged = resharding.merge([local.url("a"), local.url("b")], to=local.url("to"), copy=True)
    assert [e.id for e in merged.episodes] == ["e0", "e1", "e2", *names]
    assert [e.rank for e in merged.episodes] == [0, 0, 0, 3, 3]


def test_the_same_rows_by_two_ways_are_added_once(local: Place) -> None:
    local.source("a", 0, 4)
    resharding.split(local.url("a"), local.url("half"), 2, copy=True)
    merged = resharding.merge([local.url("half"), local.url("a")], to=local.url("to"), copy=True)
    assert holds(merged, range(4))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
def test_two_episodes_of_one_id_are_refused(place: Place, copy: bool) -> None:
    place.source("a", 0, 3)
    place.source("b", 2, 3)
    with pytest.raises(DuplicateEpisodeError, match="'e2'"):
        resharding.merge([place.url("a"), place.url("b")], to=place.url("to"), copy=copy, **place.options)
    with pytest.raises(archive.errors.NotFoundError):
        place.open("to")
    assert place.open("a").storage.list("pins") == []
    resharding.merge([place.url("a")], to=place.url("to"), copy=copy, **place.options)
    number, shards = place.open("to").head.number, place.open("to").storage.list("shards")
    with pytest.raises(DuplicateEpisodeError, match="'e2'"):
        resharding.merge([place.url("b")], to=place.url("to"), copy=copy, **place.options)
    assert (place.open("to").head.number, place.open("to").storage.list("shards")) == (number, shards)


def test_sessions_of_one_name_do_not_hide_each_others_episodes(local: Place) -> None:
    """The same session, rank and sequence, by chance or by a job's name, are not the same steps."""
    for name in "ab":
        with archive.create(local.url(name)).writer(session="job-0") as w:
            w.add_episode(steps(3, ord(name)), episode_id=f"of-{name}")
    resharding.merge([local.url("a")], to=local.url("to"), copy=True)
    with pytest.raises(DuplicateEpisodeError, match="job-0"):
        resharding.merge([local.url("b")], to=local.url("to"), copy=True)


def test_a_session_that_came_along_cannot_be_opened_again(local: Place) -> None:
    with archive.create(local.url("a")).writer(session="job-0") as w:
        w.add_episode(steps(3, 1), episode_id="x")
    merged = resharding.merge([local.url("a")], to=local.url("to"), copy=True)
    with pytest.raises(SessionInUseError):
        merged.writer(session="job-0")
    with merged.writer(session="job-1") as w:
        w.add_episode(steps(4, 2), episode_id="y")
    assert len(archive.open(local.url("to")).episodes.read()) == 2


def test_wrong_calls(local: Place) -> None:
    local.source("a", 0, 2)
    with pytest.raises(UsageError, match="one of the sources"):
        resharding.merge([local.url("a")], to=local.url("a"))
    for count in (0, 3, -1):
        with pytest.raises(UsageError, match="2 episodes"):
            resharding.split(local.url("a"), local.url("to"), count)
    assert not Path(local.url("to")).exists()


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_damaged_chunks_are_not_copied(local: Place, layout: str) -> None:
    source = local.source("a", 0, 4, layout)
    victim = Path(local.url("a")) / source.shards[1]
    victim = (
        victim if layout == "packed" else max(victim.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    )
    victim.write_bytes(inverted(victim.read_bytes()))
    with pytest.raises(CorruptChunkError, match="archive verify"):
        resharding.merge([local.url("a")], to=local.url("to"), copy=True)
    assert len(archive.open(local.url("to")).episodes) == 0


@pytest.mark.parametrize(
    "evil", ["archive.json", "commits/000000/000000001.json", "shards/../archive.json", "shards/a/b.zip", "shards"]
)
def test_a_source_cannot_write_elsewhere_in_the_target(local: Place, evil: str) -> None:
    """Names of shards come from the source's tables: only a shard's name is one."""
    from archive.store.bases import Roots
    from archive.tables import from_columns
    from resharding.archives import copy_shards

    target = local.source("to", 0, 1)
    row: dict[str, Any] = {
        "member": ["zarr.json"],
        "array": "",
        "chunk": [-1],
        "rows": [0],
        "offset": [0],
        "size": [0],
        "crc32c": [0],
    }
    before = {p: (Path(local.url("to")) / p).read_bytes() for p in files(Path(local.url("to")))}
    with pytest.raises(UnsafePathError, match="not copied"):
        copy_shards(
            Roots(local.source("a", 1, 1).storage, {}),
            target.storage,
            from_columns("chunks", {"shard": evil} | row),
            (),
            lambda done, total: None,
            verify=False,
        )
    assert {p: (Path(local.url("to")) / p).read_bytes() for p in files(Path(local.url("to")))} == before


# -- failures and races --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "directory"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failed_copy_can_be_resumed(local: Place, layout: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    local.source("a", 0, 8, layout)  # four shards
    local.source("to", 8, 2, layout)
    monkeypatch.setattr("resharding.archives.AT_ONCE", 1)
    with failing_put(monkeypatch, at), pytest.raises(OSError, match="gone"):
        resharding.merge([local.url("a")], to=local.url("to"), copy=True)
    assert holds(archive.open(local.url("to")), range(8, 10))
    with failing_put(monkeypatch, -1) as put:
        merged = resharding.merge([local.url("a")], to=local.url("to"), copy=True)
    assert len({"/".join(key.split("/")[:2]) for key in put}) == 4 - at
    assert holds(merged, range(10))


@pytest.mark.parametrize("part", ["manifest/", "pins/"])
@pytest.mark.parametrize("at", [0, 1])
def test_failures_elsewhere_leave_the_target_as_it_was(
    local: Place, part: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, first in (("a", 0), ("b", 4), ("to", 8)):
        local.source(name, first, 2)
    urls = [local.url("a"), local.url("b")]
    with failing_put(monkeypatch, at, part), pytest.raises(OSError, match="gone"):
        resharding.merge(urls, to=local.url("to"), copy=part == "manifest/")
    assert holds(archive.open(local.url("to")), [8, 9])
    assert holds(
        resharding.merge(urls, to=local.url("to"), copy=part == "manifest/", allow_bases=True), [0, 1, 4, 5, 8, 9]
    )


def test_a_writers_commit_between_keeps_both(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    local.source("a", 0, 3)
    target = local.source("to", 3, 1)
    w = archive.open(local.url("to")).writer()
    about = {"model_weights_uuid": "w1", "update_count": 4, "terminated": True, "metadata": {"trajectory_id": 40}}
    w.add_episode(steps(8, 4), episode_id="e4", **about)
    with before_commit(monkeypatch, w.commit):
        resharding.merge([local.url("a")], to=target, copy=True)
    w.close()
    assert holds(archive.open(local.url("to")), range(5))


def test_an_id_that_is_taken_meanwhile_is_refused(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    local.source("a", 0, 3)
    w = archive.create(local.url("to")).writer()
    w.add_episode(steps(9, 9), episode_id="e1")
    with before_commit(monkeypatch, w.commit), pytest.raises(DuplicateEpisodeError, match="'e1'"):
        resharding.merge([local.url("a")], to=local.url("to"), copy=True)
    w.close()
    assert [e.id for e in archive.open(local.url("to")).episodes] == ["e1"]


def test_the_same_merge_twice_at_once_adds_once(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    source = local.source("a", 0, 4)
    archive.create(local.url("to"))
    early = archive.open(local.url("a"), commit=source.commits[-2].number)

    def rival() -> None:
        resharding.merge([early], to=local.url("to"), copy=True)

    with before_commit(monkeypatch, rival):
        merged = resharding.merge([local.url("a")], to=local.url("to"), copy=True)
    assert holds(merged, range(4))
    rows = merged.snapshot.columns(["session", "sequence"]).to_pylist()
    assert len({(r["session"], r["sequence"]) for r in rows}) == len(rows) == 4


def test_many_merges_at_once(local: Place) -> None:
    for i in range(4):
        local.source(f"s{i}", 2 * i, 2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: resharding.merge([local.url(f"s{i}")], to=local.url("to"), copy=True), range(4)))
    assert holds(archive.open(local.url("to")), range(8))


# -- split and filter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
def test_split(place: Place, copy: bool) -> None:
    place.source("a", 0, 6)
    half = resharding.split(
        place.url("a"), place.url("half"), 3, copy=copy, allow_bases=place.url("a"), **place.options
    )
    assert holds(half, range(3))
    assert [e.id for e in half.episodes] == ["e0", "e1", "e2"]
    assert len(half.shards) == 2  # of three


@pytest.mark.parametrize("copy", [False, True])
def test_filter(place: Place, copy: bool) -> None:
    place.source("a", 0, 9)
    options = {"copy": copy, "allow_bases": [place.url("a")], **place.options}
    some = resharding.filter(place.url("a"), place.url("w1"), model_weights_uuid="w1", update_count=(2, 8), **options)
    assert holds(some, [4, 7])
    more = resharding.filter(
        place.url("a"), place.url("w1"), where="length > 11 or metadata.trajectory_id = 0", **options
    )
    assert holds(more, [0, 4, 7, 8])
    none = resharding.filter(place.url("a"), place.url("none"), update_count=1000, **options)
    assert len(none.episodes) == 0


def test_split_then_merge_is_the_whole(local: Place) -> None:
    local.source("a", 0, 6)
    resharding.split(local.url("a"), local.url("x"), 2, copy=True)
    resharding.filter(local.url("a"), local.url("y"), update_count=(2, None), copy=True)
    assert holds(resharding.merge([local.url("x"), local.url("y")], to=local.url("to"), copy=True), range(6))


def test_a_merged_archive_is_written_to_like_any_other(local: Place) -> None:
    local.source("a", 0, 3)
    merged = resharding.merge([local.url("a")], to=local.url("to"), allow_bases=local.url("a"))
    with merged.writer() as w:
        w.add_episode(steps(5, 1), episode_id="mine")
        ck = w.checkpoint(1, columns={"p": np.arange(5.0)}).result()
    assert [e.id for e in ck.episodes] == ["mine"]
    assert len(archive.open(local.url("to"), allow_bases=local.url("a")).episodes.read()) == 4
    assert archive.open(local.url("to")).head.bases


def test_what_came_by_reference_is_checked_when_read(tmp_path: Path) -> None:
    write_some(tmp_path / "a")
    merged = resharding.merge([tmp_path / "a"], to=tmp_path / "to", allow_bases=tmp_path)
    (shard,) = (tmp_path / "a" / "shards").iterdir()
    shard.write_bytes(inverted(shard.read_bytes()))
    with pytest.raises(archive.errors.IntegrityError):
        merged.episodes.read()
    assert body(commit_files(tmp_path / "to")[0])["kind"] == "merge"


@pytest.mark.parametrize("verb", ["merge", "split", "filter"])
def test_progress_moves_from_none_to_all(local: Place, verb: str) -> None:
    local.source("a", 0, 6)
    seen: list[tuple[int, int]] = []
    more: dict[str, Any] = {"merge": {}, "split": {"count": 4}, "filter": {"where": "length > 0"}}[verb]
    getattr(resharding, verb)(
        local.url("a"), to=local.url("to"), copy=True, progress=lambda done, total: seen.append((done, total)), **more
    )
    done, total = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(total) == {max(done)}
    assert max(done) > 1

"""Tags: given once, for what is there; an archive opens by them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import archive
from archive.base.errors import AlreadyExistsError, ExpiredError, NotFoundError, UsageError
from archive.log import commits
from archive.testing import steps
from tests.support.archives import fresh, reopened, with_checkpoints
from tests.support.backends import Backend
from tests.support.pruning import NOW

stores = pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)


def opened(backend: Backend, commit: int | str | None = None) -> archive.Archive:
    return archive.open(backend.url, storage_options=backend.storage_options, commit=commit)


@stores
def test_a_tag_names_a_checkpoint_a_commit_or_the_newest(backend: Backend) -> None:
    arc = with_checkpoints(backend.url, storage_options=backend.storage_options)
    paper = arc.tag("paper", arc.checkpoints["step-1"], by="anna")
    assert (paper.name, paper.commit, paper.checkpoint, paper.run, paper.by) == ("paper", 3, "step-1", "main", "anna")
    assert (arc.tag("start", 1).commit, arc.tags["start"].checkpoint) == (1, None)
    assert arc.tag("now").commit == 6
    assert [*arc.tags] == [*opened(backend).tags] == ["paper", "start", "now"]
    assert [one.kind for one in arc.commits][-3:] == ["tag"] * 3
    then = opened(backend, "paper")
    assert (then.head.number, [ep.id for ep in then.episodes]) == (3, ["e0", "e1"])
    assert not then.tags
    with pytest.raises(UsageError, match="opened at commit 3"):
        then.tag("again")


def test_a_tag_is_given_once(tmp_path: Path) -> None:
    arc, other = with_checkpoints(tmp_path), archive.open(tmp_path)
    arc.tag("paper", 3)
    with pytest.raises(AlreadyExistsError, match=r"'paper' .* for commit 3, checkpoint 'step-1'"):
        other.tag("paper", 2)
    assert arc.refresh().head.number == 5


def test_of_several_who_give_a_tag_one_succeeds(tmp_path: Path) -> None:
    with_checkpoints(tmp_path)
    failed: list[str] = []

    def give(number: int) -> None:
        try:
            archive.open(tmp_path).tag("paper", number)
        except AlreadyExistsError:
            failed.append("paper")

    threads = [threading.Thread(target=give, args=(1 + i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(failed) == 3
    assert len(archive.open(tmp_path).tags) == 1


def test_tags_are_given_beside_a_writer(tmp_path: Path) -> None:
    archive.create(tmp_path)
    with archive.open(tmp_path).writer() as w:
        for i in range(8):
            w.add_episode(steps(2, i), episode_id=f"e{i}")
            w.commit()
            archive.open(tmp_path).tag(f"after {i}")
    arc = archive.open(tmp_path)
    assert len(arc.episodes) == len(arc.tags) == 8
    assert [len(archive.open(tmp_path, commit=name).episodes) for name in arc.tags] == [*range(1, 9)]


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[31m", "12", "\ud800"])
def test_names_are_seen_and_are_no_numbers(tmp_path: Path, name: str) -> None:
    with pytest.raises((UsageError, archive.FieldError)):
        with_checkpoints(tmp_path).tag(name)
    assert archive.open(tmp_path).head.number == 4


def test_what_is_not_there_cannot_be_tagged_or_opened(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path / "a")
    for number in (0, -1, 5):
        with pytest.raises(NotFoundError, match=f"no commit {number} to tag"):
            arc.tag("paper", number)
    with pytest.raises(NotFoundError, match="commit 0"):
        archive.create(tmp_path / "empty").tag("paper")
    with pytest.raises(UsageError, match="another archive"):
        archive.create(tmp_path / "other").tag("paper", arc.checkpoints[0])
    arc.tag("paper")
    with pytest.raises(NotFoundError, match=r"no tag 'thesis' .* its tags: 'paper'"):
        archive.open(tmp_path / "a", commit="thesis")
    with pytest.raises(NotFoundError, match="no tag 'thesis'"):
        arc.tags["thesis"]
    assert arc.tags.get("thesis") is None


def test_what_was_let_go_of_is_not_tagged(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path)
    gone, kept = arc.checkpoints["step-0"], arc.checkpoints["step-2"]
    arc.forget(archive.Keep(last=2), dry_run=False)
    for what in (gone, gone.number, 3 - 2):
        with pytest.raises(ExpiredError, match="commit 5 forgot"):
            arc.tag("paper", what)
    tag = arc.tag("kept", kept)  # what commit 4 leads to may be gone: the newest one has the checkpoint
    assert (tag.commit, tag.checkpoint) == (5, "step-2")
    assert archive.open(tmp_path, commit="kept").checkpoints["step-2"].number == kept.number
    assert commits.newest(arc.storage).kind == "tag"


def test_tags_show_themselves(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path)
    arc.tag("paper", 3, by="<b>anna")
    assert arc.tags.table.column_names == ["name", "commit", "checkpoint", "run", "by", "created_at"]
    assert repr(arc.tags).splitlines()[-1].split()[:5] == ["paper", "3", "step-1", "main", "<b>anna"]
    assert "&lt;b&gt;anna" in arc.tags._repr_html_()
    assert np.array_equal(arc.tags.table["commit"].to_numpy(), [3])


def test_a_commit_of_which_something_was_pruned_is_not_tagged_also_after_an_undo() -> None:
    arc = fresh()
    with arc.writer() as w:
        for number in range(4):  # the files of the first commits are folded: only they name them
            w.add_episode(steps(5), episode_id=f"e{number}")
            w.commit()
        for number in range(2):
            w.checkpoint(number).result()
    reopened(arc).tag("all")
    reopened(arc).forget(archive.Keep(last=1), dry_run=False)
    assert reopened(arc).prune(dry_run=False, **NOW).deleted
    reopened(arc).undo()  # possible, as the tag has kept what was forgotten
    with pytest.raises(ExpiredError, match=r"commit 2 .* cannot be tagged: some of what it leads to was pruned"):
        reopened(arc).tag("early", 2)
    assert reopened(arc).tag("late", 6).commit == 6
    assert not reopened(arc).prune(**NOW).errors
    assert [*reopened(arc).tags] == ["all", "late"]

"""archive/FORMAT.md is enough to read journals, what was recovered of them, and ledgers: `format_journal.py` does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base import layout
from tests.support import format_journal, golden, golden_journal
from tests.support.format_reading import plain, run
from tests.support.journals import die
from tests.support.ticks import NEVER_S

BANNED = "import sys, runpy; sys.modules['archive'] = None; runpy.run_module(sys.argv.pop(1), run_name='__main__')"


@pytest.fixture(scope="module", params=["golden", "written"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "golden":
        return golden.GOLDEN / golden_journal.NAME
    root: Path = tmp_path_factory.mktemp("written") / golden_journal.NAME
    golden_journal.write(str(root))
    return root


@pytest.fixture(scope="module")
def found(place: Path) -> Any:
    return json.loads(run("-c", BANNED, "tests.support.format_journal", place))


def test_episodes_lie_in_journals(found: Any) -> None:
    assert found["episodes"].keys() == set(golden_journal.COMMITTED)
    for name in golden_journal.COMMITTED:
        assert found["episodes"][name]["fields"] == plain(golden_journal.EPISODES[name])


def test_a_recovered_checkpoint_reads_like_any_other(found: Any) -> None:
    wanted = golden_journal.CHECKPOINTS
    assert [name[:13] for name in found["checkpoints"]] == list(wanted)
    for told, one in zip(found["checkpoints"].values(), wanted.values(), strict=True):
        assert list(dict.fromkeys(step[4] for step in told["live"])) == one["episodes"]
        assert told["columns"]["replay/priority"] == [plain(np.array(one["priority"]))]
        assert (told["step"], told["progress"]) == (one["step"], one["progress"])


def test_ledgers_are_folded(found: Any) -> None:
    assert found["ledgers"]["main"]["prompts"] == {"keys": golden_journal.PROMPTS, "cursor": golden_journal.CURSOR}


def test_the_session_that_trained_had_done_so(place: Path) -> None:
    commit = format_journal.reader.commits(place)[2]
    assert format_journal.ledgers(place, commit, "first")["prompts"]["keys"] == golden_journal.TRAINED


def test_tails_are_read_by_number(found: Any) -> None:
    (tail,) = found["tails"]["main"].values()
    assert tail.pop("episodes") == {name: plain(golden_journal.EPISODES[name]) for name in golden_journal.BEYOND}
    gone = [["first", 0, -1, 2, 5]]
    assert tail == {"from": 0, "next": 1, "gone": gone, "ledger": golden_journal.TAIL_LEDGER}


@pytest.mark.parametrize("at", [30, 200, 3000, -40, -10])
def test_a_flipped_bit_ends_a_tail(tmp_path: Path, at: int) -> None:
    root = shutil.copytree(golden.GOLDEN / golden_journal.NAME, tmp_path / "copy")
    path = root / layout.journal_key("second", 0, 0)
    data = bytearray(path.read_bytes())
    for place in (at, at - 1, at + 1):  # a byte of the ZIP's directory alone says nothing that is read
        data[place] ^= 4
    path.write_bytes(data if at != -10 else data[:at])
    ours = archive.open(root).tails().ranks[0]
    (found,) = format_journal.read(root)["tails"]["main"].values()
    assert found["next"] == ours.next
    assert found["next"] == (1 if at == -40 else 0)


def _say(prompts: Any, w: Any, rng: np.random.Generator, number: int) -> None:
    """Something of a prompt, as far as it can be said of it."""
    key, sibling = int(rng.integers(6)), int(rng.integers(2))
    state = prompts.state(key)
    verb = rng.choice(["draw", "start", "seal", "seal", "train", "drop"])
    if state in (None, "trained", "dropped"):
        prompts.draw([key], siblings=2, cursor={"row": number})
    elif verb == "start" and sibling not in prompts.sealed(key):
        prompts.start(key, sibling)
    elif verb == "seal" and sibling not in prompts.sealed(key):
        prompts.seal(key, sibling, episode_id=w.add_episode({"t": np.arange(2)}))
    elif verb == "train" and state == "sealed":
        prompts.train([key])
    elif verb == "drop":
        prompts.drop([key], "late")


@pytest.mark.parametrize("seed", range(3))
def test_ledgers_of_branches_are_as_the_document_says(tmp_path: Path, seed: int) -> None:
    """Runs that die and go back at random: the reader and the library see the same prompts, and the same tails."""
    rng = np.random.default_rng(seed)
    arc = archive.create(str(tmp_path / "a"))
    resume: Any = None
    for number in range(6):
        w = arc.writer(resume=resume, journal_s=NEVER_S)
        prompts = w.ledger("prompts")
        for step in range(12):
            _say(prompts, w, rng, 100 * number + step)
            if rng.random() < 0.3:
                w.sync()
            if step == 6:
                w.checkpoint(number, progress={}, wait=True)
        die(w)
        arc = archive.open(arc.url)
        _compare(arc, tmp_path / "a")
        tails = rng.choice(["live", "archive", "ignore"])
        plan = resharding.plan(arc.checkpoints.latest, 1, tails=str(tails))
        resume = plan.share(0) if number != 3 else None
        arc = archive.open(arc.url)
        _compare(arc, tmp_path / "a")


def _compare(arc: archive.Archive, root: Path) -> None:
    found = format_journal.read(root)
    keys = found["ledgers"]["main"].get("prompts", {"keys": {}, "cursor": None})
    view = arc.ledger("prompts") if "prompts" in arc.ledgers else None
    assert {key: one["state"] for key, one in keys["keys"].items()} == {key: view.state(key) for key in keys["keys"]}
    assert keys["cursor"] == (None if view is None else view.cursor)
    ours = {str(one.rank): (one.start, one.next) for one in arc.tails().ranks}
    assert {rank: (one["from"], one["next"]) for rank, one in found["tails"]["main"].items()} == ours


def test_columns_of_ticks_are_read_by_what_the_document_says(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    w = arc.writer(journal_s=NEVER_S)
    w.append({"x": np.zeros(200)}, env_ids=np.repeat([0, 1], 100))
    wanted = np.zeros(200)
    w.journal(columns={"p": wanted})
    w.sync()
    rng = np.random.default_rng(0)
    for count in (40, 1, 90, 5):
        at = rng.choice(200, count, replace=False)
        wanted[at] = rng.random(count)
        w.journal(changes={"p": (at // 100, at % 100, wanted[at])})
        w.sync()
    w.evict(0, before=50)
    w.sync()
    found = list(format_journal.entries(tmp_path / "a", "main", w.session, 0, 0))
    assert [bool(one.index["columns"]["replay"]["p"].get("ranges")) for one in found[:5]] == [
        False,
        True,
        False,
        True,
        False,
    ]
    values = format_journal.column(found, "p")
    assert [values[w.session, 0, at // 100, at % 100] for at in range(200)] == wanted.tolist()
    die(w)
    assert arc.refresh().recover().column("p", 0).tolist() == wanted[50:].tolist()

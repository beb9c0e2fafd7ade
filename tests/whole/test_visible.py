"""Text from a bucket acts on nothing: no escape sequence, no turned direction, whatever is printed,
logged or raised."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import archive
import resharding
from archive import observe
from archive.adapters.common import Report
from archive.base import errors, plaintext
from archive.checkpoint import pending
from archive.cli import COMMANDS, main, output
from archive.cli.commands import Failed
from archive.maintain import verify
from tests.support.places import ROOT
from tests.support.tampering import change_commit

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"  # OSC 52 writes the clipboard
TITLE = "\x1b]0;evil\x07"
CLEAR = "\x1b[2J\x9b2J"  # also as one character of C1
TURNED = "\u202egnp.exe\u2066"
APART = {"demo", "view"}  # which would make processes, and serve until it is ended: both have tests of their own
EVIL = f"{CLIPBOARD}{TITLE}{CLEAR}{TURNED}\r[red]x[/red]\x7f\u2028"


def acting(text: str) -> list[str]:
    """What in a text acts rather than shows; lines and tabs do not count."""
    found = [c for c in text if c not in "\n\t" and (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp"))]
    return found + [c for c in text if "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive in which all that can be named is named so."""
    path = tmp_path_factory.mktemp("evil") / "root"
    arc = archive.create(str(path))
    steps: dict[str, Any] = {
        "obs": {EVIL: np.arange(4.0)},
        "text": [EVIL, "plain", EVIL, ""],
        "reward": np.ones(4, np.float32),
    }
    with arc.writer(run=EVIL, session=f"s{EVIL}") as w:
        for i in range(2):
            w.add_episode(
                steps, episode_id=f"{EVIL}{i}", model_weights_uuid=f"w{EVIL}", update_count=i, terminated=True,
                metadata={EVIL: EVIL, "\ud800": "\udfff"},
            )  # fmt: skip
        w.commit(message=f"m{EVIL}")
        demo = w.buffer(f"demo{EVIL}")
        demo.append({"x": np.arange(3.0), "reward": np.ones(3)}, env_ids=0, first=True)
        demo.close_episodes([0], reason=EVIL)
        w.checkpoint(
            1, f"c{EVIL}", columns={f"p{EVIL}": np.arange(8.0)}, attributes={EVIL: {f"{EVIL}0": EVIL}},
            metrics={f"m{EVIL}": 1.0}, progress={EVIL: EVIL}, state={EVIL: EVIL}, config={EVIL: EVIL},
        ).result(30)  # fmt: skip
        w.add_episode(steps, episode_id=f"{EVIL}2")
        w.checkpoint(2, f"d{EVIL}", columns={f"p{EVIL}": np.arange(12.0)}, progress={EVIL: EVIL + "2"}).result(30)
    with arc.writer(run=f"j{EVIL}", session=f"t{EVIL}", journal_s=3600.0) as w:
        said = w.ledger(f"l{EVIL}")
        said.draw([EVIL, f"{EVIL}2"], siblings=2, cursor={EVIL: EVIL})
        said.seal(EVIL, episode_id=w.add_episode(steps, episode_id=f"{EVIL}3"))
        said.drop(f"{EVIL}2", EVIL)
        w.commit()
        w.add_episode(steps, episode_id=f"{EVIL}4")
        w.sync()
        w.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    arc.refresh().episodes.map(fails, ["text"], ["x"], job="score", on_error="skip")
    return path


def fails(steps: Any) -> Any:
    raise ValueError(EVIL)


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def calls(root: Path, tmp: Path) -> Iterator[tuple[str, ...]]:
    """Each command, in the ways in which it prints what it finds or fails to find."""
    url, name, ck = str(root), f"{EVIL}0", f"c{EVIL}"
    where = ("--where", "length > 0")
    yield from [("policy", "reader", f"s3://bucket/{EVIL}"), ("policy", "writer", url)]
    yield from [("info", url), ("ls", url), ("ls", url, *where), ("ls", str(root.parent)), ("log", url)]
    yield from [("episodes", url), ("episodes", url, "--weights", f"w{EVIL}"), ("episodes", url, "--where", EVIL)]
    yield from [("show", url, name, "--read", "text"), ("show", url, name), ("show", url, "no" + EVIL)]
    yield ("show", url, name, "--read", f"obs/{EVIL}")
    yield ("show", url, name, "--read", f"nope{EVIL}")
    yield from [("sample", url, "--num-chunks", "2", "--checkpoint", ck), ("sample", url, "--checkpoint", "no" + EVIL)]
    yield from [("checkpoints", url), ("diff", url, "2", "4"), ("diff", url, ck, f"d{EVIL}"), ("diff", url, ck, EVIL)]
    yield from [("plan", url, "2"), ("plan", url, "2", "--checkpoint", ck), ("plan", url, "2", "--checkpoint", EVIL)]
    yield ("reshard", url, "2", "--checkpoint", ck, "--to", str(tmp / "resharded"))
    yield from [("merge", url, "--to", str(tmp / "merged")), ("merge", url, "--to", url)]
    yield from [("split", url, "1", "--to", str(tmp / "split")), ("filter", url, *where, "--to", str(tmp / "filtered"))]
    yield from [("export", url, str(tmp / "npz")), ("export", url, str(tmp / "rlinf"), "--format", "rlinf")]
    yield from [("export", url, str(tmp / "flat"), "--format", "parquet"), ("export", url, "x", "--checkpoint", EVIL)]
    yield ("export", url, "--html", name, "--output", str(tmp / "page.html"))
    yield ("export", url, "--html", ck, "--output", str(tmp / "checkpoint.html"))
    yield ("export", url, "--html", ck, "--world-size", "2", "--output", str(tmp / "plan.html"))
    yield ("export", url, "--html", "no" + EVIL, "--output", str(tmp / "none.html"))
    yield from [("import", url, str(tmp / EVIL.replace("/", "")), "--format", "d3rlpy"), ("compact", url)]
    yield ("import", url, str(tmp / "x"), "--format", "d3rlpy", "--run", EVIL)
    yield from [("request-checkpoint", url), ("verify", url), ("verify", url, "--deep"), ("repair", url)]
    yield ("verify", str(tmp / "filtered"))
    yield from [("tag", url, f"t{EVIL}"), ("tag", url, "t", "--by", EVIL), ("tag", url, "t"), ("tags", url)]
    yield from [("label", url, "--id", name, f"l{EVIL}={EVIL}", "--by", EVIL), ("label", url, "--id", EVIL, "l=1")]
    yield from [("label", url, "--id", name, f"l={EVIL}", "--by", EVIL), ("labels", url), ("episodes", url)]
    yield from [("forget", url, "--keep-last", "1", "--episodes", "unreferenced"), ("forget", url, "--id", name)]
    yield from [("forget", url, "--keep-last", "1"), ("forget", url, "--where", EVIL), ("prune", url)]
    yield from [("prune", url, "--older-than", EVIL), ("undo", url), ("restore", url, "--commit", "3")]
    yield from [("tails", url), ("tails", url, "--run", f"j{EVIL}"), ("ledger", url), ("ledger", url, "--name", EVIL)]
    yield from [("ledger", url, "--run", f"j{EVIL}"), ("ledger", url, "--run", f"j{EVIL}", "--to-reissue")]
    yield from [("recover", url, "--dry-run"), ("recover", url, "--run", EVIL), ("recover", url, "--run", f"j{EVIL}")]
    yield from [("cost", url), ("cost", url, "--run", f"j{EVIL}"), ("cost", url, "--run", EVIL), ("cost", EVIL)]
    yield from [("jobs", url), ("jobs", url, "score"), ("jobs", url, "score", "--cancel"), ("jobs", url, EVIL)]
    yield "restore", url, "--commit", f"t{EVIL}"
    yield from [("demo", str(tmp / "nowhere" / "\x1b[2J"), "--commit", "1"), ("info", f"{url}/\x1b[2J")]


def test_no_command_lets_anything_act(root: Path, tmp_path: Path) -> None:
    seen = set()
    for words in calls(root, tmp_path):
        if words[0] not in APART:
            seen.add(words[0])
        for more in ((), ("--json",)):
            again = [w.replace(str(tmp_path), str(tmp_path / "json")) if more else w for w in words]
            (tmp_path / "json").mkdir(exist_ok=True)
            result = call(*again, *more)
            assert acting(result.stdout) == [], (words, result.stdout)
            stderr = result.stderr if EVIL not in " ".join(words) else ""
            assert acting(stderr) == [], (words, stderr)
            assert result.exit_code in (0, 1, 2)
            assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
            if more and result.stdout:
                json.loads(result.stdout)
    assert seen == set(COMMANDS) - APART


def test_arguments_that_act_are_shown_too(root: Path) -> None:
    for words in (
        ("show", str(root), EVIL),
        ("export", str(root), "x", "--checkpoint", EVIL),
        ("info", f"{root}/{EVIL}"),
    ):
        result = call(*words)
        assert result.exit_code in (1, 2)
        assert acting(result.output) == []
        assert "\\x1b" in result.output


def test_what_json_says_is_what_is_there(root: Path) -> None:
    found = json.loads(call("episodes", str(root), "--json").stdout)["episodes"]
    assert [row["episode_id"] for row in found][:2] == [f"{EVIL}0", f"{EVIL}1"]
    assert found[0]["metadata"] == {EVIL: EVIL, "\ud800": "\udfff"}


def test_pages_hold_nothing_that_acts(root: Path) -> None:
    arc = archive.open(str(root))
    ck = arc.checkpoints[f"c{EVIL}"]
    shown = (arc.episodes[0], ck, arc, resharding.plan(ck, world_size=2))
    for page in [one._repr_html_() for one in shown] + [arc.episodes[0].to_html(), ck.to_html()]:
        assert acting(re.sub(r"(?s)<script.*?</script>", "", page)) == []
        page.encode("utf-8")


def test_values_show_themselves(root: Path) -> None:
    arc = archive.open(str(root))
    ck = arc.checkpoints[f"c{EVIL}"]
    plan = resharding.plan(ck, world_size=2)
    shown = [arc, arc.episodes, *arc.episodes, *arc.commits, arc.commits, *arc.checkpoints, arc.checkpoints, plan]
    shown += [plan.share(0), arc.storage, Report(1, 2, {EVIL: 3}, (EVIL,))]
    for one in shown:
        assert acting(str(one)) == []
        assert acting(repr(one)) == [] or isinstance(one, Report)
    with arc.writer(run=EVIL, session=EVIL) as w:
        assert acting(repr(w)) == []
        pending = w.checkpoint(9, f"last{EVIL}")
        assert acting(repr(pending)) == []
        pending.result(30)


def test_a_kind_of_commit_that_acts(root: Path, tmp_path: Path) -> None:
    with archive.create(str(tmp_path / "root")).writer() as w:
        w.add_episode({"x": np.arange(2)})
    change_commit(tmp_path / "root", lambda body: body.update(kind=EVIL, message=EVIL))
    arc = archive.open(str(tmp_path / "root"))
    assert acting(repr(arc.head)) == []
    assert acting(call("log", str(tmp_path / "root")).output) == []


ERRORS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, archive.ArchiveError)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_what_errors_say(error: type[archive.ArchiveError]) -> None:
    made = error(f"there is no {EVIL}\nat all\ud800")
    for one in (made, pickle.loads(pickle.dumps(made))):
        assert acting(str(one)) == []
        assert "\\x1b]52" in str(one)
        assert "\nat all\\ud800" in str(one)
        assert acting(Failed(one).format_message()) == []
    assert str(error("plain — ünïcode 日本 👩‍👩‍👧")) == "plain — ünïcode 日本 👩‍👩‍👧"


def test_causes_of_what_the_store_says_act_on_nothing(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    with pytest.raises(errors.MissingObjectError) as caught:
        arc.storage.get("a\u202eb")
    assert acting(str(caught.value)) == []
    assert acting(str(caught.value.__cause__)) == []


def test_what_is_logged() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("archive")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        logger.info("checkpoint %s left out %s", EVIL, {"a": EVIL})
        try:
            raise RuntimeError(EVIL)
        except RuntimeError:
            logger.exception(f"it failed: {EVIL}")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    said = stream.getvalue()
    assert acting(said) == []
    assert said.count("\\x1b]52") >= 4
    assert "Traceback" in said
    assert "RuntimeError" in said


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    written.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    bar = pending.Bar()
    for phase in pending.PHASES:
        bar({"phase": phase, "name": EVIL, "step": 1})
    said = written.getvalue()
    assert "\x1b]52" not in said
    assert "\x1b]0" not in said
    assert "\u202e" not in said
    bar = pending.Bar()
    for phase in pending.PHASES:
        bar({"phase": phase, "name": "[red]x[/red]", "step": 1})
    assert "[red]x[/red]" in written.getvalue()
    written.seek(0)
    written.truncate()
    with observe.bar(EVIL) as advance:
        advance(1, 2)
    assert "\x1b]52" not in written.getvalue()


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with observe.bar(EVIL, of="batches", lines=True) as advance:
        for done in range(1, 4):
            advance(done, 3)
    said = capsys.readouterr().err
    assert acting(said) == []
    assert re.findall(r"(\d of 3 batches), \d+ s\n", said) == ["1 of 3 batches", "3 of 3 batches"]
    with observe.bar(EVIL) as advance:
        advance(1, 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1bb", "a\\x1bb"),
        ("a\x00\x07\x08\x0b\x0c\r\x7f\x80\x9b", "a\\x00\\x07\\x08\\x0b\\x0c\\r\\x7f\\x80\\x9b"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\u202a\u202e\u2066\u2069\u200e\u200f\u061c", "\\u202a\\u202e\\u2066\\u2069\\u200e\\u200f\\u061c"),
        ("\ud800x", "\\ud800x"),
        ("\u2028\u2029\ufeff\u200b", "\\u2028\\u2029\\ufeff\\u200b"),
        ("\U000e0041", "\\U000e0041"),
        ("plain \u00a0 \u3000 日本 עברית 👩‍👩‍👧 می‌خواهم", "plain \u00a0 \u3000 日本 עברית 👩‍👩‍👧 می‌خواهم"),
    ],
)
def test_what_acts_is_written_out(text: str, shown: str) -> None:
    assert plaintext.visible(text) == shown
    assert plaintext.one_line(text) == shown.replace("\n", "\\n").replace("\t", "\\t")
    assert json.loads(plaintext.as_json({text: [text]})) == {text: [text]}
    assert acting(plaintext.as_json({text: [text]})) == []
    assert output.cell(text, limit=None) == plaintext.one_line(text)


def test_verify_names_what_is_damaged_visibly(root: Path) -> None:
    report = verify(archive.open(str(root)))
    assert report.sound


SOURCES = [p for package in ("archive", "resharding") for p in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_there_is_one_way_out(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.name != "output.py":
        assert "click.echo(" not in text, "print with archive.cli.output.say"
    assert not re.search(r"getLogger\((?!\"archive\"\)|name\))", text), "log to 'archive', which passes `logs`"
    assert not re.search(r"(?m)^ *print\(", re.sub(r'(?s)""".*?"""', "", text)), "return text, or log it"

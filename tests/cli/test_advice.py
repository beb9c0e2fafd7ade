"""What a message advises can be done from where it is read: each argument that one names is an option of the command
line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import archive
from archive.base.errors import NotExclusiveError
from archive.cli import COMMANDS, main
from archive.cli.commands import in_options
from archive.store.bases import Roots
from tests.support.tampering import write_some

PYTHON = re.compile(r"\b\w+=(?!\d)|\barchive\.\w+\(|\barc\.|storage_options|\w\(\)")


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def told(*words: str, code: int | None = None) -> str:
    """The one line of a command that fails; it must not ask for Python."""
    result = call(*words)
    assert result.exit_code == code if code is not None else result.exit_code in (1, 2), result.output
    line = result.output.strip().splitlines()[-1]
    assert not PYTHON.search(line), line
    return line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_some(tmp_path / "source", episodes=4, commits=2)
    return tmp_path / "source"


@pytest.fixture
def referring(source: Path, tmp_path: Path) -> Path:
    """Made by reference, so that its steps lie in another archive."""
    target = tmp_path / "target"
    assert call("filter", str(source), "--where", "length > 4", "--to", str(target)).exit_code == 0
    return target


READING = (
    ("show", "{}", "e3", "--read", "action"),
    ("export", "{}", "{}-out"),
    ("export", "{}", "--html", "best", "--output", "{}.html"),
    ("sample", "{}", "--num-chunks", "2"),
    ("merge", "{}", "--to", "{}-merged", "--copy"),
    ("split", "{}", "1", "--to", "{}-split"),
    ("filter", "{}", "--where", "length > 5", "--to", "{}-filtered"),
)


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_commands_that_read_take_allow_base(referring: Path, source: Path, words: tuple[str, ...]) -> None:
    given = [word.format(referring) for word in words]
    line = told(*given, code=1)
    url = f"file://{source}"
    assert f"add --allow-base {url} if you trust it" in line
    for allowed in (url, str(source), str(source.parent)):
        again = [word.replace(f"{referring}-out", f"{referring}-{len(allowed)}") for word in given]
        more = ["--yes"] if words[0] == "export" else []
        result = call(*again, *more, "--allow-base", allowed)
        assert result.exit_code == 0, result.output


def test_every_command_that_reads_takes_allow_base_and_every_one_that_writes_single_writer() -> None:
    context = main.make_context("archive", ["info"], resilient_parsing=True)
    writing = {"demo", "request-checkpoint", "reshard", "merge", "split", "filter", "import", "compact", "repair"}
    writing |= {"tag", "label", "forget", "undo", "restore", "prune", "recover", "jobs"}
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--allow-base" in options
        assert ("--single-writer" in options) == (name in writing), name
        assert {"--copy", "--verify"} <= options or name not in ("merge", "split", "filter", "reshard")


def test_verify_says_what_it_was_not_allowed_to_look_at(referring: Path, source: Path) -> None:
    result = call("verify", str(referring), "--deep")
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if "not checked" in line]
    assert "2 shards that lie in other archives" in line
    assert line.endswith(f"add --allow-base file://{source}")
    assert "sound" not in result.output
    about = json.loads(call("verify", str(referring), "--json").output)
    assert (about["sound"], about["findings"], about["not_allowed"]) == (False, [], {f"file://{source}": 2})
    result = call("verify", str(referring), "--deep", "--allow-base", str(source))
    assert (result.exit_code, "all sound" in result.output) == (0, True)
    shard = next(source.glob("shards/*"))
    shard.write_bytes(shard.read_bytes()[:-2000] + bytes(2000))
    for allowed, code in ((), 2), (("--allow-base", str(source)), 1):
        assert call("verify", str(referring), "--deep", *allowed).exit_code == code


def test_damage_counts_for_more_than_what_was_left_out(referring: Path) -> None:
    for claim in referring.glob("sessions/*/rank-*.json"):
        claim.write_bytes(b"[]")
    result = call("verify", str(referring))
    assert result.exit_code == 1
    assert "not checked" in result.output


def test_copies_that_are_verified(source: Path, tmp_path: Path) -> None:
    shard = next(source.glob("shards/*"))
    shard.write_bytes(shard.read_bytes()[:300] + b"\xff" + shard.read_bytes()[301:])
    for words in (
        ("merge", str(source)),
        ("split", str(source), "4"),
        ("filter", str(source), "--where", "length > 0"),
    ):
        assert "add --copy" in told(*words, "--verify", "--to", str(tmp_path / "x"), code=2)
        assert told(*words, "--copy", "--verify", "--to", str(tmp_path / words[0]), code=1)


def test_a_checkpoint_that_lacks_ranks(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    w = arc.writer(0, 2, session="s")
    w.append({"x": np.arange(4)}, env_ids=0, first=True)
    w.checkpoint(1, "crash", partial=True).result(30)
    with pytest.raises(InterruptedError), w:
        raise InterruptedError
    root, page = str(tmp_path / "root"), str(tmp_path / "page.html")
    for words in (
        ("plan", root, "1", "--checkpoint", "crash"),
        ("reshard", root, "1", "--checkpoint", "crash", "--to", str(tmp_path / "made")),
        ("export", root, "--html", "crash", "--world-size", "1", "--output", page),
    ):
        line = told(*words)
        assert "add --allow-missing" in line
        assert "another --checkpoint" in line
        result = call(*words, "--allow-missing")
        assert result.exit_code == 0, result.output


def test_a_sample_of_trajectories_of_which_some_lack_a_field(tmp_path: Path) -> None:
    with archive.create(str(tmp_path / "root")).writer() as w:
        w.add_episode({"x": np.arange(4.0), "reward": np.ones(4)})
        w.add_episode({"x": np.arange(4.0), "reward": np.ones(4), "more": np.ones(4)})
    words = ("sample", str(tmp_path / "root"), "--num-chunks", "8")
    line = told(*words)
    assert "--missing skip" in line
    assert "--missing VALUE" in line
    for value in ("skip", "0", "1.5"):
        result = call(*words, "--missing", value)
        assert result.exit_code == 0, result.output


def test_a_store_that_is_used_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_some(tmp_path / "source")

    def refuse(temporary: str, path: str) -> None:
        raise NotExclusiveError("this file system has no hard links; use another, or open with single_writer=True")

    monkeypatch.setattr("archive.store.drivers.local.claim", refuse)
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    for words in (
        ("merge", source, "--to", target),
        ("filter", source, "--where", "length > 4", "--to", target + "2"),
        ("split", source, "1", "--to", target + "3"),
        ("request-checkpoint", source),
    ):
        assert "add --single-writer" in told(*words, code=1)
        result = call(*words, "--single-writer")
        assert result.exit_code == 0, result.output


def test_archives_of_the_way_are_not_opened_because_a_bucket_names_them(referring: Path, tmp_path: Path) -> None:
    """Copying from an archive that refers to a third one asks for leave, as reading does."""
    line = told("merge", str(referring), "--to", str(tmp_path / "third"), "--copy", code=1)
    assert "--allow-base" in line


@pytest.mark.parametrize(
    ("text", "command", "said"),
    [
        ("check the network and the store, or raise deadline_s", "info", "longer --retry-for"),
        ("How many steps a second? Give fps=; LeRobot's", "export", "Give --set fps=VALUE; LeRobot's"),
        ("which are not read; on_video='skip'", "import", "not read; --set on_video=skip"),
        ("give allow_pickle=True only if you trust", "import", "give --set allow_pickle=true only"),
        ("name the field that has it: next_observations='next/obs'", "export", "--set next_observations=next/obs"),
        ("checkpoint 'a' has 2 ranks: give rank=, or", "export", "give --set rank=VALUE, or"),
        ("the ring has 3 rows; plan with num_envs=4", "plan", "plan with --num-envs 4"),
        ("pass such settings in storage_options", "info", "--storage-option"),
        ("Say which run: arc.checkpoints.of('a'), or --run a; and", "plan", "Say which run: --run a; and"),
        ("nothing to say", "info", "nothing to say"),
    ],
)
def test_words(text: str, command: str, said: str) -> None:
    assert said in in_options(text, command)


def test_a_base_is_read_with_the_leave_of_the_caller_alone(referring: Path, source: Path) -> None:
    arc: Any = archive.open(str(referring))
    roots = Roots(arc.storage, arc.head.base_urls)
    (base,) = arc.head.base_urls
    assert roots.allows(None)
    assert not roots.allows(base)
    arc = archive.open(str(referring), allow_bases=[str(source)])
    assert Roots(arc.storage, arc.head.base_urls).allows(base)

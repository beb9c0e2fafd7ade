"""Run as a program: mutation testing. A sample of small faults, of the kinds that cosmic-ray knows, each put into a
function of the library alone, and the tests that reach it: one of them must fail.

Usage: python -m tests.support.mutants [--count 300] [--seed 0] [--only PART ...] [--tests PATH ...]

The tests are collected and run once, so that it is known which statements each of them reaches, and how long it takes.
For each fault this process then forks: the child gives the function its faulty code, and runs the tests that reach it:
those that noticed other faults close by first, and the quick ones before the slow ones. So no file is changed, and
nothing is imported again. The folder has what is known so far: a run that was ended goes on, and one after a change
judges what lies in changed files, or lived, and was judged by other tests than those that are there.

survivors.txt has the faults that no test notices, and why none needs to.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.mutants import faults
from tests.support.mutants.faults import Mutant
from tests.support.mutants.trials import ALIVE, TIMED_OUT, UNSEEN, Outcome, Tests, digest
from tests.support.places import ROOT

COSMIC_RAY = "build/cosmic-ray"  # where `make mutants` installs it
TESTS = ("tests/log", "tests/journal", "tests/maintain", "tests/checkpoint", "tests/saved", "tests/ledger")
SURVIVORS = Path(__file__).with_name("survivors.txt")
MOST_ALIVE = 0.05
SAME = "Equivalent: "  # so begins the reason of a fault that changes nothing that anybody can see


def survivors() -> dict[str, str]:
    """The known ones, as `Mutant.shown` shows them, and the reason of each: paragraphs of three lines, and more."""
    paragraphs = (one.strip().split("\n") for one in SURVIVORS.read_text("utf-8").split("\n\n"))
    return {"\n".join(one[:3]): " ".join(one[3:]) for one in paragraphs if len(one) > 3}


class Mutation:
    """A plugin of pytest that puts faults in place of a run of the tests."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._folder = Path(given.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.is_enough = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            outcomes = self._judged(Tests(session.config, session.items, self._folder))
            self.is_enough = told(outcomes, survivors())
        return True

    def _judged(self, tests: Tests) -> list[Outcome]:
        tests.measure()
        wanted = self._sample()
        versions = {one: digest([ROOT / one.file]) for one in wanted}
        paths = sorted(one for folder in self._given.tests for one in Path(ROOT, folder).rglob("*.py"))
        shared = (one for one in sorted(ROOT.glob("tests/support/**/*.py")) if "mutants" not in one.parts)
        by = digest([*paths, *shared])
        known: dict[Mutant, Outcome] = {}
        file = self._folder / "outcomes.jsonl"
        file.touch()
        for mutant, outcome, test, version, by_tests in map(json.loads, file.read_text().splitlines()):
            found = Outcome(Mutant(*mutant), outcome, test)
            if version == versions.get(found.mutant) and (test or by_tests == by):
                known[found.mutant] = found
                tests.learn(found)
        left = sorted({*wanted} - {*known}, reverse=True)  # those of a function one after the other
        for count, found in enumerate(tests.judged(left)):
            known[found.mutant] = found
            with file.open("a") as out:
                print(json.dumps([*found, versions[found.mutant], by]), file=out)
            print(f"{count + 1} of {len(left)}: {found.outcome}: {found.mutant.shown()}", flush=True)
        return [known[one] for one in wanted]

    def _sample(self) -> list[Mutant]:
        """The sample, drawn once for as long as the files are the same."""
        how = self._given.count, self._given.seed, self._given.only
        file = self._folder / f"sample-{digest(faults.files())}-{json.dumps(how).encode().hex()}.json"
        if not file.exists():
            file.write_text(json.dumps(faults.sample(*how)))
        return [Mutant(*one) for one in json.loads(file.read_text())]


def told(outcomes: Sequence[Outcome], reasons: Mapping[str, str]) -> bool:
    """Print the figure, and the faults that lived, those without a known reason first. True if these are few."""
    shown = [(one.mutant.shown(), one) for one in outcomes]
    hung = [f"{text}\nhung: {one.test}\n" for text, one in shown if one.outcome == TIMED_OUT]
    alive = [(text, one.outcome) for text, one in shown if one.outcome in (ALIVE, UNSEEN)]
    told = [f"{text}\n{reasons.get(text, f'NEW: {how}')}\n" for text, how in alive]
    print("", *hung, *sorted(told, key=lambda one: "\nNEW: " not in one), sep="\n")
    same = sum(reasons.get(text, "").startswith(SAME) for text, _ in alive)
    new = sum(text not in reasons for text, _ in alive)
    count, killed = len(outcomes), len(outcomes) - len(alive)
    print(f"{killed} of {count} killed, {killed / max(1, count):.1%} ({len(hung)} of them hung); {len(alive)} live:")
    print(f"{same} that change nothing, so {killed / max(1, count - same):.1%} without these, and {new} that are new")
    return len(alive) - same <= MOST_ALIVE * (count - same)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--folder", default="build/mutants")
    given = parser.parse_args()
    sys.path.append(str(ROOT / COSMIC_RAY))  # last: it brings packages along that are there already
    files = Path(given.folder).resolve() / "files"
    shutil.rmtree(files, ignore_errors=True)
    how = ["-q", "--timeout", "0", "--basetemp", str(files), "--rootdir", str(ROOT)]
    how += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    mutation = Mutation(given)
    code = int(pytest.main([*how, *(str(ROOT / one) for one in given.tests)], plugins=[mutation]))
    return code or int(not mutation.is_enough)


if __name__ == "__main__":
    sys.exit(main())

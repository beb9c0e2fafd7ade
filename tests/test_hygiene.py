"""Promises of sources and packaging: nothing is unpickled or evaluated, errors are drawn as they are,
tests lie in rooms."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from archive.base import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("archive", "resharding")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
UNPICKLERS = {
    "pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "joblib", "marshal", "shelve",
    "yaml", "ruamel", "jsonpickle", "runpy", "imp", "code", "codeop",
}  # fmt: skip
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.package", "torch.hub.load"}
UNPICKLES = {"torch.jit.load", "torch.hub.load", "pd.read_pickle", "pandas.read_pickle", "np.lib.format.read_array"}
EXCEPTIONS = {
    "archive/adapters/rlinf/folders.py": ["imports pickle"],  # to refuse what is not plain, and if asked to
    "archive/jobs/workers.py": ["imports cloudpickle"],  # between a driver and its own workers; never from a bucket
}
BRANCH = re.compile(r"^(?P<indent>(?:│   |    )*)(?:├──|└──) (?P<name>\w+)(?: \((?P<builtin>\w+)\))?")
TRUNK = re.compile(r"^(?P<name>\w+Error)$")


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""
        yield from (alias.name for alias in node.names if not node.level)


def _is(call: ast.Call, keyword: str, value: bool, *, absent: bool = False) -> bool:
    given = {k.arg: k.value for k in call.keywords}
    if keyword not in given:
        return absent
    written = given[keyword]
    return isinstance(written, ast.Constant) and written.value is value


def _call_problem(call: ast.Call) -> str | None:
    name = ast.unparse(call.func)
    if name.removeprefix("builtins.") in RUNS_TEXT:
        return f"{name}() runs text as code"
    if name in UNPICKLES or name.endswith(".read_pickle"):
        return f"{name}() unpickles"
    if not _is(call, "shell", False, absent=True):
        return f"{name}(shell=...) runs text as commands"
    if name in ("np.load", "numpy.load") and len(call.args) > 2:
        return f"{name}() with more than a file and a mode may unpickle"
    if not _is(call, "weights_only", True, absent=True):
        return f"{name}(weights_only=...) unpickles"
    if name == "torch.load" and not _is(call, "weights_only", True):
        return "torch.load() without weights_only=True unpickles"
    if not _is(call, "allow_pickle", False, absent=True):
        return f"{name}(allow_pickle=...) unpickles"
    return None


def _hides_a_loader(node: ast.AST) -> bool:
    """Whether a loader gets a name of its own, by which it would not be known here."""
    loaders = isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "os", "builtins")
    return loaders and any(alias.name in ("load", "system", "popen", "exec", "eval") for alias in node.names)


def unsafe_uses(source: str) -> list[str]:
    out = []
    for node in ast.walk(ast.parse(source)):
        names = {name.partition(".")[0] for name in _imported(node)} & UNPICKLERS
        out += [f"imports {name}" for name in sorted(names)]
        out += ["imports a loader by its name"] if _hides_a_loader(node) else []
        problem = _call_problem(node) if isinstance(node, ast.Call) else None
        out += [problem] if problem else []
    return out


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    allowed = EXCEPTIONS.get(path.relative_to(ROOT).as_posix(), [])
    assert unsafe_uses(path.read_text("utf-8")) == allowed


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "from torch import multiprocessing, pickle",
        "import joblib.parallel",
        "eval('1')",
        "exec('1')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, None, True)",
        "library.load(path, weights_only=False)",
        "from torch import load",
        "torch.jit.load(path)",
        "frames.read_pickle(path)",
        "import yaml",
        "from ruamel.yaml import YAML",
        "import jsonpickle",
        "compile(text, path, 'exec')",
        "__import__(name)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=trusted)",
    ],
)
def test_the_checker_finds_unsafe_uses(source: str) -> None:
    assert len(unsafe_uses(source)) == 1


def test_the_checker_lets_safe_uses_pass() -> None:
    safe = (
        "model.eval()\ntorch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)\nimport pickled_cucumber"
    )
    assert unsafe_uses(safe) == []


def documented_tree(text: str) -> dict[str, tuple[str | None, str | None]]:
    """Error name -> (parent in the drawn tree, builtin base in parentheses)."""
    out: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in text.splitlines():
        if branch := BRANCH.match(line):
            del path[len(branch["indent"]) // 4 + 1 :]
            out[branch["name"]] = (path[-1], branch["builtin"])
            path.append(branch["name"])
        elif trunk := TRUNK.match(line):
            path = [trunk["name"]]
            out[trunk["name"]] = (None, None)
    return out


def defined_errors() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if value.__module__ == errors.__name__ and issubclass(value, BaseException)
    }


def test_every_error_is_drawn_where_it_stands() -> None:
    drawn = documented_tree(errors.__doc__ or "")
    defined = defined_errors()
    assert drawn.keys() == defined.keys()
    for name, (parent, builtin) in drawn.items():
        bases = [base.__name__ for base in defined[name].__bases__]
        assert bases == [part for part in (parent or "Exception", builtin) if part], name


def test_every_error_says_what_it_means() -> None:
    assert [name for name, error in defined_errors().items() if "__doc__" not in vars(error)] == []


def test_packages_ship_their_types() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    data = config["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").read_bytes() == b""
        assert "py.typed" in data[package]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run"])
def test_no_package_index_is_named(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert not re.search(r"index-url|find-links|https?://|file://", text)


# -- documents ---------------------------------------------------------------------------------------------------------

MAX_LINE = 120
OUTPUT = re.compile(r"^```(?:console|text)\n.*?^```$", re.MULTILINE | re.DOTALL)  # as wide as a program prints it
FIGURES = "RESULTS.md"  # of benchmarks: wide tables
PAGES = [*ROOT.glob("*.md"), *(p for top in ("archive", "resharding", "tests") for p in (ROOT / top).rglob("*.md"))]


@pytest.mark.parametrize("path", sorted(PAGES), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_documents_are_short(path: Path) -> None:
    text = OUTPUT.sub("", "" if path.name == FIGURES else path.read_text("utf-8"))
    assert [line for line in text.splitlines() if len(line) > MAX_LINE] == []


# -- where tests lie ---------------------------------------------------------------------------------------------------

TESTS = ROOT / "tests"
NO_ROOMS = {"benchmarks", "data", "examples", "golden", "simulation", "support", "whole"}
MODULES = [
    p
    for p in sorted(TESTS.rglob("*.py"))
    if p.relative_to(TESTS).parts[0] not in NO_ROOMS - {"simulation", "support", "whole"}
]


def _tests_imported(source: str) -> list[str]:
    out = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        out += [name for name in names if re.search(r"\b(test_\w+|conftest)\b", name)]
    return out


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_is_imported_by_another(path: Path) -> None:
    assert _tests_imported(path.read_text("utf-8")) == [], "what tests share lies in tests/support"


@pytest.mark.parametrize(
    "source", ["import test_a", "from tests.read.test_a import b", "from tests.read import test_a", "import conftest"]
)
def test_an_imported_test_is_noticed(source: str) -> None:
    assert len(_tests_imported(f"def f():\n    {source}\nfrom tests.support.servers import moto")) == 1


def test_tests_lie_in_the_folder_of_a_room() -> None:
    folders = {path.parent.relative_to(TESTS) for path in MODULES}
    for folder in sorted(folder for folder in folders if folder.parts and folder.parts[0] not in NO_ROOMS):
        assert (ROOT / folder).is_dir() or (ROOT / "archive" / folder).is_dir(), (
            f"tests/{folder} is named after no room"
        )
    assert [str(folder) for folder in sorted(folders) if not (TESTS / folder / "__init__.py").exists()] == []


HISTORY = {"CHANGELOG.md", "RESULTS.md"}  # they may name what is gone
DOTTED = re.compile(r'(?<![\w./"@])((?:archive|resharding)(?:\.[a-z_]+)+)\b(?!\()')
PATHS = re.compile(r"(?<![\w/])((?:archive|resharding|tests)/[\w/]+\.(?:py|md))\b")


def prose(path: Path) -> str:
    """The docstrings and comments of a module, or the whole of a document."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return text
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return "\n".join([*comments, *(ast.get_docstring(node) or "" for node in documented)])


def is_there(name: str) -> bool:
    """True if a dotted name is a room, a module, something in one, or in the door of a room."""
    place, *parts = name.split(".")
    for part in parts:
        folder = ROOT / place / part
        if folder.with_suffix(".py").exists() or name == "archive.json":
            return True
        if not folder.is_dir():
            return re.search(rf"\b{part}\b", (ROOT / place / "__init__.py").read_text("utf-8")) is not None
        place = f"{place}/{part}"
    return True


@pytest.mark.parametrize("path", [*SOURCES, *(page for page in PAGES if page.name not in HISTORY)], ids=str)
def test_modules_that_texts_name_exist(path: Path) -> None:
    text = prose(path)
    assert [name for name in sorted(set(DOTTED.findall(text))) if not is_there(name)] == []
    for name in sorted(set(PATHS.findall(text))):
        assert (ROOT / name).exists() or (TESTS / name).exists(), name


def test_a_module_that_is_gone_is_noticed() -> None:
    assert is_there("archive.log.commits.read")
    assert is_there("archive.testing.trace")
    assert not is_there("archive.manifest")
    assert not is_there("archive.log.manifest")

"""Imports go down only, heavy libraries are imported where the table says, and `import archive` loads none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("archive", "resharding")

# group -> (layer, modules below `archive.`; those of resharding by their full name)
LAYERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pure": (
        0,
        (
            *(
                "errors",
                "cached",
                "forking",
                "names",
                "version",
                "layout",
                "ranges",
                "byterange",
                "segments",
                "retention",
                "progress",
                "streams",
                "live",
                "losses",
                "shutdown",
                "waiting",
                "undo",
            ),
            *(
                "visible",
                "logs",
                "plainjson",
                "commitshape",
                "jsontree",
                "treecodec",
                "statetree",
                "statearrays",
                "statetorch",
                "staterandom",
                "tree",
                "dtypes",
                "schema",
                "readonly",
                "kinds",
                "sizes",
            ),
            *(
                "packing",
                "rawchunks",
                "tables",
                "folding",
                "branches",
                "chains",
                "chunkindex",
                "fields",
                "expressions",
                "intake",
            ),
            *(
                "blocks",
                "slabs",
                "arena",
                "memory",
                "resumed",
                "cut",
                "staging",
                "liveview",
                "liveparts",
                "derived",
                "rowpool",
                "stepmap",
                "fieldrows",
                "_failures",
                "_iostats",
                "_root",
                "_payload",
                "views",
                "views.*",
            ),
        ),
    ),
    "store": (1, ("storage", "_retry", "_patience", "_localfs", "_parallel", "_remote")),
    "shards": (1, ("shards",)),
    "engine": (
        2,
        (
            *(
                "commits",
                "manifest",
                "sessions",
                "starting",
                "sessionruns",
                "pipeline",
                "bases",
                "fetching",
                "chunkcache",
                "chunkstore",
                "gathering",
                "reader",
                "index",
                "chosen",
                "episode",
                "episodes",
                "staged",
            ),
            *(
                "bufferwriter",
                "changes",
                "collecting",
                "segmentrows",
                "episodeids",
                "buffer",
                "writer",
                "saving",
                "saver",
                "pending",
                "joining",
                "claims",
                "resuming",
                "checkpoints",
                "checkpointlist",
                "runs",
                "checkpointing",
            ),
            *("progressbar", "deriving", "files", "tokenizing", "ahead", "imports"),
        ),
    ),
    "facade": (3, ("archive", "facade")),
    "frameworks": (4, ("torch", "torch.*", "adapters", "adapters.*", "buffers", "buffers.*", "maintenance", "splices")),
    "resharding": (4, ("resharding", "resharding.*")),
    "tools": (5, ("cli*", "notebook*", "__main__")),
}
EVERYWHERE = tuple(LAYERS)
ABOVE_STORAGE = ("engine", "facade", "frameworks", "resharding", "tools")

# third-party package -> groups, or `archive.` modules, that may import it at all; eagerly only those of EAGER
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "numpy": EVERYWHERE,
    "numcodecs": ("rawchunks",),
    "pyarrow": EVERYWHERE,
    "google_crc32c": EVERYWHERE,
    "ml_dtypes": ("dtypes", "statetree", "shards"),
    "fsspec": ("storage",),
    "s3fs": ("store",),
    "obstore": ("store",),
    "botocore": ("store",),
    "aiohttp": ("store",),
    "aiobotocore": ("store",),
    "zarr": ("shards",),
    "torch": ("dtypes", "statetree", "statetorch", *ABOVE_STORAGE),
    "tensordict": ("statetree", "statetorch", "frameworks"),
    "torchrl": ("frameworks",),
    "ray": ("frameworks", "resharding"),
    "polars": ("engine",),
    "pandas": ("engine", "facade", "resharding", "tools"),
    "matplotlib": ("views.plots",),
    "tokenizers": ("tokenizing",),
    "transformers": ("tokenizing",),
    "click": ("tools",),
    "rich": ("tools", "progressbar"),
}
EAGER: dict[str, tuple[str, ...]] = {
    "numpy": EVERYWHERE,
    "numcodecs": ("rawchunks",),
    "pyarrow": EVERYWHERE,
    "google_crc32c": EVERYWHERE,
    "torch": ("frameworks",),
    "click": ("tools",),
    "rich": ("tools",),
}
LIKE_TOOLS = (
    "archive.adapters.common",
    "archive.buffers.loading",
)  # a checkpoint's rank is a share of a plan: asked for when needed
NEVER_AT_START = ("torch", "s3fs", "zarr", "pyarrow", "fsspec", "click", "rich")
MAX_IMPORT_S = 0.25


@dataclass(frozen=True, slots=True)
class Import:
    target: str
    line: int
    lazy: bool
    typing_only: bool


class _Collector(ast.NodeVisitor):
    """Collects the imports of one module, saying for each whether it runs with the module or later."""

    def __init__(self, module: str, is_package: bool, known: frozenset[str]) -> None:
        self.package = module if is_package else module.rpartition(".")[0]
        self.known = known
        self.found: list[Import] = []
        self._depth = 0
        self._typing = False

    def _add(self, target: str, line: int) -> None:
        self.found.append(Import(target, line, self._depth > 0, self._typing))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
        names = [f"{base}.{alias.name}" for alias in node.names]
        for target in sorted({name if name in self.known else base for name in names}):
            self._add(target, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value), node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).rpartition(".")[2] != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        self._typing = True
        for child in node.body:
            self.visit(child)
        self._typing = False
        for child in node.orelse:
            self.visit(child)

    def _visit_later(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_later  # noqa: N815


def imports_of(source: str, module: str, *, is_package: bool, known: frozenset[str]) -> list[Import]:
    collector = _Collector(module, is_package, known)
    collector.visit(ast.parse(source))
    return collector.found


def short(module: str) -> str:
    return module.removeprefix("archive.")


def group_of(module: str) -> str | None:
    for group, (_, patterns) in LAYERS.items():
        if any(fnmatchcase(short(module), pattern) for pattern in patterns):
            return group
    return None


def allowed(table: dict[str, tuple[str, ...]], package: str, module: str) -> bool:
    return bool({group_of(module), short(module)} & set(table.get(package, ())))


def internal_problem(module: str, found: Import) -> str | None:
    group, target_group = group_of(module) or "", group_of(found.target)
    if target_group is None:
        return f"{found.target} has no layer: add it to the table in tests/test_layers.py"
    if target_group == "resharding" and group not in ("resharding", "tools") and module not in LIKE_TOOLS:
        return f"{module} imports {found.target}: resharding imports archive, never the reverse"
    if target_group == "resharding" and group != "resharding" and not (found.lazy or found.typing_only):
        return f"{module} imports {found.target} eagerly: move the import into the function that needs it"
    if LAYERS[target_group][0] > LAYERS[group][0]:
        return f"{module} ({group}) imports {found.target} ({target_group}): imports go down only"
    return None


def third_party_problem(module: str, found: Import) -> str | None:
    package = found.target.partition(".")[0]
    if package in sys.stdlib_module_names or found.typing_only:
        return None
    if package not in THIRD_PARTY:
        return f"{package} is not in the table: say in tests/test_layers.py who may import it"
    if not allowed(THIRD_PARTY, package, module):
        return f"{module} imports {package}: only {', '.join(THIRD_PARTY[package])} may"
    if not found.lazy and not allowed(EAGER, package, module):
        return f"{module} imports {package} eagerly: move the import into the function that needs it"
    return None


def problems(source: str, module: str, *, is_package: bool = False, known: frozenset[str]) -> list[str]:
    if group_of(module) is None:
        return [f"{module} has no layer: add it to the table in tests/test_layers.py"]
    out = []
    for found in imports_of(source, module, is_package=is_package, known=known):
        ours = found.target.partition(".")[0] in OURS
        problem = internal_problem(module, found) if ours else third_party_problem(module, found)
        if problem:
            out.append(f"line {found.line}: {problem}")
    return out


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> Iterator[Path]:
    for package in OURS:
        yield from sorted((ROOT / package).rglob("*.py"))


PATHS = list(sources())
KNOWN = frozenset(map(module_name, PATHS))


@pytest.mark.parametrize("path", PATHS, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    found = problems(path.read_text("utf-8"), module_name(path), is_package=path.name == "__init__.py", known=KNOWN)
    assert not found, f"{path.relative_to(ROOT)}:\n" + "\n".join(found)


FAKE = frozenset(
    {"archive", "archive.errors", "archive.tree", "archive.storage", "archive.writer", "archive.torch.ring"}
    | {"archive.cli", "resharding", "resharding.plans"}
)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("archive.tree", "from archive import errors", None),
        ("archive.tree", "import json, numpy", None),
        ("archive.writer", "from archive.storage import Storage", None),
        ("archive.writer", "from .storage import Storage", None),
        ("archive.storage", "def connect():\n    import fsspec", None),
        ("archive.reader", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", None),
        ("archive.cli", "def plan():\n    import resharding", None),
        ("archive.torch.ring", "import torch", None),
        ("resharding.plans", "from archive.writer import Writer\nfrom resharding import plans", None),
        ("archive.tree", "from archive.storage import Storage", "imports go down only"),
        ("archive.tree", "from . import storage", "imports go down only"),
        ("archive.tree", "def later():\n    from archive import open", "imports go down only"),
        ("archive.tree", "if TYPE_CHECKING:\n    from archive import writer", "imports go down only"),
        ("archive.writer", "import importlib\nimportlib.import_module('archive.cli')", "imports go down only"),
        ("archive.torch.ring", "from archive.cli import main", "imports go down only"),
        ("archive.writer", "def later():\n    import resharding", "never the reverse"),
        ("archive.cli", "from resharding import plans", "eagerly"),
        ("archive.writer", "def later():\n    import fsspec", "only storage may"),
        ("archive._remote", "def later():\n    import fsspec", "only storage may"),
        ("archive.writer", "def later():\n    import s3fs", "only store may"),
        ("archive.writer", "def later():\n    from zarr.storage import MemoryStore", "only shards may"),
        ("archive.storage", "import fsspec", "eagerly"),
        ("archive.tree", "import sys\ndef later():\n    import torch", "imports torch: only"),
        ("archive.writer", "import torch", "eagerly"),
        ("archive.writer", "import requests", "is not in the table"),
        ("archive.brand_new", "", "add it to the table"),
        ("archive.cli", "import archive.brand_new", "add it to the table"),
    ],
)
def test_the_checker_tells_right_from_wrong(module: str, source: str, expected: str | None) -> None:
    found = problems(source, module, known=FAKE)
    assert (found == []) if expected is None else (len(found) == 1 and expected in found[0])


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout


def test_import_archive_loads_nothing_heavy() -> None:
    loaded = _python("import archive, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert "archive" in loaded
    assert not set(loaded) & set(NEVER_AT_START)


def _best_wall_s(code: str) -> float:
    def wall_s() -> float:
        started = time.perf_counter()
        _python(code)
        return time.perf_counter() - started

    return min(wall_s() for _ in range(3))


def test_import_archive_is_fast() -> None:
    _python("import archive")  # byte code is compiled once, not measured
    took_s = _best_wall_s("import archive") - _best_wall_s("pass")
    assert took_s < MAX_IMPORT_S, f"import archive takes {took_s:.2f} s: see python -X importtime -c 'import archive'"

"""Running a reader that must not import the library, and values as it prints them."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np

from tests.support.places import ROOT


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def plain(value: Any) -> Any:
    """A value as the reader prints it."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == object:
        return {"dtype": "str", "shape": list(value.shape), "data": value.ravel().tolist()}
    known = value.dtype.name if re.match(r"bfloat16|float8", value.dtype.name) else value.dtype.str
    return {"dtype": known, "shape": list(value.shape), "data": value.tobytes().hex()}

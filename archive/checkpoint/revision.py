"""The git revision of the code that makes checkpoints."""

from __future__ import annotations

import subprocess
from functools import cache


@cache
def git_revision(folder: str) -> str | None:
    """The revision of a folder's git checkout when it was first asked for; None if it is none. May take seconds."""
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None if out.returncode == 0 else None

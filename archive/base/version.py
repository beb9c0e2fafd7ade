"""The version of this library, and of the code that runs it."""

from __future__ import annotations

from functools import cache

__version__ = "0.1.0"


@cache
def git_revision(folder: str) -> str | None:
    """The revision of a folder's git checkout when it was first asked for; None if it is none. May take seconds."""
    import subprocess

    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None if out.returncode == 0 else None

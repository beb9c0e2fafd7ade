"""`archive demo`: the library at work, step by step, with what each step cost."""

from __future__ import annotations

from archive.cli.demo.steps import demo

__all__ = ["demo"]

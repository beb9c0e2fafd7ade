"""Tests for what others add; needs pytest. An empty root comes in; what the library relies on passes or fails.

`StoreContract` is what a store must hold: subclass it, and give it a root (see CONTRIBUTING.md, "Adding a store").
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("archive.testing.contract")  # before it is imported: failures then show the values

from archive.testing.contract import StoreContract  # noqa: E402
from archive.testing.roots import EmptyRoot  # noqa: E402

__all__ = ["EmptyRoot", "StoreContract"]

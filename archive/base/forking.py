"""Pure, no I/O: locks that a forked child gets anew, so that it waits for no thread that only its parent has.

The guarded state may be half changed at the fork. So such locks are for state that a child can use as it finds it, or
makes anew; objects of one process (a writer) refuse in the child instead, before they take any lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_owned: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def own(owner: Any, name: str, make: Callable[[], T]) -> T:
    """The result of `make`, to be kept as `owner.<name>` (of an object or a module); a forked child gets a new one."""
    _owned.setdefault(owner, {})[name] = make
    return make()


def lock(owner: Any, name: str = "_lock") -> threading.RLock:
    """A lock that a thread may take several times, to be kept as `owner.<name>`."""
    return own(owner, name, threading.RLock)


def in_child(work: Callable[[], None]) -> None:
    """Call this in each forked child, before anything else runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=work)


def _renew() -> None:
    for owner, made in list(_owned.items()):
        for name, make in made.items():
            setattr(owner, name, make())


in_child(_renew)

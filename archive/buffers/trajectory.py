"""Frameworks: RLinf's TrajectoryReplayBuffer on any filesystem, its trajectories in an archive."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from archive.buffers import flatten, loading, mapping, ranks
from archive.buffers.contents import Contents, Entry
from archive.buffers.flatten import Flat
from archive.buffers.home import ArchiveHome
from archive.buffers.sink import Sink
from archive.buffers.sinks import Sinks
from archive.checkpoints import MAIN_BUFFER
from archive.errors import CapacityError, ClosedError, UsageError
from archive.saver import Pending, finish_at_exit

FORMATS = ("pt", "pkl")
```

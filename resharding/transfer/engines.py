"""Doing independent work on this machine, or spread over a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from archive.base import ArchiveError, StorageError, UsageError

ENGINES = ("local", "ray")

J = TypeVar("J")
R = TypeVar("R")


def check_engine(engine: str, *urls: str) -> None:
    """Refuse an engine that there is not, or that cannot reach what it is to work on."""
    if engine not in ENGINES:
        raise UsageError(f"engine={engine!r}: give one of {', '.join(ENGINES)}")
    inside = [url for url in urls if url.startswith("memory:")]
    if engine == "ray" and inside:
        raise UsageError(
            f"engine='ray': other processes cannot see {inside[0]}; use engine='local', or a store they reach"
        )


def spread(
    engine: str,
    task: Callable[..., R],
    shared: Sequence[Any],
    batches: Sequence[J],
    progress: Callable[[int, int], None] | None = None,
) -> list[R]:
    """`task(*shared, batch)` for each batch; results in their order. The first error ends it.

    progress: called with (batches done, batches) of work on this machine.
    """
    if engine == "local":
        done = []
        for batch in batches:
            done.append(task(*shared, batch))
            if progress is not None:
                progress(len(done), len(batches))
        return done
    ray = _ray()
    given = [ray.put(value) for value in shared]
    remote = ray.remote(task)
    under_way = [remote.remote(*given, batch) for batch in batches]
    try:
        return list(ray.get(under_way))
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, ArchiveError):
            raise e.cause from e
        raise StorageError(f"a Ray task failed: {e}; nothing was committed, run it again") from e
    except ray.exceptions.RayError as e:
        raise StorageError(f"Ray did not finish the work: {e}; nothing was committed, run it again") from e
    finally:
        _, left = ray.wait(under_way, num_returns=len(under_way), timeout=0) if under_way else ([], [])
        for one in left:  # Ray may crash where it is to cancel what has just ended
            ray.cancel(one)


def _ray() -> Any:
    import importlib

    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as e:
        raise UsageError("engine='ray' needs Ray: pip install 'trajectory-archive[ray]'") from e

"""Processes that start at once: forked from a server that has loaded what they would load, not from the test's own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any

FORKSERVER = multiprocessing.get_context("forkserver")
CORE = (  # what whoever writes and reads loads sooner or later; pyarrow asks for pandas with its first array
    *(
        "archive.facade",
        "archive.opening",
        "archive.writer",
        "archive.checkpoint",
        "archive.checkpoint.checkpoints",
    ),
    *("archive.checkpoint.saver", "archive.index.chains", "archive.shard.groups", "archive.fields.torchstate"),
    *("archive.fields.trees", "tests.support.servers", "resharding", "zarr", "zarr.codecs", "zarrs", "s3fs"),
    *("obstore.store", "pandas", "pyarrow.compute", "pyarrow.pandas_compat", "pyarrow.parquet"),
)
LOADED = [*CORE, "archive.torch"]


def load_ahead() -> None:
    """Has the server, which starts with the first process,
    load this once: for every process of context "forkserver"."""
    FORKSERVER.set_forkserver_preload(LOADED)


def import_core() -> None:
    """Loads in this process what those that are forked from it would each load; what is not installed is left out."""
    for name in CORE:
        with nullcontext() if name.startswith("archive.") else suppress(ImportError):  # or it would be slow unnoticed
            import_module(name)


def answers_in_processes(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], timeout_s: float = 120.0
) -> list[Any]:
    """What `function` answers to each of the calls, each in a process of its own, all at once."""
    pipes = [FORKSERVER.Pipe(duplex=False) for _ in calls]
    children = [
        FORKSERVER.Process(target=_answer, args=(sender, function, tuple(call)))
        for (_, sender), call in zip(pipes, calls, strict=True)
    ]
    try:
        for child, (_, sender) in zip(children, pipes, strict=True):
            child.start()
            sender.close()
        answers = [_received(receiver, timeout_s) for receiver, _ in pipes]
        for child in children:
            child.join(timeout_s)
        assert [child.exitcode for child in children] == [0] * len(children)
        return answers
    finally:
        for child, (receiver, _) in zip(children, pipes, strict=True):
            receiver.close()
            end(child)


def exit_code(function: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of a process that has called `function`; that of a signal is negative."""
    child = FORKSERVER.Process(target=function, args=arguments)
    child.start()
    child.join(120)
    code: int | None = child.exitcode
    end(child)
    assert code is not None, "the process did not end within 120 s"
    return code


def until(ready: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What `ready` gives, once that is something."""
    stop = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < stop, f"nothing happened in {seconds} s"
        time.sleep(0.005)
    return found


def end(child: Any) -> None:
    """Ends a process that was started, if it has not ended by itself."""
    child.kill()
    child.join()
    child.close()


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))
    sender.close()


def _received(receiver: Any, timeout_s: float) -> Any:
    assert receiver.poll(timeout_s), f"no answer within {timeout_s} s"
    return receiver.recv()

"""Processes that start at once: forked from a server that has loaded what they would load, not from the test's own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

FORKSERVER = multiprocessing.get_context("forkserver")
LOADED = [
    "archive.facade",
    "archive.checkpoint",
    "resharding",
    "zarr",
    "s3fs",
    "pandas",
    "pyarrow.parquet",
    "archive.torch",
]


def load_ahead() -> None:
    """Has the server, which starts with the first process,
    load this once: for every process of context "forkserver"."""
    FORKSERVER.set_forkserver_preload(LOADED)


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

"""ALF's own checkpoint files of replay buffers, into an archive and out of one."""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from archive import Archive
from archive.adapters import checkpoint, load_torch, part_of, share_buffer, share_of, states_of
from archive.adapters.alf.buffer import append
from archive.adapters.alf.restored import rebuild, target_saved
from archive.adapters.alf.tensors import SYSTEM, Tensors
from archive.base import IntegrityError, NotFoundError, StorageError, UsageError
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.store import read_file, write_file

PREFIX = "_replay_buffer."
MODULES = ("algorithm", "metrics", "trainer_progress")  # what ALF's trainer gives to its Checkpointer
FILE_NAME = re.compile(r"ckpt-(\d+)-replay_buffer")


def import_checkpoint(
    source: Any,
    arc: Archive,
    *,
    step: int | None = None,
    module: str | None = None,
    buffer: str = MAIN_BUFFER,
    run: str = "main",
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Checkpoint:
    """Archive `ckpt-N-replay_buffer` files of ALF as a checkpoint: one of its ranks, or a list with one for each rank.

    source: path, URL or state dict (of the file, of the algorithm or of the buffer), or a list of these in order of
    ranks. Files are read with `weights_only=True`, so nothing in them is run.  storage_options: for the URLs.
    step: default the N of the file's name, else 0.  module: which part of the file, where several have a buffer.
    options: those of `Writer.checkpoint`.  This begins a session of `run`: a job that writes to that run must be over.
    """
    sources = list(source) if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    if not sources:
        raise UsageError("there is nothing to import: give a path or a state dict, or a list with one for each rank")
    states = [_state_dict(one, storage_options) for one in sources]
    ranks = [Tensors(_buffer_of(one, module, _shown(sources[i], i))) for i, one in enumerate(states)]
    step = _step_of(sources[0]) if step is None else step
    session = f"import-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        writers = [
            stack.enter_context(arc.writer(rank, len(ranks), session=session, run=run)) for rank in range(len(ranks))
        ]
        pending = []
        for w, tensors in zip(writers, ranks, strict=True):
            saved, _ = append(part_of(w, buffer), tensors)
            pending.append(checkpoint(w, step, {buffer: saved}, **options))
        return [p.result() for p in pending][-1]


def export_checkpoint(
    source: Any,
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    buffer: str = MAIN_BUFFER,
    num_envs: int | None = None,
    max_length: int | None = None,
    module: str = MODULES[0],
    unfinished: str = "close",
    storage_options: Mapping[str, Any] | None = None,
) -> str | Path:
    """Write a share, or what `rank` has in a checkpoint, to a file as ALF's Checkpointer saves and loads it.

    path: its `ckpt-N-replay_buffer` beside the `ckpt-N` and `ckpt-N-optimizer` of the model; or a URL.
    num_envs, max_length: of the ring, default those of the plan, else those that were saved.
    module: the name by which the Checkpointer knows the algorithm.
    """
    part = share_buffer(share_of(source, rank), buffer)
    states = states_of(part, SYSTEM)
    target = target_saved([*states.values()], num_envs or part.rules.num_envs, max_length or part.rules.max_length)
    made = rebuild(part, target, unfinished, states)
    if not int(made.named["_current_size"].sum()):
        raise NotFoundError("this share has no steps, so there are no fields to write; plan for fewer ranks")
    content: dict[str, Any] = {name: {} for name in (*MODULES, module)}
    content[module] = {PREFIX + name: tensor for name, tensor in made.named.items()}
    if _is_remote(path):
        file = io.BytesIO()
        torch.save(content, file)
        write_file(path, file.getvalue(), storage_options)
        return str(path)
    return _write(content, Path(path))


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


def _write(content: Any, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        torch.save(content, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _state_dict(source: Any, storage_options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    try:
        file = io.BytesIO(read_file(source, storage_options)) if _is_remote(source) else source
        loaded = load_torch(file)
    except FileNotFoundError as e:
        raise NotFoundError(f"there is no file {str(source)!r}; ALF keeps them in <root>/train/algorithm") from e
    except (StorageError, UsageError):
        raise
    except Exception as e:
        raise IntegrityError(f"{str(source)!r} is no checkpoint that torch loads with weights_only=True: {e}") from e
    if not isinstance(loaded, Mapping):
        raise UsageError(f"{str(source)!r} holds a {type(loaded).__name__}, no state dict of ALF")
    return loaded


def _buffer_of(state: Mapping[str, Any], module: str | None, where: str) -> dict[str, torch.Tensor]:
    """The buffer's tensors by their bare names, of any of the nestings that ALF has."""
    nested = {name: part for name, part in state.items() if isinstance(part, Mapping)}
    found = {name: part for name, part in nested.items() if any(str(key).startswith(PREFIX) for key in part)}
    if module is not None:
        found = {module: nested[module]} if module in nested else {}
    if len(found) > 1 or (nested and not found):
        parts = ", ".join(found or nested)
        raise UsageError(f"{where} has {'several buffers' if found else 'no replay buffer'}: {parts}; give module=")
    flat = next(iter(found.values())) if found else state
    if any(key.startswith(PREFIX) for key in flat):
        flat = {key.removeprefix(PREFIX): value for key, value in flat.items() if key.startswith(PREFIX)}
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UsageError(f"{where} has no tensors of a replay buffer; ALF keeps them in ckpt-N-replay_buffer")
    return tensors


def _shown(source: Any, rank: int) -> str:
    return f"the state dict of rank {rank}" if isinstance(source, Mapping) else repr(str(source))


def _step_of(source: Any) -> int:
    match = None if isinstance(source, Mapping) else FILE_NAME.search(str(source))
    return int(match.group(1)) if match else 0

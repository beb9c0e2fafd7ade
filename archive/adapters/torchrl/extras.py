"""What a replay buffer knows beside storage, writer and samplers: random generator, transforms, prefetched batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from archive.adapters.torchrl.outlines import available, is_collection, made, module_tensordict, own_outline
from archive.adapters.torchrl.parts import Parts, load_state
from archive.adapters.torchrl.places import Placed
from archive.base import UsageError
from archive.fields import trees


def state_of(parts: Parts, queue: Sequence[Any]) -> dict[str, Any]:
    """All of that, for the state.  queue: the batches that are ready."""
    rb = parts.rb
    return {
        "rng": None if rb._rng is None else {"device": str(rb._rng.device), "state": rb._rng.get_state()},
        "transform": dict(rb._transform.state_dict()) if rb._transform is not None else {},
        "batch_size": rb._batch_size,
        "consume_after_n_samples": rb._consume_after_n_samples,
        "prefetch": {"capacity": int(rb._prefetch_cap), "queue": [_plain(batch) for batch in queue]},
        "written": int(getattr(rb, "_prioritized_sampler_write_count", 0)),
    }


def restore(parts: Parts, placed: Placed) -> tuple[int, list[str]]:
    """Give a buffer the rest of its state: how many prefetched batches were dropped, and notes for people."""
    rb, own, known = parts.rb, placed.own("extras"), placed.states("extras")
    if own:
        _restore_rng(rb, own["rng"])
        rb._batch_size, rb._consume_after_n_samples = own["batch_size"], own["consume_after_n_samples"]
        dropped = _restore_queue(rb, own["prefetch"]["queue"])
    else:
        _new_rng(rb, known, placed.given.share.seed, parts.name)
        rb._batch_size = rb._batch_size if rb._batch_size or not known else known[0]["batch_size"]
        dropped = sum(len(s["prefetch"]["queue"]) for s in known)
    notes = _restore_transform(rb, own, known)
    if "prioritized_sampler" in parts.samplers:
        rb._prioritized_sampler_write_count = own.get("written", int(rb.write_count))
    return dropped, notes


def _restore_rng(rb: Any, saved: Any) -> None:
    if saved is None:
        return
    if rb._rng is None or str(rb._rng.device) != saved["device"]:
        rb.set_rng(torch.Generator(device=saved["device"]))
    rb._rng.set_state(saved["state"])


def _new_rng(rb: Any, known: Sequence[Any], seed: int, name: str) -> None:
    """A seed of its own for each buffer on each rank; buffers without a generator keep to the process's."""
    if rb._rng is None and not any(s["rng"] for s in known):
        return
    if rb._rng is None:
        rb.set_rng(torch.Generator())
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rb._rng.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _restore_transform(rb: Any, own: Any, known: Sequence[Any]) -> list[str]:
    state: Any = next((s["transform"] for s in ([own] if own else known)), {})
    if not state:
        return []
    if rb._transform is None or not rb._transform.state_dict():
        return ["the saved transforms have state, this buffer's have none: it is not used"]
    load_state(rb._transform, state)
    if not own and len({_fingerprint(s["transform"]) for s in known}) > 1:
        return ["the transforms of the source ranks differ in state: that of the first rank is used"]
    return []


def _fingerprint(state: Any) -> str:
    skeleton, arrays = trees.flatten(state)
    digest = hashlib.sha256(repr(skeleton).encode())
    for key in sorted(arrays):
        digest.update(arrays[key].tobytes())
    return digest.hexdigest()


# -- prefetched batches -----------------------------------------------------------------------------------------


def _restore_queue(rb: Any, queue: Sequence[Any]) -> int:
    """Put the batches back that were drawn ahead; how many there is no room for."""
    fitting = queue if rb._prefetch and len(queue) <= rb._prefetch_cap else []
    for batch in fitting:
        future: Future[Any] = Future()
        future.set_result(_live(batch))
        rb._prefetch_queue.append(future)
    return len(queue) - len(fitting)


def _plain(value: Any) -> Any:
    """A batch of samples as a state tree; keys in their order."""
    td = module_tensordict()
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor)
        return {"~grad": plain} if value.requires_grad else plain
    if isinstance(value, td.LazyStackedTensorDict):
        return {"~stack": [_plain(v) for v in value.tensordicts], "dim": value.stack_dim}
    if isinstance(value, td.NonTensorStack):
        return {"~nontensor stack": value.tolist()}
    if isinstance(value, td.NonTensorData):
        return {"~nontensor": value.data, "batch_size": list(value.batch_size)}
    if is_collection(value):
        parts = [[str(k), _plain(v)] for k, v in value.items()]
        device = None if value.device is None else str(value.device)
        return {"~td": parts, "outline": json.dumps(own_outline(value)), "device": device}
    if isinstance(value, dict):
        return {"~dict": [(k, _plain(v)) for k, v in value.items()]}
    if type(value) in (list, tuple):
        return {f"~{type(value).__name__}": [_plain(v) for v in value]}
    return value


def _live(value: Any) -> Any:
    """The batch again that `_plain` made a tree of, also of those that earlier versions made."""
    if not isinstance(value, dict):
        return value
    td = module_tensordict()
    what = next((key for key in value if key.startswith("~")), "")
    inner: Any = value.get(what)
    if what == "~grad":
        return inner.requires_grad_()
    if what == "~td" and isinstance(inner, dict):
        return td.TensorDict({k: _live(v) for k, v in inner.items()}, batch_size=value["batch_size"])
    if what == "~td":
        return made({k: _live(v) for k, v in inner}, json.loads(value["outline"]), device=available(value["device"]))
    if what == "~stack":
        return td.LazyStackedTensorDict(*map(_live, inner), stack_dim=value["dim"])
    if what == "~nontensor":
        return td.NonTensorData(inner, batch_size=value["batch_size"])
    if what == "~nontensor stack":
        return td.NonTensorStack(*inner)
    if what == "~dict":
        return {k: _live(v) for k, v in inner}
    if what in ("~list", "~tuple"):
        return (list if what == "~list" else tuple)(_live(v) for v in inner)
    raise UsageError(f"a prefetched batch holds {what!r}, which this version does not know")

"""What live buffers of other systems left in an archive, and videos: seeds, other ones, what makes values of them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from archive.base import CorruptStateError, records
from archive.fields import Ragged
from archive.fields.state import trees
from tests.support.fuzzing.mutating import mutated_bytes, mutated_json

WHERE = "sample 'a'"


# -- TransferQueue -----------------------------------------------------------------------------------------------------


def sample_seeds(tmp: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    import torch

    from archive.adapters.transferqueue import samples

    values = {"t": torch.ones(2, 3), "one": torch.tensor(1.5), "text": "a", "tree": {"a": [1, np.arange(3)], "b": None}}
    found = [samples.encode(i, one, where=WHERE) for i, one in enumerate((values, {"x": torch.arange(3)}, {}))]
    return [(_as_read(one.fields), one.metadata) for one in found]


def _as_read(value: Any) -> Any:
    """A sample's fields as an episode gives them back."""
    if isinstance(value, dict):
        return {key: _as_read(one) for key, one in value.items()}
    return [value.values] if isinstance(value, Ragged) else value


def mutated_sample(seed: tuple[dict[str, Any], dict[str, Any]], rng: Random) -> tuple[dict[str, Any], str]:
    """Other metadata, and fields that are gone, other ones', or trees of something else."""
    fields, metadata = seed
    fields = dict(fields)
    if fields and rng.random() < 0.6:
        name = rng.choice(sorted(fields))
        other = [np.zeros(0), np.arange(3), "x", None, [], {}, ["[]"], [json.loads("[1, {}]")], *fields.values()]
        fields[name] = rng.choice(other)
    return fields, mutated_json(metadata, rng) if rng.random() < 0.7 else json.dumps(metadata)


def read_sample(given: tuple[dict[str, Any], str]) -> None:
    from archive.adapters.transferqueue import samples

    metadata = records.parse_object(given[1], what="metadata", error=CorruptStateError)
    samples.decode(given[0], metadata, where=WHERE)


def controller_seeds(tmp: Path) -> list[Any]:
    fields = {"f": {"dtype": "float32", "shape": [2], "is_nested": False, "is_non_tensor": False}}
    numbers = {"global_indexes": np.arange(2), "shaped": np.arange(2), "dimensions": np.ones(2, np.int64),
               "sizes": np.full(2, 2), "tuples": np.ones(2, bool)}  # fmt: skip
    partition = {
        "created_at": 0.0, "production_status": np.ones((2, 1)), "consumption_status": {},
        "field_name_mapping": {"f": 0}, "field_custom_backend_meta": {}, "global_indexes": np.arange(2),
        "keyed": np.arange(1), "pre_allocated_global_indexes": np.zeros(0, np.int64),
        "field_metadata": {"f": fields["f"] | numbers},
    }  # fmt: skip
    manager = {
        "partition_to_indexes": {"p": np.arange(2)}, "reusable_indexes": np.arange(1), "global_index_counter": 2,
        "allocated_indexes": np.arange(2),
    }  # fmt: skip
    tree = {
        "system": "transferqueue", "format": 1, "storage_saved": True, "sampler_class": "S", "sampler": {},
        "partitions": {"p": partition}, "index_manager": manager,
    }  # fmt: skip
    return [trees.flatten(tree)]


def read_controller(given: tuple[str, dict[str, Any]]) -> None:
    from archive.adapters.transferqueue import controller

    skeleton = records.parse(given[0], what="x", error=CorruptStateError)
    controller.check_tree(trees.unflatten(skeleton, given[1]), where="x")


# -- videos ------------------------------------------------------------------------------------------------------------


def packet_seeds(tmp: Path) -> list[list[bytes]]:
    from archive.adapters import video

    pictures = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3), np.uint8)
    return [[packet.tobytes() for packet in video.encode(pictures, every=every)] for every in (1, 4)]


def mutated_packets(seed: list[bytes], rng: Random) -> list[bytes]:
    packets = list(seed)
    at = rng.randrange(len(packets))
    match rng.randrange(4):
        case 0:
            del packets[at]
        case 1:
            packets[at:at] = [rng.choice((b"", b"\0\0\1\x65", packets[-1], bytes(100)))]
        case _:
            packets[at] = mutated_bytes(packets[at], rng)
    return packets


def read_packets(packets: list[bytes]) -> None:
    from archive.adapters import video

    given = [np.frombuffer(packet, np.uint8) for packet in packets]
    video.decode(given)

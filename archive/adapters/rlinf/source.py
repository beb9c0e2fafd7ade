"""RLinf's replay buffer folders on any fsspec filesystem: which there are, and what their indexes list."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from archive.adapters.rlinf.folder import METADATA, Folder
from archive.adapters.rlinf.numbers import SYSTEM
from archive.adapters.rlinf.trajectory import weights_of
from archive.base import IntegrityError, MissingObjectError, NotFoundError, UsageError
from archive.store import Storage

INDEXES = ("trajectory_index.json", "trajector_index.json")  # the second as RLinf's merge tool writes it, too
_RANK = re.compile(r"rank_(\d{1,9})/")
_FILE = re.compile(r"trajectory_(?P<id>\d{1,18})_(?P<weights>.*)\.(?P<format>pt|pkl)")
_LISTED = 50


def folders(storage: Storage) -> dict[int, Folder]:
    """Rank -> folder: of `rank_*` below the root, or the root itself as rank 0.
    Nothing of their trajectories is read."""
    names = storage.list("")
    if METADATA in names or any(index in names for index in INDEXES):
        return {0: _folder(storage, "")}
    ranks = {int(found[1]): found[0] for name in names if (found := _RANK.fullmatch(name))}
    if not ranks:
        raise NotFoundError(
            f"{storage.url} is no replay buffer of RLinf: it has neither {METADATA} nor rank_* folders. Give the "
            "folder that holds them, such as .../sac_components/replay_buffer"
        )
    out = {
        rank: _folder(storage, ranks[rank]) if rank in ranks else Folder(storage, "") for rank in range(max(ranks) + 1)
    }
    for rank in sorted(out.keys() - ranks.keys()):
        out[rank].note(f"rank_{rank}", "missing", "folders of higher ranks are there; its trajectories are not")
    return out


def check_pickle(found: Mapping[int, Folder], allow_pickle: bool) -> None:
    """Refuse pickled trajectories unless the caller trusts whoever wrote them."""
    pickled = [f.url(name) for f in found.values() for name in f.files.values() if name.endswith(".pkl")]
    if pickled and not allow_pickle:
        raise UsageError(
            f"{pickled[0]} and {len(pickled) - 1} more are pickle files, and loading those may run code that is in "
            "them: give allow_pickle=True only if you trust everybody who could write them, or save the buffer in the "
            "format 'pt'"
        )


def refuse(found: Mapping[int, Folder]) -> None:
    """Raise an error that lists what is wrong, if anything is."""
    wrong = [p for folder in found.values() for p in folder.problems if p.kind not in ("unlisted", "outlived")]
    if not wrong:
        return
    lines = [f"- {p}" for p in wrong[:_LISTED]]
    if len(wrong) > _LISTED:
        lines.append(f"- and {len(wrong) - _LISTED} more")
    what = "the source is not whole, so nothing was imported; import what is with on_missing='skip':"
    text = "\n".join([what, *lines])
    raise MissingObjectError(text) if all(p.kind == "missing" for p in wrong) else IntegrityError(text)


def largest_update(found: Mapping[int, Folder]) -> int:
    """The largest update count of all trajectories; 0 if none has one."""
    entries = [entry for folder in found.values() for entry in folder.entries.values()]
    return max((weights_of(e["model_weights_id"])[1] or 0 for e in entries if e), default=0)


def state_of_folder(folder: Folder, *, split: bool) -> dict[str, Any]:
    """What a rank's state says of the folder that it was imported from."""
    counter = folder.metadata.get("trajectory_counter", 0)
    numbers = list(folder.entries)
    return {
        "system": SYSTEM, "seed": folder.metadata.get("seed"), "trajectory_format": folder.format,
        "counter": max(counter if isinstance(counter, int) else 0, max(numbers, default=-1) + 1),
        "ids": np.array(numbers, np.int64), "listed": np.array([], np.int64) if split else np.array(numbers, np.int64),
        "folder": folder.prefix.rstrip("/"), "problems": [list(p) for p in folder.problems], "split": split,
    }  # fmt: skip


def _folder(storage: Storage, prefix: str) -> Folder:
    out = Folder(storage, prefix)
    names = storage.list(prefix)
    out.metadata = _json(out, METADATA, names) or {}
    index = next((n for n in INDEXES if n in names), INDEXES[0])
    body = _json(out, index, names)
    found = {name: match for name in names if (match := _FILE.fullmatch(name))}
    if body is None:
        out.entries = dict.fromkeys(sorted(int(m["id"]) for m in found.values()))
    else:
        out.entries = _entries(out, index, body)
    lacking = [wanted for number, entry in out.entries.items() if (wanted := _find_file(out, number, entry, found))]
    if lacking and out.files and not out.files.keys() & set(list(out.entries)[: len(lacking)]):
        gone = f"its {len(lacking)} oldest trajectories of {len(out.entries)}"
        why = f"{gone} have no files: RLinf saves its last window only"
        out.note(index, "outlived", why)
    else:
        for name, number in lacking:
            out.note(name, "missing", f"the index lists trajectory {number}")
    for name in sorted(found.keys() - set(out.files.values())):
        out.note(name, "unlisted", f"{index} does not list it")
    out.finish()
    return out


def _json(folder: Folder, name: str, names: Sequence[str]) -> dict[str, Any] | None:
    if name not in names:
        folder.note(name, "missing", "it is not there")
        return None
    data = folder.storage.get(folder.prefix + name)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        folder.note(name, "damaged", f"{len(data)} bytes are no JSON ({e})")
        return None
    if not isinstance(value, dict):
        folder.note(name, "damaged", "it holds no JSON object")
    return value if isinstance(value, dict) else None


def _entries(folder: Folder, name: str, body: Mapping[str, Any]) -> dict[int, dict[str, Any] | None]:
    """The index entry of each trajectory in the list's order; those that are not well formed are noted."""
    try:
        entries = {int(key): dict(value) for key, value in body["trajectory_index"].items()}
        numbers = [int(number) for number in body["trajectory_id_list"]]
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        folder.note(name, "damaged", f"it has no trajectory_index and trajectory_id_list as RLinf writes them ({e!r})")
        return {}
    out: dict[int, dict[str, Any] | None] = {}
    for number in numbers:
        if number not in entries or number in out:
            how = "twice" if number in out else "in trajectory_id_list only"
            folder.note(name, "disagrees", f"it lists trajectory {number} {how}")
        elif not _well_formed(entries[number]):
            folder.note(name, "damaged", f"its entry of trajectory {number} lacks a field, or has one of another type")
        else:
            out[number] = entries[number]
    for number in sorted(entries.keys() - set(numbers)):
        folder.note(name, "disagrees", f"trajectory {number} is not in its trajectory_id_list")
    return out


def _well_formed(entry: Mapping[str, Any]) -> bool:
    kinds = {"num_samples": int, "max_episode_length": int, "shape": list, "model_weights_id": str}
    return all(isinstance(entry.get(key), kind) for key, kind in kinds.items())


def _find_file(
    folder: Folder, number: int, entry: Mapping[str, Any] | None, found: Mapping[str, re.Match[str]]
) -> tuple[str, int] | None:
    """Find the file of the index's name, else the one of that number, as RLinf's own tool does; what is lacking."""
    exact = f"trajectory_{number}_{entry['model_weights_id']}.{folder.format}" if entry is not None else ""
    alike = sorted(name for name, match in found.items() if int(match["id"]) == number)
    if exact in found or alike:
        folder.files[number] = exact if exact in found else alike[0]
        return None
    return exact or f"trajectory_{number}_*", number

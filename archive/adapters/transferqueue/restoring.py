"""A checkpoint into the running TransferQueue: all of it is looked at before anything of the system is touched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import archive
from archive.adapters import planned, reading, saved_share, share_buffer
from archive.adapters.transferqueue import controller, live, samples
from archive.adapters.transferqueue.controller import Cut, Sample
from archive.adapters.transferqueue.live import Live, Sampled
from archive.base import CorruptStateError, NothingThereError, UsageError
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.log import DEFAULT_RUN

if TYPE_CHECKING:
    from archive import Archive
    from archive.checkpoint import Checkpoints

__all__ = ["load_checkpoint"]

AT_ONCE = 256  # samples that are put in one request
MAX_NAMED = 10


def load_checkpoint(
    where: Any,
    *,
    step: int | None = None,
    run: str | None = None,
    buffer: str = MAIN_BUFFER,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Make the running TransferQueue what it was at a checkpoint, on any number of storage units.

    where: a URL, path or Archive, for the newest checkpoint of the run (default "main"), or the newest of that step; a
    Checkpoint; a Share of a plan for one rank. Returns the checkpoint; its `progress` is what was saved as metadata.
    What the system holds is replaced, keys, tags, consumption and sampler included. Samples go to the units that its
    storage manager puts them into, and are handed out to nobody before all are there: the controller is switched over
    last, at once. Nothing is touched before the checkpoint was found to be whole and to fit; if the system holds
    samples, all of it is read first, which takes as much memory.
    Not atomic in TransferQueue: units have no transaction, so samples that the system held are gone if putting the new
    ones fails; it is then left empty. Nobody else may put samples or clear them meanwhile.
    """
    system = live.connect()
    source = _source(_share(where, step, run, storage_options), buffer)
    now = system.cut()
    _check_sampler(source.tree, now)
    if source.tree["storage_saved"]:
        system.check_room(list(source.samples))
    rows: Any = source.rows()
    if now.partitions:
        rows = list(rows)
    bound = max(now.bound, source.tree["index_manager"]["global_index_counter"])
    system.clear(now, bound)
    try:
        system.begin()
        told = _put(system, rows)
        system.switch(_state(source, told, system))
    except BaseException:
        system.abandon(bound)
        raise
    return source.checkpoint


@dataclass(frozen=True)
class _Source:
    """A checkpoint whose tables were found to agree."""

    checkpoint: Checkpoint
    part: Any  # the share's buffer
    tree: Mapping[str, Any]
    samples: Mapping[int, Sample]
    tags: Mapping[int, Any]

    def rows(self) -> Iterator[tuple[Sample, dict[str, Any]]]:
        """Each sample with its values, in order."""
        index = self.part.attributes.get("index", {})
        for episode, fields in self.part.stream():
            sample = self.samples[index[episode.id]]
            yield sample, samples.decode(fields, episode.metadata, where=sample.name)


def _source(share: Any, buffer: str) -> _Source:
    part, checkpoint = share_buffer(share, buffer), share.plan.checkpoint
    name = f"buffer {buffer!r} of checkpoint {checkpoint.name!r}"
    trees = [state for state in part.source_states.values() if isinstance(state, dict) and "system" in state]
    if len(trees) > 1:
        raise UsageError(f"{name}: {len(trees)} ranks saved a TransferQueue in it, where one is expected")
    tree = controller.check_tree(trees[0] if trees else None, where=name)
    found = {sample.index: sample for sample in _samples(part)}
    _check_whole(tree, found, name)
    tags = part.attributes.get("tag", {})
    index = part.attributes.get("index", {})
    return _Source(checkpoint, part, tree, found, {index[one]: tag for one, tag in tags.items()})


def _share(where: Any, step: int | None, run: str | None, storage_options: Mapping[str, Any] | None) -> Any:
    if step is not None and (isinstance(where, Checkpoint) or hasattr(where, "plan")):
        raise UsageError(f"step={step}: a checkpoint, or a share of one, is of its own step; give the archive instead")
    if isinstance(where, Checkpoint):
        return _as_saved(where)
    if hasattr(where, "plan"):
        return saved_share(where)
    if hasattr(where, "add_episode"):
        raise UsageError(
            "a Writer is what is saved to; load from its archive, or from the checkpoint that was returned"
        )
    arc = where.refresh() if hasattr(where, "checkpoints") else archive.open(where, storage_options=storage_options)
    runs = arc.checkpoints.of(run or DEFAULT_RUN)
    found = _newest(arc, run or DEFAULT_RUN) if step is None else _of_step(runs, step)
    if found is None:
        saved = ", ".join(map(str, dict.fromkeys(runs.table["step"].to_pylist()[-MAX_NAMED:]))) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise NothingThereError(
            f"{arc.url} has no whole checkpoint{wanted} of run {run or DEFAULT_RUN!r}; the newest steps are: {saved}"
        )
    return _as_saved(found)


def _of_step(runs: Checkpoints, step: int) -> Checkpoint | None:
    """The newest of that step, by the rules of `_newest`."""
    rows = runs.table.select(["step", "whole", "replay_saved"]).to_pylist()
    places = [i for i, row in enumerate(rows) if row["step"] == step and row["whole"] and row["replay_saved"]]
    return next((ck for ck in map(runs.__getitem__, reversed(places)) if ck.record.recovered is None), None)


def _newest(arc: Archive, run: str) -> Checkpoint | None:
    """The newest that was saved. One that was recovered from a journal may have half of what a later save added and
    took out, which the controller's state knows nothing of."""
    found = arc.checkpoints.of(run).newest(replay=True)
    while found is not None and (recovered := found.record.recovered) is not None:
        found = None if recovered.base is None else arc.checkpoints.at_commit(recovered.base)
    return found


def _as_saved(checkpoint: Checkpoint) -> Any:
    return planned(checkpoint, world_size=1, tails="ignore").share(0).as_saved()


def _samples(part: Any) -> Iterator[Sample]:
    """The samples of a buffer, without the names of their fields."""
    found: Mapping[str, Mapping[str, Any]] = part.attributes
    keys, partitions = found.get("key", {}), found.get("partition", {})
    for episode_id, index in found.get("index", {}).items():
        yield Sample(index, partitions[episode_id], 0.0, keys.get(episode_id), ())


def _check_whole(tree: Mapping[str, Any], found: Mapping[int, Sample], where: str) -> None:
    """Refuse a checkpoint whose controller and samples do not speak of the same."""
    expected = controller.expected(tree)
    if lacking := sorted(expected.keys() - found.keys()):
        raise CorruptStateError(f"{where}: samples {lacking[:5]} of {len(expected)} are not in it: load another one")
    if strange := [i for i, partition in expected.items() if found[i].partition != partition]:
        raise CorruptStateError(f"{where}: samples {strange[:5]} are in two partitions: load another one")


def _check_sampler(tree: Mapping[str, Any], now: Cut) -> None:
    """Refuse the state of a sampler that keeps other things than the running one."""
    if tree["sampler"].keys() != now.sampler.keys():
        raise UsageError(
            f"the checkpoint has the state of a {tree['sampler_class']} ({', '.join(tree['sampler'])}), the running "
            f"sampler is a {now.sampler_class} ({', '.join(now.sampler)}): start TransferQueue with the one that was "
            "saved"
        )


def _put(system: Live, rows: Iterator[tuple[Sample, dict[str, Any]]]) -> dict[int, Any]:
    """Put all samples; what the store says of each."""
    told: dict[int, Any] = {}
    rows = iter(rows)
    while some := list(itertools.islice(rows, AT_ONCE)):
        alike: dict[tuple[str, ...], Sampled] = {}
        for sample, values in some:
            alike.setdefault(tuple(values), []).append((sample, values))
        for names, group in alike.items():
            told |= system.put(group) if names else {}
    return told


def _state(source: _Source, told: Mapping[int, Any], system: Live) -> dict[str, Any]:
    """What the controller loads."""
    keys = {index: sample.key for index, sample in source.samples.items() if sample.key is not None}
    tags, said = _by_partition(source, source.tags), _by_partition(source, told)
    partitions = {}
    for name, tree in source.tree["partitions"].items():
        with reading(f"partition {name!r} of checkpoint {source.checkpoint.name!r}", "state of a TransferQueue"):
            partitions[name] = controller.partition_of(name, tree, keys, tags.get(name, {}), system.classes)
        partitions[name].field_custom_backend_meta.update(said.get(name, {}))
    return {
        "partitions": partitions,
        "index_manager": controller.manager_of(source.tree),
        "sampler": source.tree["sampler"],
    }


def _by_partition(source: _Source, values: Mapping[int, Any]) -> dict[str, dict[int, Any]]:
    """Partition -> global index -> value."""
    out: dict[str, dict[int, Any]] = {}
    for index, value in values.items():
        out.setdefault(source.samples[index].partition, {})[index] = value
    return out

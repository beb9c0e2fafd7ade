"""An archive that a buffer's trajectories lie in: single transitions of many, and whole trajectories, read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from archive.adapters.rlinf.buffer import flatten
from archive.adapters.rlinf.buffer.flatten import Part, Rows
from archive.adapters.rlinf.buffer.kinds import Kind, kinds_of, tree_of
from archive.adapters.rlinf.buffer.numbering import metadata_of
from archive.arrays import Ints
from archive.base import NotFoundError, at_once, forking
from archive.read import Episodes

MAX_GENERATIONS = 8  # then all is looked up anew, and chunks that were held are read again
MAX_WHOLE_TRANSITIONS = 1_000_000  # whose fields of no single step are kept in memory


class ArchiveHome:
    """Reads trajectories of one archive. Safe for several threads, which take turns.

    episodes: gives the archive's episodes as they are now.  cache_bytes: of chunks that are kept in memory.
    disk_cache: as Gather takes it.
    """

    def __init__(self, episodes: Callable[[], Episodes], *, cache_bytes: int = 2**28, disk_cache: Any = None) -> None:
        self._episodes = episodes
        self._cache_bytes = cache_bytes
        self._disk_cache = disk_cache
        self._lock = forking.lock(self)
        self._expecting = forking.lock(self, "_expecting")
        self._expected: dict[str, None] = {}
        self._generations: list[Known] = []

    def expect(self, names: Iterable[str]) -> None:
        """These episodes are committed, and may be asked for."""
        with self._expecting:
            self._expected.update(dict.fromkeys(names))

    def take(self, names: Sequence[str], which: torch.Tensor, step: torch.Tensor, env: torch.Tensor) -> list[Part]:
        """Transition (step[i], env[i]) of the episode names[which[i]], for each i; in parts of the same fields."""
        with self._lock:
            self._know(names)
            found = [self._found(name) for name in names]
            generation, number = np.array(found, np.int64).T
            chosen = which.numpy()
            jobs = []
            for g in np.unique(generation[chosen]).tolist():
                places = np.flatnonzero(generation[chosen] == g)
                jobs += self._generations[g].jobs(places, number[chosen[places]], step, env)
            return at_once(lambda job: job(), jobs, len(jobs))

    def trees(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """These trajectories, whole, in order; read ahead in bounded memory."""
        with self._lock:
            found = self._episodes().filter(episode_id=list(names))
        place = _places(found)
        _check_found(names, place, found)
        for episode, data in found.pick(np.array([place[name] for name in names], np.int64)).stream():
            yield tree_of(data, episode.metadata)

    def close(self) -> None:
        """Drop what is held in memory."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        for known in self._generations:
            known.close()
        self._generations = []

    def _found(self, name: str) -> tuple[int, int]:
        """Which generation knows an episode, and its number there."""
        g = next(g for g, known in enumerate(self._generations) if name in known.place)
        return g, self._generations[g].place[name]

    def _know(self, names: Sequence[str]) -> None:
        """Look up what no generation knows yet, and all that is expected besides."""
        if all(any(name in known.place for known in self._generations) for name in names):
            return
        self.expect(names)
        if len(self._generations) >= MAX_GENERATIONS:
            self._drop()
        with self._expecting:
            expected = list(self._expected)
        new = [n for n in expected if not any(n in known.place for known in self._generations)]
        share = self._cache_bytes // (2 * MAX_GENERATIONS if self._generations else 2)
        found = self._episodes().filter(episode_id=new)
        self._generations.append(Known(found, share, self._disk_cache))
        _check_found(names, {n for known in self._generations for n in known.place}, found)


def _places(episodes: Episodes) -> dict[str, int]:
    return {name: i for i, name in enumerate(episodes.table["episode_id"].to_pylist())}


def _check_found(names: Iterable[str], have: Any, episodes: Episodes) -> None:
    lost = [name for name in names if name not in have]
    if lost:
        raise NotFoundError(f"episode {lost[0]!r} is not there any more, in {episodes!r}; run `archive verify`")


class Known:
    """Some episodes as trajectories: where each is, of which kind, and what is in memory of them."""

    def __init__(self, episodes: Episodes, cache_bytes: int, disk_cache: Any) -> None:
        self._episodes = episodes
        self._lengths = episodes.lengths()
        self.place = _places(episodes)
        envs = np.array([int(about.get("B", 0)) for about in metadata_of(episodes)], np.int64)
        self._kinds, self._kind, self._within = kinds_of(episodes, envs, cache_bytes, disk_cache)
        self._whole: dict[int, Rows] = {}
        self._whole_size = 0

    def close(self) -> None:
        for kind in self._kinds:
            kind.close()

    def jobs(self, places: Ints, numbers: Ints, step: torch.Tensor, env: torch.Tensor) -> list[Callable[[], Part]]:
        """What has to be done to read these transitions, by kind."""
        out = []
        for kind in np.unique(self._kind[numbers]).tolist():
            mine = self._kind[numbers] == kind
            at = torch.from_numpy(places[mine])
            out.append(self._job(self._kinds[kind], numbers[mine], at, step[at], env[at]))
        return out

    def _job(
        self, kind: Kind, numbers: Ints, places: torch.Tensor, step: torch.Tensor, env: torch.Tensor
    ) -> Callable[[], Part]:
        def read() -> Part:
            rows = kind.take(self._within[numbers], step, env)
            return places, rows | self._of_whole(kind, numbers, step, env)

        return read

    def _of_whole(self, kind: Kind, numbers: Ints, step: torch.Tensor, env: torch.Tensor) -> Rows:
        """Fields that are kept whole, done flags with extra rows say: read once, and then in memory."""
        if not kind.whole or not kind.envs:
            return {}
        distinct, place = np.unique(numbers, return_inverse=True)
        found = self._wholes(distinct.tolist(), kind)
        parts: list[Part] = []
        for i, number in enumerate(distinct.tolist()):
            at = torch.from_numpy(np.flatnonzero(place == i))
            row = step[at] * kind.envs + env[at]
            parts.append((at, {path: rows[row] for path, rows in found[number].items()}))
        return flatten.joined(parts, len(numbers), "skip")

    def _wholes(self, numbers: Sequence[int], kind: Kind) -> dict[int, Rows]:
        lacking = [n for n in numbers if n not in self._whole]
        if lacking:
            if self._whole_size > MAX_WHOLE_TRANSITIONS:
                self._whole, self._whole_size = {}, 0
                lacking = list(numbers)
            read = self._episodes[np.array(lacking, np.int64)].read(kind.whole)
            for number, data in zip(lacking, read, strict=True):
                steps = int(self._lengths[number])
                tree = tree_of(data, {"B": kind.envs})
                rows = flatten.flatten(tree, steps, kind.envs).rows
                self._whole[number] = {path: value.clone() for path, value in rows.items()}
                self._whole_size += steps * kind.envs
        return {n: self._whole[n] for n in numbers}

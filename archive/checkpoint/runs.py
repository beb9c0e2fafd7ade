"""The runs of an archive: what each is, its checkpoints and episodes, and several of them side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from archive.base import NotFoundError, cached_property, one_line
from archive.checkpoint.checkpointlist import Checkpoints
from archive.checkpoint.checkpoints import Checkpoint
from archive.ledger import LedgerView, names, of_run
from archive.manifest import Commit, EpisodeIndex, Mark, RunEntry
from archive.read import Episodes
from archive.views import plots, reports


class Run:
    """A line of checkpoints, and the episodes that its sessions wrote. As of the commit that the archive shows."""

    def __init__(self, name: str, entry: RunEntry | None, checkpoints: Checkpoints, episodes: Episodes) -> None:
        """entry: what the commit says of it; None if its episodes came along from another archive."""
        self.name = name
        self._entry = entry
        self._every = checkpoints
        self._written = episodes

    @property
    def sessions(self) -> list[str]:
        """The starts of its job that are known by name (the newest hundred and one), newest last."""
        return [] if self._entry is None else list(self._entry.sessions)

    @property
    def checkpoints(self) -> Checkpoints:
        return self._every.of(self.name)

    @property
    def newest(self) -> Checkpoint | None:
        """Its newest whole checkpoint; None if it has none."""
        return self.checkpoints.latest

    @property
    def archived(self) -> Episodes:
        """All episodes of the archive, which those that it went on with are among."""
        return self._written

    @property
    def ledgers(self) -> list[str]:
        """The names of the ledgers of prompts in the archive."""
        return names(self._every._storage, self._every._head)

    def ledger(self, name: str) -> LedgerView:
        """What has become of prompts, as its newest session sees it."""
        return of_run(self._every._storage, self._every._head, name, self.name)

    @cached_property
    def episodes(self) -> Episodes:
        """The episodes of which it wrote the newest steps. Reads no data."""
        return self._written.filter(run=self.name)

    @property
    def commits(self) -> list[int]:
        """The numbers of the commits that brought its episodes and checkpoints, oldest first."""
        mine = {*self.episodes.table["commit"].to_pylist(), *self.checkpoints.table["commit"].to_pylist()}
        return sorted(n for n in mine if n is not None)

    @property
    def forked_from(self) -> dict[str, Any] | None:
        """The run, name and commit of the checkpoint at which it began; None if it began anew."""
        origin = None if self._entry is None else self._entry.forked_from
        return None if origin is None else origin.to_json()

    @property
    def _latest(self) -> Mark | None:
        return None if self._entry is None else self._entry.latest

    @property
    def about(self) -> dict[str, Any]:
        """What is known of it, for people and as JSON. Reads no checkpoint and no data."""
        newest, origin, found = self._latest, self.forked_from, self.episodes.table
        return {
            "run": self.name, "newest_checkpoint": newest and newest.name, "step": newest and newest.step,
            "commit": newest and newest.commit, "checkpoints": len(self.checkpoints), "episodes": found.num_rows,
            "steps": int(found["length"].to_numpy().sum()), "sessions": len(self.sessions),
            "forked_from": origin and f"{origin['name']} of {origin['run']}",
        }  # fmt: skip

    def plot(self, ax: Any = None, label: str | None = None) -> Any:
        """As `episodes.plot`, labelled with its name."""
        return self.episodes.plot(ax, self.name if label is None else label)

    def _repr_html_(self) -> str:
        return reports.runs("Run", [self.about], self.episodes.table, self.episodes.fields).notebook()

    def __repr__(self) -> str:
        newest = self._latest
        began = f", from {self.forked_from['name']!r} of {self.forked_from['run']!r}" if self.forked_from else ""
        return f"<Run {self.name!r}: newest {newest.name if newest else None!r}{began}>"


class Runs(Mapping[str, Run]):
    """The runs of an archive by name, in the order of their first commits; and several of them side by side."""

    def __init__(
        self, url: str, head: Commit, index: EpisodeIndex, episodes: Episodes, checkpoints: Checkpoints
    ) -> None:  # fmt: skip
        self._url = url
        self._head = head
        self._index = index
        self._episodes = episodes
        self._checkpoints = checkpoints

    @cached_property
    def _names(self) -> list[str]:
        """Those that a commit names, and those whose episodes came along from another archive."""
        written = self._index.column("run").unique().to_pylist()
        return list(dict.fromkeys([*self._head.runs, *sorted(n for n in written if n is not None)]))

    def __getitem__(self, name: str) -> Run:
        if name not in self._names:
            known = ", ".join(map(repr, self._names)) or "none"
            raise NotFoundError(f"there is no run {name!r} at {self._url}; its runs: {known}")
        return Run(name, self._head.runs.get(name), self._checkpoints, self._episodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except NotFoundError:
            return default

    def plot(self, *names: str, ax: Any = None) -> Any:
        """Draw the returns and lengths of these runs (default: all) in one figure; Matplotlib's two Axes.
        Reads no data."""
        axes = ax
        for name in names or self._names:
            axes = self[name].plot(axes)
        return plots.episodes(self._episodes[:0].table) if axes is None else axes

    def to_html(self, *names: str) -> str:
        """A page of these runs (default: all) side by side: checkpoints, returns in one picture, a row an episode."""
        chosen = [self[name] for name in names or self._names]
        found = self._episodes.filter(run=[run.name for run in chosen])
        saved = [row for row in self._checkpoints.table.to_pylist() if row["run"] in {r.name for r in chosen}]
        title = " and ".join(run.name for run in chosen[:8]) or "no runs"
        about = {"url": self._url, "commit": self._head.number}
        return reports.archive(title, about, [run.about for run in chosen], saved, found.table, found.fields).page()

    @property
    def about(self) -> list[dict[str, Any]]:
        """What is known of each, for people and as JSON."""
        return [run.about for run in self.values()]

    def _repr_html_(self) -> str:
        every = self._episodes
        return reports.runs("Runs", self.about, every.table, every.fields).notebook()

    def __repr__(self) -> str:
        return one_line(f"<{len(self)} runs at {self._url}: {', '.join(self._names)}>")

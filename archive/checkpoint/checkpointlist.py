"""The checkpoints of an archive or of one of its runs: by place, by name, the newest, those that a policy retains; and
its runs, also several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from archive.base import MissingObjectError, NotFoundError, UsageError, cached_property, one_line
from archive.checkpoint.checkpoints import Checkpoint
from archive.checkpoint.retention import Keep, candidates, read_clock
from archive.index import Annotations
from archive.ledger import LedgerView, names, of_run
from archive.log import Commit, Mark, read_of, tablefiles
from archive.read import Episodes
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NAMED = 10  # runs that a message names
_PLACE = ["commit", "manifest"]  # the columns that find a checkpoint


class Latest(Checkpoint):
    """The newest whole checkpoint, as `arc.checkpoints.latest` gives it. It alone can be called,
    for one with its buffers."""

    def __init__(self, found: Checkpoint, among: Checkpoints) -> None:
        """among: the checkpoints of its run."""
        super().__init__(found._storage, found.commit, found.served_by, found.annotations)
        self._among = among

    def __call__(self, *, replay: bool = False) -> Latest | None:
        """This one or, with replay=True where it was saved without its buffers, the newest whole one that has them."""
        if not replay or self.replay_saved:
            return self
        found = self._among.newest(replay=True)
        return None if found is None else Latest(found, self._among)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_among": self._among}


class Checkpoints:
    """The checkpoints of an archive, oldest first."""

    def __init__(
        self, storage: Storage, head: Commit, run: str | None = None, annotations: Annotations | None = None
    ) -> None:
        """annotations: labels and derived columns of the live episodes; None: as of `head`."""
        self._storage = storage
        self._head = head
        self._run = run
        self._annotations = Annotations(storage, head) if annotations is None else annotations

    @cached_property
    def table(self) -> pa.Table:
        """One row for each checkpoint: commit, run, session, name, step, world_size, whole, replay_saved,
        metrics, created_at."""
        import pyarrow.compute as pc

        table = tablefiles.load(self._storage, "checkpoints", self._head.files("checkpoints"))
        return table if self._run is None else table.filter(pc.equal(table["run"].cast("string"), self._run))

    def of(self, run: str) -> Checkpoints:
        """The checkpoints of one run."""
        return Checkpoints(self._storage, self._head, run, self._annotations)

    @property
    def latest(self) -> Latest | None:
        """The newest whole one; None if there is none, UsageError if several runs have one: ask `.of(run)` then.

        `latest(replay=True)` is the newest whole one that has its buffers.
        """
        found = self.newest()
        return None if found is None else Latest(found, self.of(found.run))

    def newest(self, *, run: str | None = None, replay: bool = False) -> Checkpoint | None:
        """The newest whole one (of a run; with replay=True, one that has the buffers); as `latest` otherwise."""
        run = self._run if run is None else run
        names = self._head.runs if run is None else [run] if run in self._head.runs else []
        runs = {name: self._head.runs[name] for name in names if self._head.runs[name].latest is not None}
        if len(runs) > 1:
            newest = {name: f"{e.latest.name!r} (commit {e.latest.commit})" for name, e in runs.items() if e.latest}
            raise self._ambiguous("there is no newest checkpoint of all", newest)
        mark = next((e.latest_replay if replay else e.latest for e in runs.values()), None)
        return None if mark is None else self.at_commit(mark.commit, mark.manifest)

    def at_commit(self, number: int, manifest: int | None = None) -> Checkpoint:
        """The checkpoint of a commit. manifest: number of the commit whose tables serve its steps; None: its own."""
        served_by = None if manifest is None else self._commit(manifest)
        return Checkpoint(self._storage, self._commit(number), served_by, self._annotations)

    def _commit(self, number: int) -> Commit:
        try:
            return read_of(self._storage, number, self._head)
        except MissingObjectError as e:
            raise NotFoundError(f"commit {number}, which a checkpoint needs, is gone from {self._storage.url}") from e

    def _ambiguous(self, what: str, runs: Mapping[str, str]) -> UsageError:
        """The error for several runs in an archive, without one that is meant more than the others."""
        some = [f"run {name!r} has {newest}" for name, newest in list(runs.items())[-MAX_NAMED:]]
        more = len(runs) - len(some)
        return UsageError(
            f"{self._storage.url} has checkpoints of {len(runs)} runs, and {what}: {'; '.join(some)}"
            f"{f'; and {more} more' if more else ''}. Say which run: arc.checkpoints.of({next(iter(runs))!r}), or --run"
        )

    def kept(self) -> list[Checkpoint]:
        """The checkpoints that each run's retention policy keeps (`arc.writer(keep=...)`), oldest first; all
        without.

        A partial one is not kept once there is a newer whole one of its run.
        """
        rows = self.table.select([*_PLACE, "run", "step", "whole", "metrics"]).to_pylist()
        chosen: list[int] = []
        for run, entry in self._head.runs.items():
            mine = [r for r in rows if r["run"] == run]
            keep = Keep.of(entry.keep)
            clock = read_clock(self._storage, keep)
            whole = candidates(mine, clock)
            newest = max((c.commit for c in whole), default=0)
            chosen += keep.kept(whole, clock.now)
            chosen += [r["commit"] for r in mine if not r["whole"] and r["commit"] > newest]
        return [self._at(row) for row in rows if row["commit"] in chosen]

    def _at(self, row: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint of a row of the table."""
        return self.at_commit(row["commit"], row["manifest"])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[Checkpoint]:
        return map(self._at, self.table.select(_PLACE).to_pylist())

    def __getitem__(self, key: str | int) -> Checkpoint:
        """The checkpoint by name (the newest whole one, else the newest partial one; of one run,
        see `latest`) or by place."""
        rows = self.table.select([*_PLACE, "name", "whole", "run"]).to_pylist()
        if isinstance(key, int):
            if not -len(rows) <= key < len(rows):
                raise IndexError(f"checkpoint {key} of {len(rows)}")
            return self._at(rows[key])
        named = [r for r in rows if r["name"] == key]
        if not named:
            names = ", ".join(str(r["name"]) for r in rows[-10:]) or "none"
            raise NotFoundError(f"there is no checkpoint {key!r} at {self._storage.url}; the newest are: {names}")
        runs = {r["run"]: f"{key!r} (commit {r['commit']})" for r in named}
        if len(runs) > 1:
            raise self._ambiguous(f"several of them have one of the name {key!r}", runs)
        return self._at(max(named, key=lambda r: (r["whole"], r["commit"])))

    def __repr__(self) -> str:
        runs = [name for name, e in self._head.runs.items() if e.latest is not None and self._run in (None, name)]
        newest = f"of {len(runs)} runs" if len(runs) > 1 else f"latest {self.latest!r}"
        return one_line(f"<{len(self)} checkpoints at {self._storage.url}, {newest}>")


class Run:
    """A line of checkpoints, and the episodes that its sessions wrote, as of the commit that the archive shows."""

    def __init__(self, name: str, checkpoints: Checkpoints, archived: Episodes) -> None:
        """archived: the episodes of the archive; those that it went on with are among them."""
        self.name = name
        self._entry = checkpoints._head.runs.get(name)  # None if its episodes came along from another archive
        self._every = checkpoints
        self.archived = archived

    @property
    def sessions(self) -> list[str]:
        """The session ids of its starts (the newest hundred and one), newest last."""
        return [] if self._entry is None else list(self._entry.sessions)

    @property
    def checkpoints(self) -> Checkpoints:
        return self._every.of(self.name)

    @property
    def newest(self) -> Checkpoint | None:
        """Its newest whole checkpoint; None if it has none."""
        return self.checkpoints.latest

    @property
    def ledgers(self) -> list[str]:
        """The names of the ledgers of prompts in the archive."""
        return names(self._every._storage, self._every._head)

    def ledger(self, name: str) -> LedgerView:
        """The view of the ledger that its newest session has of prompts."""
        return of_run(self._every._storage, self._every._head, name, self.name)

    @cached_property
    def episodes(self) -> Episodes:
        """The episodes whose newest steps it wrote. Reads no data."""
        return self.archived.filter(run=self.name)

    @property
    def commits(self) -> list[int]:
        """The numbers of the commits that added its episodes and checkpoints, oldest first."""
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
        """The facts about it, for people and as JSON. Reads no checkpoint and no data."""
        newest, origin, found = self._latest, self.forked_from, self.episodes.table
        return {
            "run": self.name,
            "newest_checkpoint": newest and newest.name,
            "step": newest and newest.step,
            "commit": newest and newest.commit,
            "checkpoints": len(self.checkpoints),
            "episodes": found.num_rows,
            "steps": int(found["length"].to_numpy().sum()),
            "sessions": len(self.sessions),
            "forked_from": origin and f"{origin['name']} of {origin['run']}",
        }

    def plot(self, ax: Any = None, label: str | None = None) -> Any:
        """Plot its episodes as `episodes.plot` does, labelled with its name."""
        return self.episodes.plot(ax, self.name if label is None else label)

    def _repr_html_(self) -> str:
        from archive.view import notebook

        return notebook.runs("Run", [self.about], self.episodes.table, self.episodes.fields)

    def __repr__(self) -> str:
        newest = self._latest
        began = f", from {self.forked_from['name']!r} of {self.forked_from['run']!r}" if self.forked_from else ""
        return f"<Run {self.name!r}: newest {newest.name if newest else None!r}{began}>"


class Runs(Mapping[str, Run]):
    """The runs of an archive by name, in the order of their first commits; they can be shown side by side."""

    def __init__(self, checkpoints: Checkpoints, episodes: Episodes) -> None:
        self._checkpoints = checkpoints
        self._episodes = episodes
        self._url = checkpoints._storage.url
        self._head = checkpoints._head

    @cached_property
    def _names(self) -> list[str]:
        """The runs that a commit names, and those whose episodes came along from another archive."""
        written = self._episodes.episode_index.column("run").unique().to_pylist()
        return list(dict.fromkeys([*self._head.runs, *sorted(n for n in written if n is not None)]))

    def __getitem__(self, name: str) -> Run:
        if name not in self._names:
            known = ", ".join(map(repr, self._names)) or "none"
            raise NotFoundError(f"there is no run {name!r} at {self._url}; its runs: {known}")
        return Run(name, self._checkpoints, self._episodes)

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
        from archive.view import plots

        axes = ax
        for name in names or self._names:
            axes = self[name].plot(axes)
        return plots.episodes(self._episodes[:0].table) if axes is None else axes

    def to_html(self, *names: str) -> str:
        """A page of these runs (default: all) side by side: checkpoints, returns in one picture, and all episodes."""
        from archive.view import pages

        chosen = [self[name] for name in names or self._names]
        found = self._episodes.filter(run=[run.name for run in chosen])
        title = " and ".join(run.name for run in chosen[:8]) or "no runs"
        return pages.archive(found, [run.name for run in chosen], title)

    @property
    def about(self) -> list[dict[str, Any]]:
        """The facts about each, for people and as JSON."""
        return [run.about for run in self.values()]

    def _repr_html_(self) -> str:
        from archive.view import notebook

        every = self._episodes
        return notebook.runs("Runs", self.about, every.table, every.fields)

    def __repr__(self) -> str:
        return one_line(f"<{len(self)} runs at {self._url}: {', '.join(self._names)}>")

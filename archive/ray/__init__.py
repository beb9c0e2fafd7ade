"""Ray Data. Episodes of an archive come out as a `ray.data.Dataset`, which reads what is asked of it, and go in.

    import archive.ray

    ds = archive.ray.read("s3://bucket/run", fields=["obs", "reward"], where="return > 10", unit="step")
    ds.filter(expr=ray.data.expressions.col("reward") > 0).select_columns(["obs"])   # reads what these need
    archive.ray.write(ds, "s3://bucket/other", unit="step")                          # one commit

See `docs/how-to/ray-data.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archive.base import package

if TYPE_CHECKING:
    import ray.data

    from archive import Commit, Schema

__all__ = ["read", "register", "write"]

INSTALL = "'trajectory-archive[ray]'"


def read(
    url: Any,
    fields: Any = None,
    where: Any = None,
    windows: Any = None,
    unit: str = "episode",
    commit: int | str | None = None,
    *,
    columns: Sequence[str] | None = None,
    missing: Any = "error",
    derive: Any = (),
    storage_options: Mapping[str, Any] | None = None,
    allow_bases: bool | Sequence[str] = (),
    override_num_blocks: int | None = None,
    concurrency: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> ray.data.Dataset:
    """Make a dataset of the episodes of an archive, as of its newest commit, or of `commit` (a number, or a tag).

    url: of an archive (or a list of one), an Archive, some Episodes, or a Checkpoint, whose live steps these are.
    fields, missing, derive: as for `Episodes.read`; a field that an episode lacks is null.  where: as for
    `Episodes.filter`.  storage_options, allow_bases: as for `archive.open`.
    unit: "episode": a row an episode; its fields are tensors of any length.  "step": a row a step, with `episode_id`
    and `step`.  windows: a length, (length, stride) or {"length", "stride", "pad"}: a row a window, as
    `archive.torch.WindowDataset` has them, with `episode_id` and its first `step`; padded ones have `mask`.
    columns: the columns of `Episodes.table` that come with each row, beside `episode_id`; None: all of them for
    episodes, none for steps and windows.  One that is called as a field is comes as "episode.NAME".
    override_num_blocks, concurrency, ray_remote_args: as for `ray.data.read_datasource`.

    Tasks get numbers of episodes, no data, and read the frozen commit: each a few shards.  Filters by expressions and
    selected columns are pushed into them.
    """
    package("ray.data", "archive.ray", INSTALL)
    from archive.ray import source

    made = source.of(
        url, fields, where, windows, unit, commit, columns=columns, missing=missing, derive=derive,
        storage_options=storage_options, allow_bases=allow_bases,
    )  # fmt: skip
    return source.dataset(made, override_num_blocks, concurrency, ray_remote_args)


def write(
    dataset: ray.data.Dataset,
    url: Any,
    episode_id: str | None = "episode_id",
    step: str | None = "step",
    *,
    unit: str = "episode",
    fields: Sequence[str] | None = None,
    metadata: Sequence[str] = (),
    model_weights_uuid: str | None = None,
    update_count: str | None = None,
    terminated: str | None = None,
    truncated: str | None = None,
    schema: Schema | None = None,
    run: str = "ray",
    replace: bool = False,
    compression: str | None = "zstd:1",
    storage_options: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> Commit:
    """Add the episodes of a dataset to an archive, which is made if it is not there; the one commit that does it.

    unit: "episode": a row is an episode, its fields are arrays.  "step": a row is a step; Ray groups them by
    `episode_id`, wherever they are, and they are put in the order of `step`: numbers, each one more than the last, or
    it is a UsageError (None: as they come).
    episode_id: the column with the ids; None: new ones.  fields: columns; None: with a row an episode those of lists or
    tensors, with a row a step all that are nothing else.  "obs/image" is a field `image` within `obs`.
    metadata: columns whose values become metadata, or "metadata", which has all as JSON.  model_weights_uuid,
    update_count, terminated, truncated: the columns of these; the first two may have one value a step.
    schema, replace, compression: as for a writer and its `add_episode`.  run: the name that the episodes have as
    their run; no session is opened, so that writers of a run of this name are not disturbed.
    concurrency, ray_remote_args: as for `Dataset.write_datasink`.

    Tasks put shards, and hand back what is in them; a task that is done again puts others, and what no commit names
    is found by a prune. DuplicateEpisodeError, and nothing is committed, if an id is there already (without `replace`),
    or twice in the dataset.
    """
    package("ray.data", "archive.ray", INSTALL)
    from archive.ray import sink

    columns = sink.columns(
        unit, episode_id, step, fields, metadata, schema, model_weights_uuid=model_weights_uuid,
        update_count=update_count, terminated=terminated, truncated=truncated,
    )  # fmt: skip
    return sink.write(
        dataset,
        url,
        columns,
        run=run,
        replace=replace,
        compression=compression,
        storage_options=storage_options,
        concurrency=concurrency,
        ray_remote_args=ray_remote_args,
    )


def register() -> None:
    """Make `read` available as `ray.data.read_archive`, where RLlib looks for `input_read_method="read_archive"`."""
    package("ray.data", "archive.ray", INSTALL).read_archive = read

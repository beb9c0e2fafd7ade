"""Ray Data. Episodes of an archive come out as a `ray.data.Dataset`, which reads what is asked of it.

    import archive.ray

    ds = archive.ray.read("s3://bucket/run", fields=["obs", "reward"], where="return > 10", unit="step")
    ds.filter(expr=ray.data.expressions.col("reward") > 0).select_columns(["obs"])   # reads what these need

See `docs/how-to/ray-data.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archive.base import package

if TYPE_CHECKING:
    import ray.data

__all__ = ["read", "register"]

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


def register() -> None:
    """Make `read` available as `ray.data.read_archive`, where RLlib looks for `input_read_method="read_archive"`."""
    package("ray.data", "archive.ray", INSTALL).read_archive = read

"""RLlib's offline algorithms train from an archive as they do from RLlib's own Parquet; what they cannot is refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import archive
import archive.ray
from archive.base.errors import ArchiveError, FieldError, NotFoundError, UsageError
from tests.support import rllib_episodes as _there
from tests.support.backends import make_backend
from tests.support.documents import DOCS, run_page
from tests.support.ray_cluster import cluster
from tests.support.rllib_training import archived, as_parquet, config_of, losses, made

from archive.adapters import rllib  # isort: skip (Ray is there)
from archive.adapters.rllib.offline import url_of  # isort: skip

assert _there
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def ordered() -> Iterator[Any]:
    """Ray, whose datasets keep their order."""
    with cluster(3) as ray:
        context = ray.data.DataContext.get_current()
        options = context.execution_options
        before = options.preserve_order
        options.preserve_order, context.enable_progress_bars = True, False
        yield ray
        options.preserve_order = before


@pytest.fixture(scope="module")
def own(ordered: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The losses of an algorithm from RLlib's own Parquet."""
    return {"folder": tmp_path_factory.mktemp("parquet")}


def expected(own: dict[str, Any], algorithm: str) -> Any:
    if algorithm not in own:
        folder = own["folder"] / algorithm
        as_parquet(made(algorithm), folder)
        data = {"input_": [str(folder)], "input_read_method": "read_parquet", "input_read_sample_batches": True}
        own[algorithm] = losses(config_of(algorithm, **data, input_read_method_kwargs={"override_num_blocks": 1}))
    return own[algorithm]


def of_archive(algorithm: str, url: Any, **read: Any) -> Any:
    return config_of(
        algorithm, input_=url, offline_data_class=rllib.ArchiveOfflineData, input_read_episodes=True,
        input_read_method_kwargs={"override_num_blocks": 1, **read},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "store"),
    [
        ("bc", "moto"),
        ("cql", "seaweedfs"),
        pytest.param("bc", "seaweedfs", marks=pytest.mark.soak),
        pytest.param("cql", "moto", marks=pytest.mark.soak),
    ],
)
def test_the_losses_are_those_of_rllibs_own_parquet(
    algorithm: str, store: str, own: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    backend = make_backend(request, store, tmp_path)
    archived(made(algorithm), backend.url, storage_options=backend.storage_options)
    config = of_archive(algorithm, [backend.url], storage_options=backend.storage_options)
    found = losses(config)
    assert found == expected(own, algorithm)
    assert len({one["total_loss"] for one in found}) == len(found)
    assert config.input_ == [backend.url]


def test_rllib_reads_rows_of_steps_by_itself(ordered: Any, tmp_path: Path) -> None:
    whole, columns = made("bc", 6), []
    with archive.create(str(tmp_path / "arc")).writer(schema=archive.Schema(next_of={"next/o": "o"})) as w:
        for one in whole:
            ends = np.arange(len(one["rewards"])) == len(one["rewards"]) - 1
            fields = {"o": one["obs"][:-1], "actions": one["actions"], "rewards": one["rewards"], "terminateds": ends}
            w.add_episode({**fields, "next": {"o": one["obs"][1:]}}, episode_id=one["id"], terminated=True)
            rows = {"o": list(fields["o"]), "next/o": list(one["obs"][1:]), "episode_id": [one["id"]] * len(ends)}
            columns.append(pa.table({**rows, **{name: fields[name] for name in ("actions", "rewards", "terminateds")}}))
    pq.write_table(pa.concat_tables(columns), tmp_path / "rows.parquet")
    archive.ray.register()
    schema, found = {"obs": "o", "new_obs": "next/o", "eps_id": "episode_id"}, []
    for method, path, given in (("archive", "arc", {"unit": "step"}), ("parquet", "rows.parquet", {})):
        config = config_of(
            "bc", input_=[str(tmp_path / path)], input_read_method=f"read_{method}", input_read_schema=schema,
            input_read_method_kwargs={"override_num_blocks": 1, **given},
        )  # fmt: skip
        config.input_read_batch_size = None  # steps are rows
        found.append(losses(config))
    assert found[0] == found[1]


# -- episodes of any archive -------------------------------------------------------------------------------------------


def episodes_of(config: Any) -> list[Any]:
    """The episodes that a prelearner gets."""
    data = rllib.ArchiveOfflineData(config)
    batch = data.data.take_batch(100, batch_format="numpy")
    return data.prelearner_class._map_sample_batch_to_episode(data.prelearner_class, batch)["episodes"]


def written(url: Path, *episodes: Any, **options: Any) -> str:
    with archive.create(str(url)).writer(**options) as w:
        for fields, given in episodes:
            w.add_episode(fields, **given)
    return str(url)


def steps(count: int, start: float = 0.0) -> dict[str, Any]:
    return {"obs": np.full((count, 4), start, np.float32), "action": np.arange(count) % 2, "reward": np.ones(count)}


DONE: dict[str, Any] = {"terminated": True}


def test_episodes_are_as_they_were_archived(ordered: Any, tmp_path: Path) -> None:
    whole = made("bc", 5)
    archived(whole, str(tmp_path / "arc"))
    found = {one.id_: one for one in episodes_of(of_archive("bc", tmp_path / "arc"))}
    assert [*found] == [one["id"] for one in whole]
    for one in whole:
        episode = found[one["id"]]
        for name, values in (("obs", episode.observations), ("actions", episode.actions), ("rewards", episode.rewards)):
            assert (values.data.dtype, values.lookback) == (one[name].dtype, 0)
            np.testing.assert_array_equal(values.data, one[name])
        assert (episode.is_terminated, episode.is_truncated) == (one["terminated"], not one["terminated"])


def test_fields_are_found_by_other_names_and_episodes_chosen(ordered: Any, tmp_path: Path) -> None:
    def fields(count: int) -> dict[str, Any]:
        made = steps(count)
        rows = np.arange(5 * count + 5, dtype=np.float32).reshape(-1, 5)[:, :4]
        return {"state": {"now": rows[:-1], "then": rows[1:]}, "done": made["action"], "score": made["reward"]}

    url = written(tmp_path / "arc", (fields(3), DONE), (fields(4), DONE), (fields(2), {"last": False}))
    names = {"obs": "state/now", "next_obs": "state/then", "actions": "done", "rewards": "score"}
    (one,) = episodes_of(of_archive("bc", url, names=names, filter={"complete": True}, where="length = 4"))
    np.testing.assert_array_equal(one.observations.data[:, 1], np.arange(1, 26, 5))
    assert (len(one), len(one.observations)) == (4, 5)


def test_what_a_buffer_was_saved_as_is_trained_on(ordered: Any, tmp_path: Path) -> None:
    envs = _there.Envs(3, multi=False, odd=False)
    buffer = _there.EpisodeReplayBuffer(capacity=400)
    for _ in range(4):
        buffer.add(envs.pieces(6))
    with archive.create(str(tmp_path / "arc")).writer() as w:
        rllib.save(buffer, w, step=1).result()
    config = of_archive("bc", tmp_path / "arc", filter={"complete": True})
    done = [one for one in buffer.episodes if one.is_done and not one.t_started]
    config.environment(observation_space=done[0].observation_space, action_space=done[0].action_space)
    ids = {one.id: one.metadata["rllib"]["id"] for one in archive.open(str(tmp_path / "arc")).episodes}
    found = {ids[one.id_]: one for one in episodes_of(config)}
    assert {*found} == {one.id_ for one in done}
    for one in done:
        one.to_numpy()
        for name in ("observations", "actions", "rewards", "extra_model_outputs"):
            left, right = (getattr(episode, name) for episode in (one, found[one.id_]))
            pairs = [(left[key], right[key]) for key in left] if isinstance(left, dict) else [(left, right)]
            for a, b in pairs:
                _there.check_same(a.data, b.data, f"{one.id_}.{name}")


def test_zeros_stand_for_a_last_observation_that_need_not_be_there(ordered: Any, tmp_path: Path) -> None:
    url = written(tmp_path / "arc", (steps(3, 1.0), DONE))
    config = of_archive("bc", url)
    with pytest.raises(FieldError, match=r"no observation after the last step.*ignore_final_observation=True"):
        rllib.ArchiveOfflineData(config)
    (one,) = episodes_of(config.copy(copy_frozen=False).offline_data(ignore_final_observation=True))
    assert one.observations.data[:, 0].tolist() == [1, 1, 1, 0]


# -- refused before training -------------------------------------------------------------------------------------------


def refused(url: Any, error: type[ArchiveError], match: str, change: Any = None, **read: Any) -> None:
    config = of_archive("bc", url, **read)
    with pytest.raises(error, match=match):
        rllib.ArchiveOfflineData(config if change is None else change(config))


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    last = {"next_obs": np.zeros((2, 4), np.float32)}
    opened = written(tmp_path / "open", (steps(2) | last, DONE), (steps(2) | last, {"last": False, "episode_id": "o"}))
    refused(opened, UsageError, r"1 of 2 episodes of .*open.*'o'.*\"complete\": True")
    refused(opened, NotFoundError, "no episode with steps, or none that meets the filter", where="length > 9")
    refused(written(tmp_path / "none"), NotFoundError, "no episode with steps")
    refused(tmp_path / "nowhere", NotFoundError, "nowhere")
    lacks = written(tmp_path / "lacks", ({"obs": np.zeros((2, 4)), "action": np.zeros(2)}, DONE))
    refused(lacks, FieldError, "no field 'rewards' or 'reward'.*it has .*action.*\"rewards\": \\.\\.\\.")
    two = written(tmp_path / "two", (steps(2) | last, DONE), (steps(2), DONE))
    refused(two, FieldError, "some episodes lack field 'next_obs'")
    refused(opened, UsageError, "'fields' is not known: .*takes names", fields=["obs"])
    refused(opened, UsageError, "'observation' is not known", names={"observation": "obs"})
    refused([opened, opened], UsageError, "one archive; resharding.merge")
    policies = {"a": (None, None, None, {}), "b": (None, None, None, {})}
    refused(opened, UsageError, "train one agent", lambda c: c.multi_agent(policies=policies))


def test_several_agents_and_a_store_of_one_process_are_refused(tmp_path: Path) -> None:
    envs, buffer = _there.Envs(1, multi=True), _there.MultiAgentEpisodeReplayBuffer(capacity=400)
    for _ in range(8):
        buffer.add(envs.pieces(6))
    with archive.create(str(tmp_path / "arc")).writer() as w:
        rllib.save(buffer, w, step=1).result()
    refused(tmp_path / "arc", UsageError, "episodes of several agents", filter={"complete": True})
    with archive.create("memory://rllib-offline").writer() as w:
        w.add_episode(steps(2) | {"next_obs": np.zeros((2, 4), np.float32)}, terminated=True)
    refused("memory://rllib-offline", UsageError, "memory of this process")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://b/x", "s3://b/x"),
        (["s3://b/x/y"], "s3://b/x/y"),
        (Path("s3://b/x"), "s3://b/x"),
        (Path("/data/run"), "/data/run"),
        (["file:///data/run"], "file:///data/run"),
        ("relative/run", "relative/run"),
    ],
)
def test_a_url_that_was_made_a_path_is_one_again(given: Any, url: str) -> None:
    assert url_of(given) == url


def test_the_page_prints_what_it_says(ordered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / "adapters" / "rllib.md", {})
    gc.collect()  # the iterators of its datasets end while Ray is there

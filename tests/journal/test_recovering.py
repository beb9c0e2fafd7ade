"""What was journaled comes back as a checkpoint, as it was."""

from __future__ import annotations

import numpy as np

from tests.support.archives import fresh
from tests.support.journals import Rank, keep


def episode(n: int, base: int = 0) -> dict[str, np.ndarray]:
    return {"obs": np.arange(base, base + n, dtype=np.int64), "reward": np.ones(n, np.float32)}


def test_a_run_without_a_checkpoint() -> None:
    arc = fresh()
    rank = Rank(arc)
    keep(arc, "main", 1)
    rank.writer.add_episode(episode(5), episode_id="a")
    rank.tick()
    rank.writer.add_episode(episode(7, 10), episode_id="b")
    rank.tick(progress={"n": 3})
    rank.die()
    print(arc.tails("main"))
    ck = arc.recover()
    print(ck, ck.record)
    assert ck.episodes.table["episode_id"].to_pylist() == ["a", "b"]
    assert ck.episodes["b"].read()["obs"].tolist() == list(range(10, 17))
    assert ck.progress == {"n": 3}
    assert arc.recover().number == ck.number


def test_checkpoint_then_tail_with_columns() -> None:
    arc = fresh()
    rank = Rank(arc)
    keep(arc, "main", 1)
    w = rank.writer
    w.add_episode(episode(5), episode_id="a")
    rank.tick()
    w.add_episode(episode(4, 10), episode_id="b")
    base = rank.checkpoint(
        100, state={"x": np.arange(3), "k": 4}, columns={"p": np.arange(9.0)}, attributes={"q": {"a": 1, "b": 2}}
    )
    w.add_episode(episode(3, 20), episode_id="c")
    w.remove(["a"])
    rank.tick(columns={"p": np.arange(7.0) * 10})
    w.add_episode(episode(2, 30), episode_id="d")
    rank.tick(attributes={"q": {"d": 9}})
    rank.die()
    ck = arc.recover()
    assert ck.name.startswith("step-100+tail-")
    assert ck.record.recovered.base == base.number
    assert ck.episodes.table["episode_id"].to_pylist() == ["b", "c", "d"]
    np.testing.assert_array_equal(ck.column("p", 0), [0, 10, 20, 30, 40, 50, 60, np.nan, np.nan])
    assert ck.attributes(0) == {"q": {"b": 2, "d": 9}}
    assert ck.state(0)["k"] == 4
    assert ck.state(0)["x"].tolist() == [0, 1, 2]
    with arc.writer(resume=ck) as again:
        assert again.live["episode_id"].to_pylist() == ["b", "c", "d"]
        again.add_episode(episode(1), episode_id="e")
        again.checkpoint(200, wait=True)
    assert arc.checkpoints.latest.episodes.table["episode_id"].to_pylist() == ["b", "c", "d", "e"]

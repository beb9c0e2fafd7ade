"""An episode that goes on after a resume with fields that are stored otherwise: read as one, or refused, never cast."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import archive
from archive import FieldError, Schema
from tests.support.worlds import save_world, shares

Nest = dict[str, Any]
FIRST = np.array([True, False])


def gone_on(before: Nest, after: Nest, schemas: tuple[Schema | None, Schema | None] = (None, None)) -> archive.Episode:
    """One episode: the first steps before a checkpoint, the others after a resume."""
    arc = archive.create(f"memory://{uuid4().hex}")
    with arc.writer(session="one", schema=schemas[0]) as w:
        w.append(before, env_ids=0, first=True)
        checkpoint = w.checkpoint(1).result()
    with arc.writer(session="two", schema=schemas[1], resume=checkpoint) as w:
        w.append(after, env_ids=0, last=True)
    (episode,) = arc.episodes
    return episode


def follow(start: int, stop: int) -> Nest:
    obs = np.arange(start, stop, dtype=np.float32)
    return {"obs": obs, "next": {"obs": obs + 1}}


@pytest.mark.parametrize("first", [True, False])
def test_next_of_may_be_declared_later_or_no_longer(first: bool) -> None:
    declared = Schema(next_of={"next/obs": "obs"})
    schemas = (declared, None) if first else (None, declared)
    episode = gone_on(follow(0, 4), follow(4, 7), schemas)
    assert episode.read()["next"]["obs"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert episode.read("next", 2, 6)["next"]["obs"].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("widths", [(2, 5), (5, 2)])
def test_strings_get_the_greater_width(widths: tuple[int, int]) -> None:
    before, after = ({"text": np.array(["a" * width])} for width in widths)
    text = gone_on(before, after).read()["text"]
    assert (text.dtype, text.tolist()) == (np.dtype("<U5"), ["a" * width for width in widths])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros(2, np.float32), np.full(2, 1e300)),
        (np.zeros(2, np.int64), np.zeros(2)),
        (np.zeros((2, 3)), np.zeros((2, 4))),
        (np.zeros(2), [np.zeros(1), np.zeros(2)]),
        (np.array(["a", "b"]), np.array(["a", "b"], object)),
    ],
    ids=["width", "kind", "shape", "axis", "strings"],
)
def test_another_kind_of_field_is_refused_across_the_seam(before: Any, after: Any) -> None:
    same = {"reward": np.ones(2)}
    episode = gone_on({"x": before} | same, {"x": after} | same)
    with pytest.raises(FieldError, match=r"another kind of field 'x' .*start= and stop="):
        episode.read()
    assert episode.read("reward")["reward"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("tokens", [[np.zeros(0, np.int32)], [np.arange(2, dtype=np.int32)]])
def test_empty_lists_do_not_say_what_a_field_is_of(tokens: list[Any]) -> None:
    schema = Schema(axes={"tokens": "ragged"})
    arc = archive.create(f"memory://{uuid4().hex}")
    with arc.writer(schema=schema) as w:
        name = w.add_episode({"tokens": []}, env_id=0, last=False)
        w.commit()
        w.append({"tokens": tokens}, env_ids=0, last=True)
    (found,) = arc.episodes[name].read()["tokens"]
    assert (found.dtype, found.tolist()) == (np.int32, tokens[0].tolist())
    flat = arc.episodes.read(ragged="flat")[0]["tokens"]
    assert (flat.values.dtype, flat.lengths.tolist()) == (np.int32, [len(tokens[0])])


def test_ids_stay_those_of_the_target_after_the_next_checkpoint_of_the_new_world() -> None:
    """3 ranks, then 2, then 2 again: what the archive holds was written by 3, and is not what the buffers have."""
    url, schema = f"memory://{uuid4().hex}", Schema(env_id=["env"], episode_id=["traj"])

    def save(rank: int, w: Any, step: int) -> Any:
        for env in range(2):
            for k in range(3):
                ids = {"env": np.full(2, env), "traj": np.full(2, env * 3 + k)}
                w.append({"x": np.full(2, 100 * rank + 10 * env + k)} | ids, env_ids=env, first=FIRST, last=~FIRST)
        return w.checkpoint(step)

    first = save_world(url, range(3), save, schema=schema)
    assert [e["env"][0] for e in shares(first, 3)[1].read()] == [0, 0, 0, 1, 1, 1]
    given = shares(first, 2)
    writers = [archive.open(url).writer(resume=share, session="second") for share in given]
    new = {"x": np.full(2, 7), "env": np.full(2, 1), "traj": np.full(2, 70)}  # by the new world, so they stay
    for w in writers:
        w.append(new, env_ids=1, first=FIRST, last=~FIRST)
    pending = [w.checkpoint(2) for w in writers]
    second = pending[0].result(60)
    again = shares(second, 2)
    assert again[0].plan.is_identity
    for before, after in zip(given, again, strict=True):
        want = [*before.read(), new]
        assert len({int(e["traj"][0]) for e in want}) == len(want) == 10
        batch = {k: np.concatenate([e[k][:1] for e in after.episodes.read()]) for k in new}
        assert after.renumber_rows(batch, np.arange(10))["traj"].tolist() == [e["traj"][0] for e in want]
        for read in (after.read(), [e.read() for e in after], [e for _, e in after.stream()]):
            assert [{k: v.tolist() for k, v in e.items()} for e in read] == [
                {k: v.tolist() for k, v in e.items()} for e in want
            ]
        assert [int(e["env"][0]) for e in want] == after.layout.env_id.tolist()

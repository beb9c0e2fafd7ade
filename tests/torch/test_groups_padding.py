"""Groups of episodes are drawn whole, and what differs in length is padded with a mask that says where there is
data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import FieldError, UsageError
from archive.fields.nests import Ragged

torch = pytest.importorskip("torch", reason="samplers need torch")
from archive.torch import EpisodeDataset, Padded, Sampler, WindowDataset, collate, loader  # noqa: E402

PROMPTS = ["b", "a", "b", "c", "a", "b", "c", "b", "d"]  # siblings are not neighbours
SIZES = Counter(PROMPTS)


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> archive.Archive:
    out = archive.create(tmp_path_factory.mktemp("groups") / "a")  # on disk: workers read it too
    with out.writer() as w:
        for i, prompt in enumerate(PROMPTS):
            n = 1 + i % 3
            steps = {
                "number": np.full(n, i), "obs": {"x": np.full((n, 2), i, np.float32)},
                "tokens": [np.full(1 + (i + t) % 4, 100 + i) for t in range(n)], "reward": np.full(n, float(i)),
                "says": [f"{i}"] * n, "bits": np.full(n, 60000 + i, np.uint16),
            }  # fmt: skip
            w.add_episode(
                steps, episode_id=f"e{i}", metadata={"prompt": prompt, "task": {"id": prompt}}, update_count=i,
                env_id=ord(prompt),
            )  # fmt: skip
        ids = {f"e{i}": prompt for i, prompt in enumerate(PROMPTS)}
        w.checkpoint(1, attributes={"prompt": ids}, columns={"priority": np.arange(18.0)}, wait=True)
    return out.refresh()


def seeded(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def of_batch(batch: dict[str, Any]) -> list[int]:
    """Number of each episode of a batch."""
    rows = torch.split(batch["number"].values, batch["number"].lengths.tolist())
    return [int(row[0]) for row in rows]


# The episodes of a checkpoint come row by row, and so do these keys.
BY = [
    "metadata.prompt", "metadata.task", "attributes.prompt", "env_id", lambda e: e.metadata["prompt"],
    np.array(sorted(map(ord, PROMPTS))),
]  # fmt: skip


@pytest.mark.parametrize("by", BY, ids=["metadata", "nest", "attribute", "column", "function", "keys"])
def test_all_of_a_group_or_none_of_it(arc: archive.Archive, by: Any) -> None:
    with Sampler(arc.checkpoints.latest, unit="group", group=by, batch_size=2, generator=seeded()) as sampler:
        assert len(sampler) == 4
        seen = set()
        for _ in range(20):
            batch = sampler.sample()
            found = Counter(PROMPTS[i] for i in of_batch(batch))
            assert len(found) == 2
            assert found == {prompt: SIZES[prompt] for prompt in found}
            names = [PROMPTS[i] for i in of_batch(batch)]
            first = {"a": 0, "b": 1, "c": 2, "d": 3}  # in the order in which they appear
            assert batch["_index"].tolist() == [first[name] for name in names]
            seen |= set(found)
        assert seen == set(SIZES)
        assert len(sampler.group_keys) == 4


def prompts_of(arc: archive.Archive, **how: Any) -> set[str]:
    with Sampler(arc, unit="group", group="metadata.prompt", batch_size=1, generator=seeded(), **how) as sampler:
        return {PROMPTS[i] for _ in range(60 if len(sampler) else 0) for i in of_batch(sampler.sample())}


def test_groups_of_which_a_part_is_missing_are_not_drawn(arc: archive.Archive) -> None:
    assert prompts_of(arc, group_size=2) == {"a", "b", "c"}
    assert prompts_of(arc, group_size=4) == {"b"}
    assert prompts_of(arc, group_size=5) == set()
    assert prompts_of(arc, update_count=(3, None)) == {"c", "d"}
    assert prompts_of(arc, recency=2) == {"c", "d"}
    assert prompts_of(arc, recency=3) == {"b", "c", "d"}


def test_strategies_draw_groups_and_go_on_from_a_state(arc: archive.Archive) -> None:
    how = {"unit": "group", "group": "metadata.prompt", "batch_size": 2}
    with Sampler(arc, strategy="without_replacement", generator=seeded(), prefetch=2, **how) as sampler:
        drawn = [of_batch(sampler.sample()) for _ in range(2)]
        assert sorted([*drawn[0], *drawn[1]]) == list(range(9))
        state = sampler.state_dict()
        after = [of_batch(sampler.sample()) for _ in range(4)]
    with Sampler(arc, strategy="without_replacement", generator=seeded(9), prefetch=2, **how) as again:
        again.load_state_dict(state)
        assert [of_batch(again.sample()) for _ in range(4)] == after
    source = arc.checkpoints.latest
    with Sampler(source, strategy="prioritized", priorities="priority", alpha=1, generator=seeded(), **how) as sampler:
        batch = sampler.sample(8)
        assert len(batch["_weight"]) == len(batch["_index"]) == len(of_batch(batch))
        index = torch.tensor([0, 0, 1, 2, 3])
        sampler.update_priorities(index, torch.tensor([5.0, 1, 0, 0, 0]))
        assert sampler.strategy.priorities.tolist() == [5, 0, 0, 0]
        with pytest.raises(UsageError, match="index 7 is no group"):
            sampler.update_priorities([7], [1.0])


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"unit": "group"}, "needs group="),
        ({"group": "metadata.prompt"}, "needs group="),
        ({"group_size": 2}, "unit='group'"),
        ({"unit": "group", "group": "metadata.prompt", "group_size": 0}, "at least 1"),
        ({"unit": "group", "group": "metadata.nothing"}, "has no metadata.nothing"),
        ({"unit": "group", "group": "prompt"}, "give 'metadata.KEY'"),
        ({"unit": "group", "group": [1, 2]}, "2 keys and there are 9"),
        ({"collate": "pad"}, "or a Padded"),
    ],
)
def test_bad_calls(arc: archive.Archive, how: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Sampler(arc, **how)


# -- padding -----------------------------------------------------------------------------------------------------------


def check_padded(batch: dict[str, Any], episodes: list[int], *, pad: int = 0, left: bool = False) -> None:
    lengths = [1 + i % 3 for i in episodes]
    number, mask = batch["number"], batch["_mask"]["number"]
    assert number.shape == mask.shape == (len(episodes), max(lengths))
    assert mask.dtype == torch.bool
    for row, known, i, n in zip(number, mask, episodes, lengths, strict=True):
        assert row[known].tolist() == [i] * n
        assert (row[~known] == pad).all()
        assert known[-1 if left else 0]
    assert torch.equal(batch["_mask"]["obs"]["x"], mask)
    assert batch["obs"]["x"].shape == (*mask.shape, 2)
    assert batch["bits"].dtype == torch.uint16
    tokens, known = batch["tokens"], batch["_mask"]["tokens"]
    assert tokens.shape == known.shape == (*mask.shape, tokens.shape[2])
    for row, there, i, n in zip(tokens, known, episodes, lengths, strict=True):
        assert sorted(there.sum(1).tolist()) == sorted([0] * (max(lengths) - n) + [1 + (i + t) % 4 for t in range(n)])
        assert (row[there] == 100 + i).all()
        assert (row[~there] == pad).all()


def test_a_sampler_pads_groups(arc: archive.Archive) -> None:
    how = {"unit": "group", "group": "metadata.prompt", "batch_size": 3, "generator": seeded()}
    with Sampler(arc, collate="padded", **how) as sampler:
        batch = sampler.sample()
    episodes = [int(row.max()) for row in batch["number"]]
    check_padded(batch, episodes)
    assert batch["_index"].shape == (len(episodes),)
    assert batch["says"][0] == [str(episodes[0])] * (1 + episodes[0] % 3)
    with Sampler(arc, collate=Padded(pad_value={"": -1, "bits": 7}, side="left"), **how) as sampler:
        batch = sampler.sample()
    check_padded(batch, [int(row.max()) for row in batch["number"]], pad=-1, left=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["padded", Padded()])
@pytest.mark.usefixtures("forked_workers")
def test_a_loader_pads(arc: archive.Archive, kind: Any, workers: int) -> None:
    seen = []
    for batch in loader(EpisodeDataset(arc.episodes), 4, num_workers=workers, collate=kind):
        episodes = [int(row.max()) for row in batch["number"]]
        check_padded(batch, episodes)
        seen += episodes
    assert sorted(seen) == list(range(9))


def test_torchs_own_loader_pads(arc: archive.Archive) -> None:
    data = torch.utils.data.DataLoader(EpisodeDataset(arc.episodes), batch_size=9, collate_fn=Padded())
    batch = next(iter(data))
    check_padded(batch, [int(row.max()) for row in batch["number"]])


def test_windows_pad_what_is_ragged_in_them(arc: archive.Archive) -> None:
    batch = next(iter(loader(WindowDataset(arc.episodes, length=2), 6, collate="padded")))
    known = batch["_mask"]["tokens"]
    assert batch["tokens"].shape == known.shape == (6, 2, 4)
    assert set(batch["_mask"]) == {"tokens"}
    assert (batch["tokens"][known] >= 100).all()


def test_items_of_any_origin_and_a_tensordict() -> None:
    items = [{"a": torch.arange(n), "b": torch.tensor(n)} for n in (3, 0, 2)]
    pad = Padded(pad_value={"a": -100}, side={"a": "left"})
    batch = pad.batch({"a": Ragged(torch.arange(5), torch.tensor([3, 0, 2])), "b": torch.ones(3)}, 3)
    assert batch["a"].tolist() == [[0, 1, 2], [-100] * 3, [-100, 3, 4]]
    assert batch["_mask"]["a"].tolist() == [[True] * 3, [False] * 3, [False, True, True]]
    assert collate(items, pad)["a"].tolist() == [[0, 1, 2], [-100] * 3, [-100, 0, 1]]
    made = pytest.importorskip("tensordict") and Padded(kind="tensordict")(items)
    assert (made.batch_size, made["_mask", "a"].shape) == (torch.Size([3]), (3, 3))
    empty = Padded().batch({"a": Ragged(torch.zeros(0), torch.zeros(2, dtype=torch.int64))}, 2)
    assert empty["a"].shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint32, torch.complex64, torch.bool])
def test_every_dtype_is_padded(dtype: Any) -> None:
    values = torch.tensor([1, 0, 1]).to(dtype)
    out = Padded().batch({"a": Ragged(values, torch.tensor([1, 2]))}, 2)["a"]
    assert out.dtype == dtype
    assert torch.equal(out.to(torch.complex64), torch.tensor([[1, 0], [0, 1]]).to(torch.complex64))


def test_padding_that_cannot_be() -> None:
    ragged = {"a": Ragged(torch.arange(3), torch.tensor([1, 2]))}
    with pytest.raises(UsageError, match=r"pad_value=0.5 is no torch.int64 as field 'a'"):
        Padded(0.5).batch(ragged, 2)
    with pytest.raises(UsageError, match="side='middle'"):
        Padded(side="middle")
    with pytest.raises(UsageError, match="kind='list'"):
        Padded(kind="list")
    with pytest.raises(FieldError, match="_mask"):
        Padded().batch({**ragged, "_mask": torch.ones(2)}, 2)

"""What a state is, without its values: in other processes, on other ranks, at every stage and in every tier."""

import pytest
import torch

import zerofn
from tests.support.checkpoint_states import train_state
from tests.support.same import assert_same_trees
from zerofn.launch.payload import packed, unpacked
from zerofn.sharding.sharded import is_sharded


def specs(state):
    return [
        (x.layout, x.spec.stage, x.spec.precision, x.spec.partition.codec, x.storages)
        for x in zerofn.tree.leaves(state, is_leaf=is_sharded)
        if is_sharded(x)
    ]


def there_and_back(state):
    return unpacked(packed(zerofn.abstract(state), ""))


OPTIONS = [{}, {"precision": "bf16"}, {"unit": lambda name: "all"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "bf16", "one unit"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_process_has_the_same_layout(stage, options):
    state = zerofn.shard(train_state(7), stage=stage, **options)
    assert specs(there_and_back(state)) == specs(state)


def test_it_is_small_and_has_no_values():
    big = zerofn.shard({"params": {"w": torch.zeros(1_000_000)}})
    assert len(packed(zerofn.abstract(big), "")) < 20_000
    for x in (zerofn.abstract(big), there_and_back(big)):
        with pytest.raises(RuntimeError, match=r"from zerofn\.abstract and has no values; zerofn\.load"):
            zerofn.unshard(x)


def test_a_donated_state_will_do(tmp_path):
    state = zerofn.shard(train_state(7))
    zerofn.save(tmp_path / "a", state)
    for x in (y for y in zerofn.tree.leaves(state, is_leaf=is_sharded) if is_sharded(y)):
        x.donate("A step has used it up.")
    assert_same_trees(zerofn.unshard(zerofn.load(tmp_path / "a", like=there_and_back(state))), train_state(7))


def masked(seed):
    """A tree beside the parameters that lacks the last leaves of its units, which decide how a unit is padded."""
    state = zerofn.shard({"params": {"a": torch.arange(5000.0), "b": torch.arange(4000.0) + seed}})
    part = zerofn.optim.masked(zerofn.optim.adam(1e-3), lambda leaf: leaf.name == "a").init(state["params"])
    return {**state, "part": part}


def save_on(path, stage):
    zerofn.save(path / "state", zerofn.shard(train_state(7), stage=stage))
    zerofn.save(path / "masked", masked(3))
    return [packed(zerofn.abstract(x), "") for x in (zerofn.shard(train_state(1), stage=stage), masked(0))]


def load_on(path, stage, kept):
    for name, like, expected in zip(("state", "masked"), map(unpacked, kept), (None, masked(3)), strict=True):
        whole = zerofn.shard(train_state(7), stage=stage) if expected is None else expected
        assert specs(like) == specs(whole)
        assert_same_trees(zerofn.unshard(zerofn.load(path / name, like=like)), zerofn.unshard(whole))


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("there, here", [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_ranks_cut_an_abstract_state_anew(ranks, tmp_path, there, here, stage):
    kept = ranks(there, save_on, tmp_path, stage)[0]
    ranks(here, load_on, tmp_path, stage, kept)

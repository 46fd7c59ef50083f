"""State dicts into shards: tensors in memory, and tensors that are read by intervals."""

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees

PARAMS = {"a.w": torch.arange(70.0).view(7, 10), "a.b": torch.arange(5.0), "c": torch.tensor(3, dtype=torch.int64)}


class Elsewhere:
    """A tensor that says which of its elements were read."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.dtype, self.asked = tensor, tensor.shape, tensor.dtype, []

    def read(self, start, into):
        self.asked.append((start, into.numel()))
        into.copy_(self.tensor.reshape(-1)[start : start + into.numel()])


def load(stage, dtype):
    like = zerofn.shard({"params": zerofn.tree_map(torch.zeros_like, PARAMS)}, stage=stage)["params"]
    values = {name: Elsewhere(x.to(dtype) if x.is_floating_point() else x) for name, x in PARAMS.items()}
    loaded = zerofn.load_state_dict(values, like=like)
    assert_same_trees(zerofn.unshard(loaded), PARAMS)
    return {name: sum(n for _, n in x.asked) for name, x in values.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 3])
def test_values_are_read_where_they_are_kept(stage, dtype):
    assert load(stage, dtype) == {"a.w": 70, "a.b": 5, "c": 1}


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_reads_its_part(ranks, world):
    found = ranks(world, load, 3, torch.float32)
    samples = {"a.w": 64, "a.b": 5}  # of every rank, to compare
    assert [sum(x[name] for x in found) - world * samples[name] for name in ("a.w", "a.b")] == [70, 5]


def drawn_by_each(stage):
    like = zerofn.shard({"params": zerofn.tree_map(torch.zeros_like, PARAMS)}, stage=stage)["params"]
    seeds = torch.Generator().manual_seed(dist.get_rank())
    drawn = {**PARAMS, "a.w": torch.randn(7, 10, generator=seeds)}
    with pytest.raises(
        zerofn.CheckpointError, match="(?s)ranks have read different values.*'a.w' with .*64 of its elements"
    ):
        zerofn.load_state_dict(drawn, like=like)


def test_a_model_that_each_rank_has_drawn_with_its_own_seed_is_refused(ranks):
    ranks(2, drawn_by_each, 3)


def test_a_modules_state_dict():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    plain = {name: torch.zeros_like(x) for name, x in module.named_parameters()}
    loaded = zerofn.load_state_dict(module.state_dict(), like=zerofn.shard({"params": plain})["params"])
    assert_same_trees(zerofn.unshard(loaded), dict(module.named_parameters()))


def test_names_and_shapes_must_agree():
    like = {"w": torch.zeros(3)}
    with pytest.raises(zerofn.CheckpointError, match="has no leaf 'w'"):
        zerofn.load_state_dict({"v": torch.ones(3)}, like=like)
    with pytest.raises(zerofn.CheckpointError, match=r"'w' has shape \(4,\) in the file"):
        zerofn.load_state_dict({"w": torch.ones(4)}, like=like)
    with pytest.raises(TypeError, match="'w' is a int, not a tensor"):
        zerofn.load_state_dict({"w": 3}, like=like)
    with pytest.raises(ValueError, match="two tensors would get the name 'w'"):
        zerofn.load_state_dict({"w": torch.ones(3), "v": torch.ones(3)}, like=like, rename=lambda name: "w")
    renamed = zerofn.load_state_dict({"m.w": torch.ones(3)}, like=like, rename=lambda name: name[2:])
    assert_same_trees(renamed, {"w": torch.ones(3)})
    loose = zerofn.load_state_dict({"w": torch.ones(3), "x": torch.ones(1)}, like=like, strict=False)
    assert_same_trees(loose, {"w": torch.ones(3)})


def in_place(stage):
    params = zerofn.shard({"params": zerofn.tree_map(torch.zeros_like, PARAMS)}, stage=stage)["params"]
    memory = [x.data_ptr() for x in params.parts]
    after = zerofn.load_state_dict({"a.w": PARAMS["a.w"]}, like=params, strict=False, donate=True)
    assert [x.data_ptr() for x in after.parts] == memory
    assert_same_trees(zerofn.unshard(after), {**zerofn.tree_map(torch.zeros_like, PARAMS), "a.w": PARAMS["a.w"]})
    assert_same_trees(zerofn.gather(after), zerofn.unshard(after))
    with pytest.raises(RuntimeError, match=r"it was donated to zerofn.load_state_dict"):
        zerofn.unshard(params)


def test_values_are_written_into_a_donated_tree(ranks):
    in_place(3)
    for stage in (0, 1, 3):
        ranks(2, in_place, stage)

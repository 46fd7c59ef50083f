"""What a rank has of heads, and what it may not."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn

import zerofn
from benchmarks.mesh.float64_models import SMALL
from zerofn.comm.mesh import Mesh
from zerofn.parallel import Slice, tensor

PLAN = {"*.qkv": Slice(-2, parts=3, output="cut"), "*.out": "rowwise"}
FEW = {**SMALL, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


class Attention(nn.Module):
    def __init__(self, heads=4, **more):
        super().__init__()
        self.num_heads = heads
        vars(self).update(more)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)


def cut(size, attributes=None, **more):
    model = zerofn.skeleton(lambda: nn.Sequential(Attention(**more)))
    tensor(model, Mesh.planned({"tensor": size}), PLAN, attributes=attributes)
    return model[0].num_heads


SHARED = {"*": {"num_heads": lambda heads, ranks: heads // ranks}}


def test_a_module_says_how_many_heads_a_rank_has():
    assert cut(2, SHARED) == 2
    assert cut(2, {"*": {"num_heads": lambda heads, ranks: heads}}) == 4
    assert cut(2, head_dim=6) == 4  # it asks how many there are
    with pytest.raises(
        ValueError, match=r"0.num_heads is 4, but the plan slices layers of 0 .*attributes=\{'0': \{'num_heads'"
    ):
        cut(2)
    with pytest.raises(ValueError, match="num_heads is 4, which 3 ranks cannot divide equally"):
        cut(3, SHARED)
    with pytest.raises(ValueError, match=r"0.qkv: .*3 ranks cannot divide 4 heads"):
        cut(3, SHARED, head_dim=6)


@pytest.mark.parametrize(("num_key_value_heads", "layer"), [(2, "o_proj"), (4, "o_proj")])
def test_ranks_do_not_share_heads_of_queries(num_key_value_heads, layer):
    config = transformers.LlamaConfig(**{**FEW, "num_key_value_heads": num_key_value_heads})
    model = zerofn.skeleton(lambda: transformers.LlamaForCausalLM(config))
    with pytest.raises(ValueError, match=f"{layer}: the plan cannot slice .* over 8 ranks .*fewer heads than ranks"):
        tensor(model, Mesh.planned({"tensor": 8}))


@pytest.mark.parametrize("word", ["embedding_rowwise", "embedding_colwise", "colwise_rep", "rowwise"])
def test_ranks_do_not_share_what_is_summed_or_put_together(word):
    def build():
        return nn.Sequential(nn.Embedding(2, 2) if "emb" in word else nn.Linear(2, 2))

    with pytest.raises(ValueError, match="0: the plan cannot slice .* over 4 ranks .*fewer entries in dim .* than"):
        tensor(zerofn.skeleton(build), Mesh.planned({"tensor": 4}), {"0": word})


def test_a_model_is_cut_once():
    model = zerofn.skeleton(lambda: nn.Sequential(nn.Linear(4, 4)))
    tensor(model, Mesh.planned({"tensor": 2}), {"0": "colwise_rep"})
    with pytest.raises(ValueError, match="tensor: was already called on this Sequential; make a new skeleton"):
        tensor(model, Mesh.planned({"tensor": 2}), {"0": "colwise_rep"})


def test_slices_have_known_words():
    for wrong, message in (
        ({"kind": "lin"}, "kind='lin' is not known"),
        ({"parts": 0}, "expected parts to be a number of matrices, 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Slice(-2, output="cut", **wrong)


def test_one_number_for_each_head_goes_with_it():
    class Gated(Attention):
        def __init__(self):
            super().__init__(head_dim=6)
            self.sinks, self.gates = nn.Parameter(torch.zeros(4)), nn.Linear(24, 4)

    model = zerofn.skeleton(lambda: nn.Sequential(Gated()))
    cuts = tensor(model, Mesh.planned({"tensor": 2}), PLAN | {"*.sinks": "colwise", "*.gates": "colwise"})
    assert [cuts[name].slices for name in ("0.sinks", "0.gates.weight")] == [(((0, 2),), ((2, 4),))] * 2


@pytest.mark.parametrize(("heads", "size"), [(4, 6), (8, 3), (6, 4), (12, 2)])
def test_as_many_numbers_as_heads_are_one_each(heads, size):
    """Also where there are more heads than a head has entries, or as many."""

    class Gated(Attention):
        def __init__(self):
            super().__init__(head_dim=size)
            self.gates = nn.Linear(24, heads)

    model = zerofn.skeleton(lambda: nn.Sequential(Gated()))
    cuts = tensor(model, Mesh.planned({"tensor": 2}), PLAN | {"*.gates": "colwise"})
    assert cuts["0.gates.weight"].slices == (((0, heads // 2),), ((heads // 2, heads),))


def test_gates_and_what_they_multiply_are_two_matrices():
    class Experts(nn.Module):
        has_gate = is_concatenated = True

        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(2, 8, 4)), nn.Parameter(torch.zeros(2, 4, 4))

    plan = {"experts": "moe_tp_experts", "experts.down_proj": "rowwise"}
    for word, refused in (("colwise", True), ("packed_colwise", False)):
        model = zerofn.skeleton(lambda: nn.ModuleDict({"experts": Experts()}))
        with pytest.raises(ValueError, match="gate_up_proj stores two matrices") if refused else nullcontext():
            tensor(model, Mesh.planned({"tensor": 2}), plan | {"experts.gate_up_proj": word})

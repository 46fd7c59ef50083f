"""Plans with which a model is another one, without an error; and plans that are right."""

import logging

import pytest
import torch
import transformers
from torch import nn

from benchmarks.mesh.float64_models import CONFIGS
from benchmarks.mesh.training import BERT, GPT2, T5
from zerofn.comm.mesh import Mesh
from zerofn.parallel import Slice, tensor

MESH = Mesh.planned({"tensor": 2})
LLAMA = {
    **{f"model.layers.*.self_attn.{x}_proj": "colwise" for x in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    **{f"model.layers.*.mlp.{x}_proj": "colwise" for x in ("gate", "up")},
    "model.layers.*.mlp.down_proj": "rowwise",
}
PHI3 = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
ATTENTION = {
    "transformer.h.*.self_attention.query_key_value": "colwise",
    "transformer.h.*.self_attention.dense": "rowwise",
}
FEWER = {x: lambda n, ranks: n // ranks for x in ("num_heads", "hidden_size")}


def made(kind, config):
    with torch.device("meta"):
        return kind._from_config(config)


def phi3():
    return made(transformers.Phi3ForCausalLM, transformers.Phi3Config(num_hidden_layers=2))


def test_slopes_of_the_first_heads_are_not_those_of_a_ranks_heads():
    model = made(transformers.BloomForCausalLM, transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=8))
    fewer = {"transformer.h.*.self_attention": FEWER, "transformer": {"num_heads": FEWER["num_heads"]}}
    with pytest.raises(
        ValueError, match=r"BloomForCausalLM computes different values: .*'transformer.h.0.self_attention.dense'"
    ):
        tensor(model, MESH, ATTENTION, attributes=fewer)


def test_two_matrices_in_one_weight_are_both_cut(caplog):
    with pytest.raises(ValueError, match="outputs are off by .*, and 'model.layers.0.mlp.down_proj' is the first"):
        tensor(phi3(), MESH, PHI3 | {"model.layers.*.mlp.gate_up_proj": "colwise"})
    tensor(phi3(), MESH, PHI3)
    assert not caplog.records


class Normed(nn.Module):
    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:])


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.full(size, 3.0))

    def forward(self, x):
        return torch.tanh(x) * self.scale


class OfItsOwn(transformers.LlamaForCausalLM):
    """A Llama with a norm or with numbers behind the gates."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            sizes = {"norm": None, "one": (), "each": (config.intermediate_size,)}[config.behind]
            layer.mlp.act_fn = Normed() if sizes is None else Scaled(sizes)


def of_its_own(behind):
    return made(OfItsOwn, transformers.LlamaConfig(num_hidden_layers=2, behind=behind))


def test_a_norm_over_the_features_of_one_rank_is_another_norm():
    with pytest.raises(ValueError, match="'model.layers.0.mlp.down_proj' is the first module that returns"):
        tensor(of_its_own("norm"), MESH, LLAMA)
    gathered = {f"model.layers.*.mlp.{x}_proj": "colwise_gather_output" for x in ("gate", "up")}
    tensor(of_its_own("norm"), MESH, LLAMA | gathered | {"model.layers.*.mlp.down_proj": "rowwise_split_input"})


def test_a_number_between_cut_layers_has_the_gradient_of_all_features(caplog):
    word = "'model.layers.*.mlp.act_fn': 'replicated_with_grad_allreduce'"
    with pytest.raises(ValueError, match="a different gradient of model.layers.0.mlp.act_fn.scale, off by .*") as error:
        tensor(of_its_own("one"), MESH, LLAMA)
    assert word in str(error.value)
    tensor(of_its_own("one"), MESH, LLAMA | {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"})
    tensor(of_its_own("each"), MESH, LLAMA | {"model.layers.*.mlp.act_fn.scale": "colwise"})
    assert not caplog.records


def test_plans_that_differ_between_layers_are_compared_in_all_of_them():
    model = made(transformers.Phi3ForCausalLM, transformers.Phi3Config(num_hidden_layers=4))
    odd = {"model.layers.2.mlp.gate_up_proj": "colwise", "model.layers.2.mlp.down_proj": "rowwise"}
    with pytest.raises(ValueError, match=r"'model.layers.2.mlp.down_proj' is the first"):
        tensor(model, MESH, odd)


RIGHT = {
    "gpt2": (transformers.GPT2LMHeadModel, GPT2),
    "t5": (transformers.T5ForConditionalGeneration, T5),
    "bert": (transformers.BertForMaskedLM, BERT),
    "llama": (
        transformers.LlamaForCausalLM,
        {"plan": LLAMA | {"model.layers.*": "sequence_parallel", "lm_head": "colwise"}},
    ),
}


@pytest.mark.part(name=["llama", "bert"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_plans_are_taken(caplog, name):
    kind, plan = RIGHT[name]
    assert tensor(made(kind, CONFIGS[name]()), MESH, **plan)
    assert not caplog.records


def test_images_are_compared_too(caplog):
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_hidden_layers=2)
    names = dict(made(transformers.ViTForImageClassification, config).named_modules())
    fc1, fc2 = (next(n for n in names if n.endswith(f"layers.0.mlp.{x}")).replace(".0.", ".*.") for x in ("fc1", "fc2"))
    tensor(made(transformers.ViTForImageClassification, config), MESH, {fc1: "colwise", fc2: "rowwise"})
    assert not caplog.records


def test_what_cannot_be_compared_is_told(caplog):
    model = made(transformers.BertForMaskedLM, CONFIGS["bert"]())
    model.cls.predictions.decoder = nn.Sequential(model.cls.predictions.decoder)
    head = {"cls.predictions.decoder.0": Slice(-2, output="concat")}
    tensor(model, MESH, head)
    assert "the plan for BertForMaskedLM was not tested on a small model" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="zerofn"):
        tensor(nn.Sequential(nn.Linear(4, 4)), MESH, {"0": "colwise_rep"})
    assert "the plan for Sequential was not tested" in caplog.text

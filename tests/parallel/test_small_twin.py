"""Small models of the classes of large ones."""

import pytest
import torch
import transformers
from torch import nn

from zerofn.parallel.small_twin import NoTwin, small_twin


def large(kind, config):
    with torch.device("meta"):
        return kind._from_config(config)


def numbers(config, *names):
    return [getattr(config, name) for name in names]


def test_a_twin_of_eight_billion_parameters_is_small():
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, bos_token_id=128000, eos_token_id=128001,
    )  # fmt: skip
    twin = small_twin(large(transformers.LlamaForCausalLM, config), 2)
    assert sum(x.numel() for x in twin.parameters()) < 1e6
    assert numbers(twin.config, "num_hidden_layers", "num_attention_heads", "num_key_value_heads") == [2, 8, 2]
    assert config.num_hidden_layers == 32 and all(x.dtype == torch.float64 for x in twin.parameters())


def test_a_twin_has_a_layer_of_each_kind():
    config = transformers.DeepseekV3Config(num_hidden_layers=9, first_k_dense_replace=3)
    twin = small_twin(large(transformers.DeepseekV3ForCausalLM, config), 2)
    assert [type(x.mlp).__name__ for x in twin.model.layers] == ["DeepseekV3MLP"] * 3 + ["DeepseekV3MoE"]


def test_windows_are_shorter_than_rows():
    twin = small_twin(large(transformers.MistralForCausalLM, transformers.MistralConfig()), 2)
    assert twin.config.sliding_window == 4


def test_generators_are_left_as_they_are():
    model, before = large(transformers.BertForMaskedLM, transformers.BertConfig()), torch.get_rng_state()
    small_twin(model, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_a_small_twin_says_why():
    with pytest.raises(NoTwin, match="is not a transformers model"):
        small_twin(nn.Linear(2, 2), 2)
    model = large(transformers.BertForMaskedLM, transformers.BertConfig())
    model.cls.predictions.decoder = nn.Sequential(model.cls.predictions.decoder)
    with pytest.raises(NoTwin, match="'cls.predictions.decoder.*' differs from the one in a model"):
        small_twin(model, 2)

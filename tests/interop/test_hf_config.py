"""Plans for Hugging Face's configs."""

import json

import pytest
import torch

import zerofn
from zerofn.interop.hf_config import step_of

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}


def written(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path / "config.json"


def test_a_plan_counts_the_parameters(tmp_path):
    found = step_of(written(tmp_path, LLAMA), context=16, rows=3)
    assert found.model == "LlamaForCausalLM" and found.batch["labels"].shape == (3, 16)
    table = zerofn.plan(
        found.train_step, found.init_state, found.batch, world=2, machine="4090", precision="bf16", stage=3
    )
    params = 2 * 128 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    state = table.best.plan.memory().peak["state"]
    assert 12 * params / 2 <= state <= 1.2 * 12 * params  # a shard, padded
    assert "LlamaForCausalLM on 2 rank(s) of 4090" in table.text()


def test_the_step_is_one_that_trains(tmp_path):
    written(tmp_path, {**T5, "decoder_start_token_id": 0})
    found = step_of(tmp_path, context=8)
    assert found.model == "T5ForConditionalGeneration"
    batch = {name: torch.randint(0, 128, (2, 8)) for name in found.batch}
    first = found.init_state()
    state, aux = found.train_step(first, batch)
    assert torch.isfinite(aux["loss"]) and int(state.step) == 1
    assert not torch.equal(state.params["shared.weight"], first.params["shared.weight"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 3}, 'it has no "model_type"'),
        ([1], 'it has no "model_type"'),
        ({"model_type": "nonesuch"}, "knows no model_type 'nonesuch'"),
        ({"model_type": "vit"}, "no language model of the kind 'vit'"),
        ({"model_type": "gpt2", "n_positions": 8}, "--context 16: GPT2LMHeadModel of this config has 8 positions"),
    ],
)
def test_what_is_no_config_is_a_sentence(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        step_of(written(tmp_path, config), context=16)


def test_no_file_and_no_tokens(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no config '.*none.json'"):
        step_of(tmp_path / "none.json", 16)
    with pytest.raises(ValueError, match="must be 1 or more, got 0 and 1"):
        step_of(written(tmp_path, LLAMA), 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is no JSON"):
        step_of(tmp_path, 16)


def test_a_model_is_cut_by_its_own_plan(tmp_path):
    path = written(tmp_path, LLAMA)
    assert step_of(path, 16, mesh=zerofn.Mesh.planned({"data": 2})).cuts is None
    cuts = step_of(path, 16, mesh=zerofn.Mesh.planned({"data": 2, "tensor": 2})).cuts
    assert {x.axis for x in cuts.values()} == {"tensor"} and "model.layers.1.mlp.down_proj.weight" in cuts
    refused = {"tensor": "4 heads of attention, which 3 ranks", "context": "not planned with a context axis"}
    for axis, said in refused.items():
        with pytest.raises(ValueError, match=said):
            step_of(path, 16, mesh=zerofn.Mesh.planned({axis: 3}))

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
    assert "LlamaForCausalLM on 2 ranks of 4090" in table.text()


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
        ({"model_type": "nonesuch"}, "does not know model_type 'nonesuch'. .* or correct model_type.$"),
        ({"model_type": "llamma"}, r"or correct model_type; did you mean 'llama'\?"),
        ({"model_type": "vit"}, "no language model of type 'vit'"),
        ({"model_type": "gpt2", "n_positions": 8}, "--context 16: GPT2LMHeadModel of this config has only 8 positions"),
    ],
)
def test_what_is_no_config_is_a_sentence(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        step_of(written(tmp_path, config), context=16)


def test_no_file_and_no_tokens(tmp_path):
    with pytest.raises(FileNotFoundError, match="the config '.*none.json' does not exist"):
        step_of(tmp_path / "none.json", 16)
    with pytest.raises(ValueError, match="must be 1 or more, got 0 and 1"):
        step_of(written(tmp_path, LLAMA), 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        step_of(tmp_path, 16)


def test_a_model_is_cut_by_its_own_plan(tmp_path):
    path = written(tmp_path, LLAMA)
    assert step_of(path, 16, mesh=zerofn.Mesh.planned({"data": 2})).cuts is None
    cuts = step_of(path, 16, mesh=zerofn.Mesh.planned({"data": 2, "tensor": 2})).cuts
    assert {x.axis for x in cuts.values()} == {"tensor"} and "model.layers.1.mlp.down_proj.weight" in cuts
    refused = {"tensor": "4 attention heads, which 3 ranks", "context": "cannot divide sequences of 16 tokens"}
    for axis, said in refused.items():
        with pytest.raises(ValueError, match=said):
            step_of(path, 16, mesh=zerofn.Mesh.planned({axis: 3}))


OPT = {"model_type": "opt", "hidden_size": 48, "word_embed_proj_dim": 48, "num_hidden_layers": 1}
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "vocab_size": 64,
}  # fmt: skip
SLIDING = {**LLAMA, "model_type": "gemma3_text", "architectures": None, "num_hidden_layers": 12, "head_dim": 8}


@pytest.mark.part(config=[DEEPSEEK, SLIDING])
@pytest.mark.parametrize(("config", "expected"), [(LLAMA | {"num_hidden_layers": 9}, (9, 0)), (DEEPSEEK, (6, 2)),
                                                  (T5, (0, 0)), (SLIDING, (12, 11))])  # fmt: skip
def test_layers_that_are_alike_are_counted(tmp_path, config, expected):
    """Of a model whose every sixth layer attends to all tokens, the last ones differ, too."""
    found = step_of(written(tmp_path, config), context=16)
    assert (found.num_layers, found.odd) == expected


def test_a_model_with_fewer_layers_is_the_same_otherwise(tmp_path):
    path = written(tmp_path, DEEPSEEK)
    whole, few = (dict(step_of(path, 16, layers=n).init_state().params) for n in (None, 4))
    assert {k: x.shape for k, x in few.items()} == {
        k: x.shape for k, x in whole.items() if not k.startswith(("model.layers.4.", "model.layers.5."))
    }


def test_axes_change_the_model_and_the_batch(tmp_path):
    path = written(tmp_path, DEEPSEEK)
    found = step_of(path, 16, 3, zerofn.Mesh.planned({"data": 2, "context": 2}))
    assert found.batch["input_ids"].shape == (3, 8) and "row_digest" in found.batch and found.cuts is None
    found = step_of(path, 16, 3, zerofn.Mesh.planned({"data": 2, "expert": 2}), capacity=1.5)
    assert {cut.axis for cut in found.cuts.values()} == {"expert"} and found.batch["input_ids"].shape == (3, 16)
    assert found.written == "zerofn.moe.experts(model, mesh, capacity=1.5)"
    with pytest.raises(ValueError, match="OPTForCausalLM has no tp_plan, or no list of layers"):
        path = written(tmp_path, OPT)
        step_of(path, 16, 2, zerofn.Mesh.planned({"tensor": 2}), sequence_parallel=True)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no ep_plan"):
        step_of(written(tmp_path, LLAMA), 16, 1, zerofn.Mesh.planned({"expert": 2}))

"""Hugging Face models that compute in float64 throughout: where they ask for float32 themselves, they get float64."""

import contextlib
import importlib
import sys
import types

import torch
import transformers

SMALL = {
    "vocab_size": 67, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6,
    "max_position_embeddings": 32, "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 18, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "intermediate_size": 36,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=35),
    "llama, 2 key heads": lambda: transformers.LlamaConfig(
        **{**SMALL, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2}, intermediate_size=35
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, intermediate_size=35, head_dim=4),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, intermediate_size=36, num_local_experts=6, num_experts_per_tok=2, experts_implementation="batched_mm"
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, intermediate_size=36, num_experts=6, head_dim=4
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SMALL, **EXPERTS, **LATENT),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=67, n_embd=24, n_layer=2, n_head=6, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=67, d_model=24, d_kv=4, d_ff=36, num_layers=2, num_heads=6, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0, use_cache=False,
    ),
    "bert": lambda: transformers.BertConfig(
        **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, intermediate_size=35, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
}  # fmt: skip
VARIANTS = {  # the load-balance loss is right where zerofn.moe.experts has been
    "mixtral, balanced": lambda: _with(CONFIGS["mixtral"](), output_router_logits=True, router_aux_loss_coef=0.5),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**SMALL, **EXPERTS, **LATENT),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL, intermediate_size=36, intermediate_size_mlp=36, num_local_experts=6, head_dim=4
    ),
    "mistral": lambda: transformers.MistralConfig(
        **{**SMALL, "num_key_value_heads": 3}, intermediate_size=36, sliding_window=9
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, intermediate_size=36, head_dim=4, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
    "llama, 4 layers": lambda: _with(CONFIGS["llama"](), num_hidden_layers=4),
    "gpt2, 4 layers": lambda: _with(CONFIGS["gpt2"](), n_layer=4),
    "gpt2, dropout": lambda: transformers.GPT2Config(
        vocab_size=67, n_embd=24, n_layer=6, n_head=6, n_positions=32, bos_token_id=1, eos_token_id=2
    ),
    "mixtral, 6 layers, balanced": lambda: _with(VARIANTS["mixtral, balanced"](), num_hidden_layers=6),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **{**SMALL, "num_hidden_layers": 6},
        **EXPERTS,
        intermediate_size=36,
        shared_expert_intermediate_size=18,
        num_experts=6,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
    "vit": lambda: transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        hidden_size=24,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=35,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    ),
    "llama, 6 layers": lambda: _with(CONFIGS["llama"](), num_hidden_layers=6),
    "t5, 3 layers": lambda: _with(CONFIGS["t5"](), num_layers=3, num_decoder_layers=3),
    "bert, 6 layers": lambda: _with(CONFIGS["bert"](), num_hidden_layers=6),
    "llama, tied": lambda: _with(CONFIGS["llama"](), tie_word_embeddings=True),
    "roberta": lambda: transformers.RobertaConfig(  # counts positions from its padding, tokens of which are in rows
        **{**CONFIGS["bert"]().to_dict(), "pad_token_id": 5, "is_decoder": True}
    ),
}
CLASSES = {  # by the first word of a name; the others are decoders
    "t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM", "vit": "ViTForImageClassification",
}  # fmt: skip


def _with(config, **values):
    for name, value in values.items():
        setattr(config, name, value)
    return config


class _Torch(types.ModuleType):
    """torch, with float64 under the name of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64():
    """While this is entered, transformers' models get float64 where they ask for float32."""
    names = (
        "llama mistral gemma3 qwen3 mixtral qwen3_moe deepseek_v2 deepseek_v3 llama4 gpt2 t5 bert roberta qwen2_moe vit"
    )
    for name in names.split():
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    found = [m for n, m in sys.modules.items() if n.startswith("transformers.") and vars(m).get("torch") is torch]
    to_float = torch.Tensor.float

    def wide(self):
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return self.double() if asked_by.startswith("transformers.") else to_float(self)

    try:
        for module in found:
            module.torch = _Torch("torch")
        torch.Tensor.float = wide
        yield
    finally:
        torch.Tensor.float = to_float
        for module in found:
            module.torch = torch


def build(name, layers=None):
    """The model, in float64. `layers`: how many, in place of the configuration's; of an encoder and of a decoder."""
    torch.manual_seed(0)
    config, kind = (
        (CONFIGS | VARIANTS)[name](),
        getattr(transformers, CLASSES.get(name.split(",")[0], "AutoModelForCausalLM")),
    )
    if layers is not None:
        names = ("num_hidden_layers", "num_decoder_layers")
        config = _with(config, **{k: layers for k in names if hasattr(config, k)})
    made = getattr(kind, "from_config", None) or kind._from_config
    return made(config, attn_implementation="eager").double()

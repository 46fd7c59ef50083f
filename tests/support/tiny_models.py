"""Small transformers models from their configurations, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_IMAGE = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48}


def _whisper_config() -> Any:
    return hf.WhisperConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def _t5_config() -> Any:
    return hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)


def _resnet_config() -> Any:
    return hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3)


BUILDERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=4)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, **_HEADS)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_TEXT, **_HEADS, num_local_experts=4)),
    "t5": lambda: hf.T5ForConditionalGeneration(_t5_config()),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_TEXT, num_attention_heads=4)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(_whisper_config()),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2)
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(**_IMAGE, num_hidden_layers=2, num_attention_heads=4, num_labels=3)
    ),
    "resnet": lambda: hf.ResNetForImageClassification(_resnet_config()),
}


def batch(name: str) -> dict[str, torch.Tensor]:
    """Keyword arguments for the model's forward."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 96, (2, 8), generator=generator)
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    if name == "whisper":
        features = torch.randn(2, 8, 20, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids}
    return {"input_ids": ids}

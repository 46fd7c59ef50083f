"""What every row of the benchmark trains: model, tokens, hyperparameters.

Nothing here imports ZeroFn or a peer, so both environments can read it.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

SEED = 0
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


@dataclasses.dataclass(frozen=True)
class Workload:
    """A Llama and the batch one rank sees a step: int64 tokens of shape (batch, seq)."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    batch: int
    seq: int

    kind = "Llama"

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.seq,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )

    def module(self) -> LlamaForCausalLM:
        """The module, its weights drawn from the generator as it stands."""
        return LlamaForCausalLM(self.config())

    def blocks(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The layers of a module of this kind, which users of FSDP2 wrap one by one."""
        yield from model.model.layers

    def build(self) -> LlamaForCausalLM:
        """The module with weights drawn from `SEED`: the same on every rank and in every system."""
        torch.manual_seed(SEED)
        return self.module()

    def num_parameters(self) -> int:
        with torch.device("meta"):
            model = self.module()
        return sum(p.numel() for p in model.parameters())


@dataclasses.dataclass(frozen=True)
class T5(Workload):
    """A T5 of as many layers in the encoder as in the decoder, which learns to repeat its input."""

    kind = "T5"

    def config(self) -> T5Config:
        return T5Config(
            d_model=self.hidden,
            d_ff=self.intermediate,
            d_kv=self.hidden // self.heads,
            num_layers=self.layers,
            num_decoder_layers=self.layers,
            num_heads=self.heads,
            vocab_size=self.vocab,
            dropout_rate=0.0,  # every system would draw other masks
            decoder_start_token_id=0,
            pad_token_id=0,
            use_cache=False,
        )

    def module(self) -> T5ForConditionalGeneration:
        return T5ForConditionalGeneration(self.config())

    def blocks(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        yield from (*model.encoder.block, *model.decoder.block)


@dataclasses.dataclass(frozen=True)
class GPT2(Workload):
    """A GPT-2 with dropout."""

    dropout: float = 0.1
    kind = "GPT-2"

    def config(self) -> GPT2Config:
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        return GPT2Config(
            n_embd=self.hidden,
            n_inner=self.intermediate,
            n_layer=self.layers,
            n_head=self.heads,
            vocab_size=self.vocab,
            n_positions=self.seq,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            **rates,
        )

    def module(self) -> GPT2LMHeadModel:
        return GPT2LMHeadModel(self.config())

    def blocks(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        yield from model.transformer.h


# 29.5 M parameters and 512 tokens a rank: about a second a step on one thread.
SMALL = Workload("small", hidden=512, intermediate=1376, layers=8, heads=8, vocab=4096, batch=2, seq=256)
# So little arithmetic that a step is dispatch: what Python and the dispatcher cost per operation.
TINY = Workload("tiny", hidden=32, intermediate=64, layers=4, heads=2, vocab=256, batch=1, seq=16)
# For trying the harness out: seconds a round.
SMOKE = Workload("smoke", hidden=128, intermediate=344, layers=2, heads=4, vocab=512, batch=2, seq=64)
# For capture: the arithmetic is nothing, each layer is a unit of its own (over 2^16 elements).
DEEP = {
    layers: Workload(
        f"{layers} layers", hidden=128, intermediate=344, layers=layers, heads=4, vocab=512,
        batch=1, seq=16,
    )
    for layers in (2, 12, 48)
}  # fmt: skip
WORKLOADS = {w.name: w for w in (SMALL, TINY, SMOKE)}
# For budgets of memory: activations weigh four times what the state does, as they do at length.
LLAMA = Workload("llama", hidden=256, intermediate=688, layers=8, heads=4, vocab=4096, batch=4, seq=256)
TRANSLATOR = T5("t5", hidden=256, intermediate=1024, layers=4, heads=4, vocab=4096, batch=4, seq=192)
BUDGETED = {w.name: w for w in (LLAMA, TRANSLATOR)}
# For what recomputation saves: deep, so that what crosses between layers is the little that it should be.
STACK = GPT2("gpt2", hidden=192, intermediate=768, layers=24, heads=6, vocab=2048, batch=2, seq=192)


def source_bytes(num_bytes: int) -> torch.Tensor:
    """The first `num_bytes` of the standard library's sources in name order, int64 (num_bytes,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            return torch.frombuffer(text, dtype=torch.uint8, count=num_bytes).long()
    raise RuntimeError(
        f"the standard library's sources hold {len(text)} bytes and {num_bytes} are needed: ask for fewer --steps."
    )


def batches(work: Workload, rank: int, world: int, num_steps: int) -> list[torch.Tensor]:
    """Rank `rank`'s part of each global batch, `num_steps` tensors of shape (batch, seq)."""
    tokens = source_bytes(num_steps * world * work.batch * work.seq)
    return list(tokens.view(num_steps, world, work.batch, work.seq)[:, rank].clone())

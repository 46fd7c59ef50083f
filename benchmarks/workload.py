"""What every row of the benchmark trains: model, tokens, hyperparameters.

Nothing here imports ZeroFn or a peer, so both environments can read it.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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

    def build(self) -> LlamaForCausalLM:
        """The module with weights drawn from `SEED`: the same on every rank and in every system."""
        torch.manual_seed(SEED)
        return self.module()

    def num_parameters(self) -> int:
        with torch.device("meta"):
            model = self.module()
        return sum(p.numel() for p in model.parameters())


# 29.5 M parameters and 512 tokens a rank: about a second a step on one thread.
SMALL = Workload(
    "small", hidden=512, intermediate=1376, layers=8, heads=8, vocab=4096, batch=2, seq=256
)
# So little arithmetic that a step is dispatch: what Python and the dispatcher cost per operation.
TINY = Workload("tiny", hidden=32, intermediate=64, layers=4, heads=2, vocab=256, batch=1, seq=16)
# For trying the harness out: seconds a round.
SMOKE = Workload(
    "smoke", hidden=128, intermediate=344, layers=2, heads=4, vocab=512, batch=2, seq=64
)
# For capture: the arithmetic is nothing, each layer is a unit of its own (over 2^16 elements).
DEEP = {
    layers: Workload(
        f"{layers} layers", hidden=128, intermediate=344, layers=layers, heads=4, vocab=512,
        batch=1, seq=16,
    )
    for layers in (2, 12, 48)
}  # fmt: skip
WORKLOADS = {w.name: w for w in (SMALL, TINY, SMOKE)}


def source_bytes(num_bytes: int) -> torch.Tensor:
    """The first `num_bytes` of the standard library's sources in name order, int64 (num_bytes,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            return torch.frombuffer(text, dtype=torch.uint8, count=num_bytes).long()
    raise RuntimeError(
        f"the standard library's sources hold {len(text)} bytes and {num_bytes} are needed: "
        "ask for fewer --steps."
    )


def batches(work: Workload, rank: int, world: int, num_steps: int) -> list[torch.Tensor]:
    """Rank `rank`'s part of each global batch, `num_steps` tensors of shape (batch, seq)."""
    tokens = source_bytes(num_steps * world * work.batch * work.seq)
    return list(tokens.view(num_steps, world, work.batch, work.seq)[:, rank].clone())

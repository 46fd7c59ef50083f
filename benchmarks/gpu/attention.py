"""python -m benchmarks.gpu.attention   (one GPU): a decoder of transformers with grouped heads, beside plain torch.

A Llama of 0.67 B parameters, 4 rows of 2,048 tokens, bf16 with fp32 masters, AdamW: which attention operations the
captured step calls, on how many heads of keys, how many masks of all pairs of tokens it keeps, its peak and its time;
the same model under torch's autocast with fused AdamW. Writes attention_gpu.json. `--dry-run`: tiny, on the CPU.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import zerofn
from benchmarks.common.report import surroundings
from zerofn import optim

RESULTS = Path(__file__).resolve().parents[1] / "results"
TOKENS, ROWS, STEPS = 2048, 4, 12
LARGE = {
    "hidden_size": 1920,  # another number than tokens, so that no activation looks like a mask
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 30,
    "num_key_value_heads": 6,
    "vocab_size": 32000,
}
TINY = dict.fromkeys(LARGE, 2) | {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def timed(step: Any, device: str) -> dict[str, float]:
    """Median milliseconds of a step, without the first two, and the peak bytes of the device."""

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(STEPS):
        began = now()
        step()
        took.append(1e3 * (now() - began))
    peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
    return {"ms": statistics.median(took[2:]), "peak_bytes": peak}


def run(device: str, tokens: int, sizes: dict[str, int]) -> dict[str, Any]:
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=tokens, use_cache=False, attn_implementation="sdpa"
    )

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    model = zerofn.skeleton(build, device=device)
    ids = torch.randint(sizes["vocab_size"], (ROWS, tokens), generator=torch.Generator().manual_seed(1)).to(device)

    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (), {"input_ids": ids, "labels": ids}).loss

    def train_step(state: Any, ids: torch.Tensor) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(ids)
        return state.apply_gradients(grads), loss

    def init() -> Any:
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.adamw(1e-4))

    state, step = zerofn.shard(init, stage=3, precision="bf16", device=device), zerofn.compile(train_step)
    nodes = step.lower(state, ids).graph.graph.nodes
    attention = [x for x in nodes if "attention" in str(x.target)]
    values = [x.meta.get("val") for x in nodes]
    found = {
        "operations": dict(collections.Counter(str(x.target) for x in attention)),
        "heads_of_keys": sorted({x.args[1].meta["val"].shape[1] for x in attention if "backward" not in str(x.target)}),
        "masks_of_all_pairs": sum(
            isinstance(x, torch.Tensor) and x.dim() > 2 and tuple(x.shape[-2:]) == (tokens, tokens) for x in values
        ),
    }

    def compiled() -> None:
        nonlocal state
        state, _ = step(state, ids)

    found["zerofn"] = timed(compiled, device)
    del state
    plain = build().to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)

    def by_torch() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return found | {"torch": timed(by_torch, device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for attention_gpu.json")
    options = parser.parse_args()
    found = run("cpu", 32, TINY) if options.dry_run else run("cuda", TOKENS, LARGE)
    found["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["device"] = "cpu" if options.dry_run else torch.cuda.get_device_name()
    found["surroundings"] = surroundings()
    (options.out / "attention_gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

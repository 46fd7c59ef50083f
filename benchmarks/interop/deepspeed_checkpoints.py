""".venv-peers/bin/python -m benchmarks.interop.deepspeed_checkpoints: checkpoints that DeepSpeed itself has written.

A small model with a frozen layer, a tied weight, a buffer and two parameter groups is trained for five steps on two
gloo ranks, at every stage, in fp32 and bf16, and saved to tests/interop/deepspeed_checkpoints/CASE.zip, with what
DeepSpeed's own functions read from it. `tests/interop/test_deepspeed_checkpoint.py` reads the same with ZeroFn.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

OUT = Path(__file__).parents[2] / "tests" / "interop" / "deepspeed_checkpoints"
RANKS, STEPS, ROWS = 2, 5, 4
CASES: dict[str, dict[str, Any]] = {
    **{f"stage{k}-fp32": {"zero_optimization": {"stage": k}} for k in range(4)},
    "stage0-fp32-one-group": {"zero_optimization": {"stage": 0}},
    **{f"stage{k}-bf16": {"zero_optimization": {"stage": k}, "bf16": {"enabled": True}} for k in (1, 2, 3)},
    "stage1-bf16-fp32-grads": {
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    },
}  # fmt: skip


class Tiny(nn.Module):
    """Odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 3)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.embed(ids)))
        return self.head(hidden).float().square().mean() + (self.out(hidden) * self.scale[0]).float().sum(-1).mean()


def _groups(module: nn.Module, name: str) -> list[Any]:
    learned = [x for x in module.parameters() if x.requires_grad]
    if name.endswith("one-group"):
        return learned
    return [
        {"params": [x for x in learned if x.dim() > 1], "weight_decay": 0.1},
        {"params": [x for x in learned if x.dim() == 1], "weight_decay": 0.0},
    ]


def _write(rank: int, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    import deepspeed

    deepspeed.init_distributed("gloo")
    for name, options in CASES.items():
        torch.manual_seed(0)
        module = Tiny()
        if name.endswith("one-group"):  # then moments have an order that says whose they are
            module.frozen.requires_grad_(True)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000000,
            **options,
        }
        engine, *_ = deepspeed.initialize(model=module, model_parameters=_groups(module, name), config=config)
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(100 * rank + step)
            engine.backward(engine(torch.randint(0, 7, (ROWS,), generator=draw)))
            engine.step()
        engine.save_checkpoint(f"{folder}/{name}", tag="last", client_state={"epoch": 3})
        if rank == 0 and not options["zero_optimization"]["stage"]:
            found = {}
            for key, x in ((k, x) for k, x in module.named_parameters() if x.requires_grad):
                state = engine.optimizer.state[x]
                found |= {
                    f"params.{key}": x,
                    f"exp_avg.{key}": state["exp_avg"],
                    f"exp_avg_sq.{key}": state["exp_avg_sq"],
                }
            _keep(found, f"{folder}/{name}")


def _keep(found: dict[str, torch.Tensor], folder: str) -> None:
    torch.save({k: v.detach().float().clone() for k, v in found.items()}, f"{folder}/expected.pt")


def _by_their_tool(folder: str) -> None:
    """What DeepSpeed's conversion to a universal checkpoint reads: fp32 masters and moments by name."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    command += [
        "--num_merge_workers",
        "1",
        "--inject_missing_state",
        "--input_folder",
        f"{folder}/last",
        "--output_folder",
        f"{folder}/universal",
    ]
    subprocess.run(command, check=True, env=os.environ | {"DS_ACCELERATOR": "cpu"}, stdout=subprocess.DEVNULL)
    found = {}
    for file in Path(f"{folder}/universal/zero").glob("*/*.pt"):
        if file.stem in ("fp32", "exp_avg", "exp_avg_sq"):
            kind = "params" if file.stem == "fp32" else file.stem
            kept = torch.load(file, weights_only=False)
            found[f"{kind}.{file.parent.name}"] = kept["param"] if isinstance(kept, dict) else kept
    shutil.rmtree(f"{folder}/universal")
    for extra in ("latest_universal",):
        Path(folder, extra).unlink(missing_ok=True)
    learned = {name for kind, _, name in (x.partition(".") for x in found) if kind == "exp_avg"}
    _keep({k: v for k, v in found.items() if k.partition(".")[2] in learned}, folder)  # not buffers and tied names


def main() -> None:
    """Write all cases."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_write, args=(port, folder), nprocs=RANKS)
        for name, options in CASES.items():
            if options["zero_optimization"]["stage"]:
                _by_their_tool(f"{folder}/{name}")
            shutil.make_archive(str(OUT / name), "zip", f"{folder}/{name}")


if __name__ == "__main__":
    main()

""".venv-peers/bin/python -m benchmarks.interop.deepspeed_losses: what DeepSpeed does with some configurations.

Twenty steps of a small model in fp32, on two gloo ranks, at every stage, by DeepSpeed itself: the losses of rank 0 go
to results/deepspeed_losses.json. `tests/interop/test_deepspeed_losses.py` trains the same from the same configurations
by `zerofn.from_deepspeed`, and compares.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

RESULT = Path(__file__).parents[1] / "results" / "deepspeed_losses.json"
RANKS, STEPS, ROWS = 2, 20, 4  # rows of a microbatch
STAGES = range(4)

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1, "torch_adam": True}}
CONFIGS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": ADAMW, "gradient_clipping": 0.0},
    "AdamW, clipped by default, accumulating": {"optimizer": ADAMW, "gradient_accumulation_steps": 2},
    "Adam is AdamW": {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "torch_adam": True}}},
    "Adam with L2": {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False},
        },
    },
    "SGD, WarmupLR": {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 8}},
    },
    "WarmupDecayLR": {
        "optimizer": ADAMW,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 16, "warmup_num_steps": 5, "warmup_max_lr": 0.02, "warmup_type": "linear",
            },
        },
    },
    "WarmupCosineLR": {
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 16, "warmup_num_steps": 5}},
    },
    "OneCycle": {
        "optimizer": ADAMW,
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 5, "cycle_second_step_size": 7,
                "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_momentum": False,
            },
        },
    },
    "LRRangeTest": {
        "optimizer": ADAMW,
        "scheduler": {
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0,
                "lr_range_test_staircase": True,
            },
        },
    },
    "Adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 0.05}}, "zero_force_ds_cpu_optimizer": False},
    "RMSprop": {"optimizer": {"type": "RMSprop", "params": {"lr": 0.005, "momentum": 0.5}}},
}  # fmt: skip


def config_of(name: str, stage: int) -> dict[str, Any]:
    """A whole configuration."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
        **CONFIGS[name],
    }


def model() -> torch.nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 24), torch.nn.Tanh(), torch.nn.Linear(24, 5), torch.nn.Linear(5, 3))


def batch(rank: int, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's inputs and targets of a step."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, 7, generator=draw), torch.randn(rows, 3, generator=draw)


def _theirs(rank: int, port: int, out: str) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    import deepspeed

    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {}
    for name in CONFIGS:
        for stage in STAGES:
            try:
                found.setdefault(name, {})[str(stage)] = _losses(deepspeed, rank, config_of(name, stage))
            except Exception as error:  # what it refuses is a result, too
                found.setdefault(name, {})[str(stage)] = f"{type(error).__name__}: {error}"
    if rank == 0:
        Path(out).write_text(json.dumps({"deepspeed": deepspeed.__version__, "torch": torch.__version__} | found))


def _losses(deepspeed: Any, rank: int, config: dict[str, Any]) -> list[float]:
    module = model()
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    steps, losses = config.get("gradient_accumulation_steps", 1), []
    for step in range(STEPS):
        inputs, targets = batch(rank, step, ROWS * steps)
        total = 0.0
        for x, y in zip(inputs.chunk(steps), targets.chunk(steps), strict=True):
            loss = (engine(x) - y).square().mean()
            engine.backward(loss)
            engine.step()
            total += float(loss) / steps
        mean = torch.tensor(total)
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / RANKS)
    return losses


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_theirs, (port, f"{RESULT}.new"), nprocs=RANKS)
    found = json.loads(Path(f"{RESULT}.new").read_text())
    Path(f"{RESULT}.new").unlink()
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    for name in CONFIGS:
        print(name, *(f"{x[-1]:.6f}" if isinstance(x, list) else x[:60] for x in found[name].values()), sep="  ")


if __name__ == "__main__":
    main()

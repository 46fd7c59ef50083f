"""One rank of transformers' Trainer, on DeepSpeed or on ZeroFn: trainer_worker SYSTEM --rank R --world N --port P.

A small model is trained first, so that what is imported on the way is imported; then peak and times are taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import measure
from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, SMOKE, WEIGHT_DECAY, WORKLOADS, Workload

SKIPPED = 3  # steps that are not timed: capture, and buffers that are made


def arguments(work: Workload, steps: int, folder: str) -> dict[str, Any]:
    """What both Trainers get."""
    return {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": work.batch, "use_cpu": True,
        "learning_rate": LEARNING_RATE, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def deepspeed_config(stage: int) -> dict[str, Any]:
    """With DeepSpeed's defaults."""
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": params},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
    }


def rows(work: Workload, count: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, work.vocab, (count, work.seq), generator=draw)
    return [{"input_ids": x, "labels": x} for x in tokens]


def train(system: str, work: Workload, world: int, steps: int) -> dict[str, Any]:
    """Train, and return losses and milliseconds of every step."""
    import transformers

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    name, stage = system.rsplit(" ", 1)
    with tempfile.TemporaryDirectory() as folder:
        given = arguments(work, steps, folder)
        data = {"train_dataset": rows(work, work.batch * world * steps), "callbacks": [Clock()]}
        if name == "ZeroFn":
            from zerofn.integrations.transformers import Trainer, TrainingArguments

            trainer = Trainer(model_init=work.build, args=TrainingArguments(**given, stage=int(stage)), **data)
        else:
            args = transformers.TrainingArguments(**given, deepspeed=deepspeed_config(int(stage)))
            trainer = transformers.Trainer(model=work.build(), args=args, **data)
        trainer.train()
    taken = [1e3 * (b - a) for a, b in zip(ends, ends[1:], strict=False)]
    return {"losses": [x["loss"] for x in trainer.state.log_history if "loss" in x], "ms": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    for name in ("rank", "world", "port", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(options.rank), "LOCAL_RANK": str(options.rank), "WORLD_SIZE": str(options.world),
        "LOCAL_WORLD_SIZE": str(options.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port),
        "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    work = WORKLOADS[options.workload]
    train(options.system, SMOKE, options.world, 2)
    gc.collect()
    before = measure.memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    found = train(options.system, work, options.world, options.steps)
    peak = measure.memory_bytes("VmHWM") - before
    ms = statistics.median(found["ms"][SKIPPED - 1 :])
    print("RESULT " + json.dumps({"losses": found["losses"], "ms": ms, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()

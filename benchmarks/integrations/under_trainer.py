"""transformers' Trainer, on DeepSpeed or on ZeroFn: `train` of one rank."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Workload
from benchmarks.integrations.rows import rows


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


def train(system: str, work: Workload, world: int, steps: int) -> dict[str, Any]:
    """Train, and return the loss and the end of every step, in seconds."""
    import accelerate
    import transformers
    from accelerate.state import AcceleratorState

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
            # With use_cpu Accelerate takes DDP, and says nothing of it; without, it has to be told of gloo and the CPU.
            os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
            AcceleratorState._reset_state(reset_partial_state=True)  # of a training before, as transformers does
            accelerate.PartialState(backend="gloo")
            given |= {"use_cpu": False, "accelerator_config": {"use_configured_state": True}}
            args = transformers.TrainingArguments(**given, deepspeed=deepspeed_config(int(stage)))
            trainer = transformers.Trainer(model=work.build(), args=args, **data)
        trainer.train()
        if name == "DeepSpeed" and type(trainer.model_wrapped).__name__ != "DeepSpeedEngine":
            raise RuntimeError(f"this is no DeepSpeed, but {type(trainer.model_wrapped).__name__}")
    return {"losses": [x["loss"] for x in trainer.state.log_history if "loss" in x], "ends": ends}

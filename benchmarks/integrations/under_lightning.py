"""Lightning's Trainer, on DeepSpeed or on ZeroFn: `train` of one rank."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Workload
from benchmarks.integrations.rows import rows


def strategy_of(system: str) -> Any:
    """A row's strategy, with its defaults."""
    name, _, stage = system.partition(" ")
    if name == "ZeroFn":
        from zerofn.integrations.lightning import ZeroFnStrategy

        return ZeroFnStrategy(stage=int(stage))
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class OnCPUs(DeepSpeedStrategy):
        """Lightning looks for CUDA's devices, and refuses others; DeepSpeed itself does not."""

        def setup_environment(self) -> None:
            super(DeepSpeedStrategy, self).setup_environment()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    given = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": int(stage)}}
    return OnCPUs(config=given, process_group_backend="gloo")


def train(system: str, work: Workload, world: int, steps: int) -> dict[str, Any]:
    """Train, and return the loss and the end of every step, in seconds."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    ends: list[float] = []
    losses: list[float] = []

    class Llama(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            options = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
            return torch.optim.AdamW(self.parameters(), **options)

    class Clock(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))
            ends.append(time.perf_counter())

    trainer = pl.Trainer(
        strategy=strategy_of(system), accelerator="cpu", devices=world, max_steps=steps, callbacks=[Clock()],
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Llama(), DataLoader(rows(work, work.batch * world * steps), batch_size=work.batch))
    return {"losses": losses, "ends": ends}

"""Lightning's Trainer as tests run it: on the host, without a word, with nothing saved."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:It is recommended to use"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*log_every_n_steps"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*srun. command is available"),
]
_OFF = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")


def trainer_of(strategy: Any = "auto", **more: Any) -> pl.Trainer:
    """A trainer with these arguments, which come before those of all tests."""
    return pl.Trainer(
        **{"strategy": strategy, "accelerator": "cpu", "devices": 1, **dict.fromkeys(_OFF, False), **more}
    )

"""TRL's trainers with ZeroFn's step: change two import lines of a script.

from zerofn.integrations.trl import SFTConfig, SFTTrainer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trl
from torch import Tensor, nn

from .transformers.arguments import OurArguments
from .transformers.trainer import Trainer


@dataclass
class SFTConfig(OurArguments, trl.SFTConfig):
    """TRL's `SFTConfig`, and what ZeroFn's `TrainingArguments` add: `stage`, `memory`, `offload`, `remat`, `mesh`."""


@dataclass
class DPOConfig(OurArguments, trl.DPOConfig):
    """The same for `DPOTrainer`."""


@dataclass
class RewardConfig(OurArguments, trl.RewardConfig):
    """The same for `RewardTrainer`."""


class SFTTrainer(Trainer, trl.SFTTrainer):
    """TRL's `SFTTrainer` with ZeroFn's step; see `Trainer`. Raises `TypeError` for arguments of another class."""

    def __init__(self, model: Any, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, _checked(args, SFTConfig), **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Take a microbatch; see `Trainer`. Positions that batches without padding are filled up with do not count."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.padding_free:
            self._total_train_tokens -= self._padding.added
            if not self._micro:
                self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss


class DPOTrainer(Trainer, trl.DPOTrainer):
    """TRL's `DPOTrainer` with ZeroFn's step; see `Trainer`. Raises `TypeError` for arguments of another class.

    The reference model is whole on every rank, unless the model has adapters: then it is the model without them.
    """

    _masks = ("completion_mask",)

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, _checked(args, DPOConfig), ref_model=ref_model, **kwargs)
        if self.ref_model is not None:
            self.ref_model.requires_grad_(False)


class RewardTrainer(Trainer, trl.RewardTrainer):
    """TRL's `RewardTrainer` with ZeroFn's step; see `Trainer`. Raises `TypeError` for arguments of another class."""

    def __init__(self, model: Any, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, _checked(args, RewardConfig), **kwargs)


def __getattr__(name: str) -> Any:
    if name in dir(trl) and name.endswith(("Trainer", "Config")):
        raise ImportError(
            f"zerofn.integrations.trl has no {name}: ZeroFn supports SFTTrainer, DPOTrainer and RewardTrainer, but not "
            "trainers that generate text inside their steps. Generate under trainer.whole_model(), and train with one "
            "of the three."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _checked(args: Any, kind: type) -> Any:
    """Return the arguments, or the usual ones."""
    if args is None:
        return kind(output_dir="tmp_trainer")
    if not isinstance(args, kind):
        raise TypeError(
            f"{kind.__name__.replace('Config', 'Trainer')}: args is a {type(args).__module__}.{type(args).__name__}. "
            f"Import {kind.__name__} from zerofn.integrations.trl, too."
        )
    return args

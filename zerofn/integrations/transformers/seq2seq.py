"""`Seq2SeqTrainer`: the same for models that generate."""

from __future__ import annotations

import contextlib
from typing import Any

import transformers

from .trainer import Trainer


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """transformers' `Seq2SeqTrainer` with ZeroFn's step; see `Trainer`.

    With `predict_with_generate` every rank has the whole model while it evaluates: generation calls the model's own
    `generate`.
    """

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop, with the whole model where it generates."""
        with self.whole_model() if self.args.predict_with_generate else contextlib.nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training and self.args.predict_with_generate:
            return model
        return super()._wrap_model(model, training, dataloader)

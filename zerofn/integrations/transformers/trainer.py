"""`Trainer`: transformers' loop, data, callbacks and reports around ZeroFn's state and compiled steps."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import zerofn

from ..carried_state import relaid
from ..effects import Effects
from ..live_module import Live, is_live, parameters_of
from ..modules import buffers_to, is_shape_only, saved_buffers
from ..param_groups import let_go
from .adapters import as_saved, check_adapters, has_adapters, load_adapters, save_adapters, save_beside
from .arguments import OurArguments, TrainingArguments
from .evaluation import EvaluatedModel, outputs_of
from .meshes import TrainerOnMesh
from .modules import calls_as_autocast
from .names import exported, loaded
from .optimizers import Followed, check_alike, groups_of, load_rates, number_of, own_optimizer, save_rates
from .packing import packed_by_positions
from .padding import MULTIPLE, Padding
from .steps import Microbatch, check_overrides, compiled_step, microbatch_of, stack

STATE = "zerofn"  # the folder in a checkpoint that has the state
_CONTRADICTS = {
    "torch_compile": "the step is captured and scheduled by zerofn.compile",
    "auto_find_batch_size": "zerofn.plan says what fits before anything runs",
    "use_liger_kernel": "its kernels take gradients by themselves",
}


class Trainer(TrainerOnMesh):
    """transformers' `Trainer`, whose training step is one of ZeroFn's.

        trainer = Trainer(model_init=build, args=TrainingArguments(..., stage=3), train_dataset=...)

    The values of the model's parameters are in shards. With `model_init` no rank ever holds all of them; a `model` with
    values is cut, and then lets go of them. Outside of the step parameters are gathered where they are used: all ranks
    must use the same. The loss is `compute_loss`'s, the model's own or one that a subclass defines; the step is
    captured, so that it must not branch on what is in the batch. The optimizer is the one that the arguments name or a
    subclass makes, translated (AdamW, Adam, SGD, Adagrad, Adafactor, RMSprop); every step reads its learning rates,
    which any scheduler and callback may set. Batches whose rows differ in length are padded on the right, to the
    longest of all ranks, and from the second length on to multiples of `pad_to_multiple_of`; those that are padded on
    the left, or have no mask, stay as they are. In half precision the model computes as under autocast,
    and returns float32. Evaluation runs on shards, too. `save_model` writes what `from_pretrained` opens; checkpoints
    have ZeroFn's state beside it, and resume on any number of ranks.

    Raises `ValueError` for options without an effect here, and those of `zerofn.shard` and `zerofn.compile`.
    """

    optimizer: Any
    lr_scheduler: Any

    _masks: Sequence[str] = ()  # inputs beside transformers' own that are 0 where nothing counts

    def __init__(self, model: nn.Module | None = None, args: Any = None, **kwargs: Any) -> None:
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, OurArguments):
            raise TypeError(
                "Trainer: args is a TrainingArguments of transformers. Import TrainingArguments from "
                "zerofn.integrations.transformers, too."
            )
        for name, why in _CONTRADICTS.items():
            if getattr(args, name, None):
                raise ValueError(f"TrainingArguments: {name} has no effect with ZeroFn: {why}. Leave it out.")
        self._sharded: Any = None
        self._live: Live | None = None
        self._step: Any = None
        self._micro: list[Microbatch] = []
        self._norm: Tensor | None = None
        self._groups: Any = None
        self._optimizes: Any = None  # the torch optimizer that the state's moments are of
        self._skipped, self._clips_at = 0, 0.0
        args.take()
        args.device  # noqa: B018  (joins the ranks)
        self.use_mesh(args.axes)
        super().__init__(model=model, args=args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        """Take the model that is there."""
        if is_shape_only(self.model) and self.model_init is None:
            raise ValueError(
                "Trainer: the model's parameters have no values. Pass model_init=lambda: ..., a function that builds "
                "the model."
            )
        if not is_shape_only(self.model):
            self.cut(self.model)
        ignored = getattr(self.data_collator, "label_pad_token_id", -100)
        multiple = getattr(self.args, "pad_to_multiple_of", None)  # TRL's may be None
        self._padding = Padding(self.model, self._processor(), ignored, self._masks, multiple or MULTIPLE)
        self._evaluation_padding = self._padding.twin()
        self._evaluated = EvaluatedModel(lambda: self.model, self._evaluate_step)
        self._kept = Effects(self, "forward", type(self), model="model")
        memory = {k: v for k, v in self.args.compile_options.items() if k == "memory"}
        self._evaluation = zerofn.compile(outputs_of(self, self._kept), **memory)

    def _follow_model(self) -> None:
        """Let go of a model in whose place another one was put."""
        if self._live is not None and self._live.module is not self.model:
            self._live.part()
            self._sharded = self._live = self._optimizes = None
            self._begin()

    def _processor(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    # ---- the model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a model with the shapes of its parameters. Every run begins with one, and with a state of its own."""
        if self._live is not None:
            self._live.part()
        self._sharded, self._live, self._trial = None, None, trial
        model = zerofn.skeleton(lambda: super(Trainer, self).call_model_init(trial).train())
        return self.cut(model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if is_shape_only(model) or is_live(model):
            buffers_to(model, device)
        else:
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            self._need_state()
            return self._evaluated
        return model

    def _parameters(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (parameters, buffers) to begin with."""
        if not is_shape_only(self.model):
            model = self.model
        else:
            transformers.set_seed(self.args.seed)
            model = super().call_model_init(self._trial)
        return dict(parameters_of(model)), saved_buffers(model)

    # ---- the state and the step

    @property
    def sharded(self) -> Any:
        """The `TrainState`, with what was written to the model; None before there is one."""
        if self._live is not None:
            self._live.settle()
        return self._sharded

    @sharded.setter
    def sharded(self, state: Any) -> None:
        self._sharded = state
        if self._live is not None:
            self._live.renew()

    def _take(self, state: Any) -> None:
        self._sharded = state

    def _need_state(self) -> None:
        """Make a state to evaluate, or to save, before any training."""
        self._follow_model()
        if self.sharded is None:
            self._make_state()

    def _make_state(self) -> None:
        """Make the state if there is none; else give it the optimizer of this run."""
        tx = zerofn.optim.identity() if self._groups is None else self._groups.tx
        if self.sharded is not None:
            self.sharded = relaid(self.sharded, self.model, tx, **self._shard_options())
            return

        def create() -> Any:
            params, extra = self._parameters()
            return zerofn.TrainState.create(params=params, tx=tx, seed=self.args.seed, extra=extra or None)

        first: Any = create if is_shape_only(self.model) else create()
        self.sharded = zerofn.shard(first, **self._shard_options())
        del first
        self._give_values()

    def _shard_options(self) -> dict[str, Any]:
        return {"device": self.args.device, **self.args.shard_options, **self.mesh_options()}

    def _with_rates(self) -> Any:
        """Return the state with what is said now: rates, momentum, groups, what is trained, and the norm that clips."""
        before, self._clips_at = self._clips_at, self.args.max_grad_norm
        if self._groups.has_changed() or before != self._clips_at:
            state = self.sharded
            self._groups = self._groups.renewed(state.opt_state)
            if before != self._clips_at:
                self._groups = groups_of(self._optimizes, self.model, "trainer.optimizer", self._clips_at, self._groups)
            moments = self._groups.with_moments
            self.sharded = relaid(state, self.model, self._groups.tx, moments=moments, **self._shard_options())
        state = self.sharded
        return dataclasses.replace(state, opt_state=self._groups.with_rates(state.opt_state))

    def _give_values(self) -> None:
        """Let the model have the state's parameters, and the optimizer the model's."""
        before = dict(self.model.named_parameters())
        self._live = Live(self.model, lambda: self._sharded, self._take)
        as_saved(self.model)
        if self._optimizes is not None:
            let_go(self._optimizes, {id(p): self._live.parameters[name] for name, p in before.items()})

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler that the arguments name, or a DeepSpeed file."""
        rates = self.args.schedule_of_deepspeed(num_training_steps)
        if self.lr_scheduler is not None or rates is None:
            return super().create_scheduler(num_training_steps, optimizer)
        optimizer = self.optimizer if optimizer is None else optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1.0
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _follow_optimizer(self, max_steps: int) -> None:
        """Make the optimizer and the scheduler as transformers does, and a state whose updates they say."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        made_by = "optimizers=" if self.optimizer is not None else f"{type(self).__name__}.create_optimizer"
        if isinstance(self.optimizer, Followed):
            made_by = "trainer.optimizer (None lets a new one be made)"
        self.create_optimizer()
        optimizer = own_optimizer(self.optimizer)
        if self.sharded is None or optimizer is not self._optimizes:
            self._clips_at = self.args.max_grad_norm
            self._groups = groups_of(optimizer, self.model, made_by, self._clips_at)
            self._optimizes = optimizer
            self._make_state()
        if not isinstance(self.optimizer, Followed):
            self.optimizer = Followed(optimizer)
        self.optimizer = self.accelerator.prepare_optimizer(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._follow_model()
        check_overrides(self)
        if has_adapters(self.model):
            check_adapters(self.model)
        self._follow_optimizer(max_steps)
        if resume_from_checkpoint is not None:
            path = Path(resume_from_checkpoint) / STATE
            self.sharded = zerofn.load(path, like=self.sharded, donate=True)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        self._effects = Effects(self, "compute_loss", transformers.Trainer, ("log",), "model", ("step_context",))
        self._step, self._micro = compiled_step(self, self._effects), []
        self._skipped = int(self.sharded.skipped)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _prepare_inputs(self, inputs: Any) -> Any:
        return packed_by_positions(super()._prepare_inputs(inputs), self.model)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Take a microbatch; at an update's last one, run the step. Returns its loss, of all ranks and microbatches."""
        model.train()
        given = {k: v for k, v in self._prepare_inputs(inputs).items() if v is not None}
        padded = self._padding(given, number_of(self.optimizer, self.args.max_grad_norm))
        self._micro.append(microbatch_of(self, padded, num_items_in_batch, self._padding.kind))
        check_alike(self._padding.said, self.optimizer, self.args.max_grad_norm)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro, self._micro = self._micro, []
        longer = self._padding.as_long([x.inputs for x in micro], [x.kind for x in micro])
        parts, stacked = stack([x._replace(inputs=y) for x, y in zip(micro, longer, strict=True)])
        batch = {"parts": parts, "stacked": stacked}
        assert self._live is not None
        state = self._with_rates()
        with self._live.in_step():
            self.sharded, aux = self._step(state, batch)
        for results in aux["effects"]:
            self._effects.replay(results, stacked if stacked > 1 else None)
        self._note_update()
        self._norm = aux["grad_norm"]
        return aux["loss"].to(self.args.device)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm

    _clip_grad_norm = _get_grad_norm

    def _note_update(self) -> None:
        """Tell the optimizer, and under float16 whether the update was skipped, so that the scheduler waits, too."""
        self.optimizer.updated = True
        if self.args.fp16:
            before, self._skipped = self._skipped, int(self._sharded.skipped)
            self.optimizer.was_skipped = self._skipped > before

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as transformers does. Once updates were skipped, training logs say how many, as `skipped_updates`."""
        if "grad_norm" in logs and (skipped := int(self._sharded.skipped)):
            logs = {**logs, "skipped_updates": skipped}
        super().log(logs, start_time)

    # ---- evaluation

    @contextlib.contextmanager
    def in_precision(self) -> Iterator[None]:
        """Make the context in which compiled steps call the model."""
        with self.step_on_mesh(), calls_as_autocast(self.model, self.args.device, self.args.computes_in):
            yield

    @contextlib.contextmanager
    def step_context(self) -> Iterator[None]:
        """Make the context in which the compiled step computes losses."""
        with self.compute_loss_context_manager(), self.in_precision():
            yield

    def _evaluate_step(self, inputs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and self.args.axes is None and self.args.evaluates_in is None:
            with self.in_precision():  # with a graph, in which the model's own parameters are
                return self.model(**inputs)
        padded, state = self._evaluation_padding(inputs), self.sharded
        values = {"params": state.params, "buffers": state.extra or {}}
        found, results = self._evaluation(values, padded)
        self._kept.replay(results)
        return self._evaluation_padding.cut(found, inputs, padded)

    def whole_model(self) -> Any:
        """Return a context in which `self.model` has its parameters, on every rank: to generate, or to look at them.

        All ranks must enter it. It takes the memory of the whole model, in the dtype of the master.
        """
        self._need_state()
        assert self._live is not None
        return self._live.whole()

    # ---- what is saved

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` opens: weights or, of PEFT's models, adapters; configuration, tokenizer. All
        ranks must call it.
        """
        self._need_state()
        out = Path(output_dir or self.args.output_dir)
        whole, adapted = _internal_call and not self.args.save_only_model, has_adapters(self.model)
        path = out / (STATE if whole else f"{STATE}-export")
        state = self.sharded
        if whole or not adapted:
            zerofn.save(path, state if whole else {"params": state.params, "extra": state.extra})
        if adapted:
            save_adapters(self.model, out, self.args.should_save)
        if self.args.should_save:
            if not adapted:
                zerofn.export(path, out, part="", max_shard_size="5GB", rename=exported(self.model))
            if not whole and not adapted:
                shutil.rmtree(path)
            save_beside(self.model, self._processor(), self.args, out)
        # No rank goes on, and perhaps opens the folder, before the first has written it.
        zerofn.collectives.all_reduce(torch.zeros((), device=self.args.device), zerofn.Mesh.of(None).all)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write rates; moments are in the state, which `save_model` has saved."""
        if self.args.should_save:
            save_rates(self.optimizer, self.lr_scheduler, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read rates; moments are in the state."""
        if checkpoint is not None:
            load_rates(self.optimizer, self.lr_scheduler, checkpoint)

    def _save_scaler(self, output_dir: str) -> None:
        """It is in the state."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """It is in the state."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that there is a state; it is loaded once its layout is known."""
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            raise ValueError(
                f"Trainer: {resume_from_checkpoint} has no folder {STATE!r}, because it was saved by another Trainer, "
                "or with save_only_model=True. Start from its weights: from_pretrained(...)."
            )

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / STATE).is_dir():
            for part in ("params", "extra") if self.sharded.extra else ("params",):
                self.sharded = zerofn.load(best / STATE, like=self.sharded, only=part)
        elif has_adapters(self.model):
            load_adapters(self.model, best)
        else:
            params = zerofn.load_safetensors(best, like=self.sharded.params, rename=loaded(self.model))
            self.sharded = dataclasses.replace(self.sharded, params=params)

"""`Trainer`: transformers' loop, data, callbacks and reports around ZeroFn's state and compiled steps."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call

import zerofn

from ..live import Live, is_live, parameters_of
from ..losses import LossesInFloat32
from ..modules import buffers_to, is_shape_only
from ..torch_optimizers import translated
from .arguments import Seq2SeqTrainingArguments, TrainingArguments
from .modules import EvaluatedModule, LossModule, tensors_of
from .padding import Padding

STATE = "zerofn"  # the folder in a checkpoint that has the state
_CONTRADICTS = {
    "torch_compile": "the step is captured and scheduled by zerofn.compile",
    "auto_find_batch_size": "zerofn.plan says what fits before anything runs",
    "neftune_noise_alpha": "its hook draws outside the step's key; add the noise in the model",
    "use_liger_kernel": "its kernels take gradients by themselves",
}


class Trainer(transformers.Trainer):
    """transformers' `Trainer`, whose training step is one of ZeroFn's.

        trainer = Trainer(model_init=build, args=TrainingArguments(..., stage=3), train_dataset=...)

    The values of the model's parameters are in shards. With `model_init` no rank ever holds all of them; a `model` with
    values is cut, and then lets go of them. Outside of the step parameters are gathered where they are used: all ranks
    must use the same. The loss is `compute_loss`'s, the model's own or
    one that a subclass defines; the step is captured, so that it must not branch on what is in the batch. Optimizers
    and schedules are those that the arguments name, translated (AdamW, Adam, SGD, Adagrad, Adafactor, RMSprop).
    Batches whose rows differ in length are padded to the longest of all ranks, and from the second length on to
    multiples of 16. In half precision losses are computed in float32, as under autocast. Evaluation runs on shards,
    too. `save_model` writes what `from_pretrained` opens; checkpoints have ZeroFn's state beside it, and resume on any
    number of ranks.

    Raises `ValueError` for options without an effect here, and those of `zerofn.shard` and `zerofn.compile`.
    """

    def __init__(self, model: nn.Module | None = None, args: Any = None, **kwargs: Any) -> None:
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, TrainingArguments | Seq2SeqTrainingArguments):
            raise TypeError(
                "Trainer: args is of transformers; import TrainingArguments from zerofn.integrations.transformers, too."
            )
        for name, why in _CONTRADICTS.items():
            if getattr(args, name, None):
                raise ValueError(f"TrainingArguments: {name} has no effect with ZeroFn: {why}. Leave it out.")
        if any(x is not None for x in kwargs.get("optimizers") or ()):
            raise ValueError(
                "Trainer: optimizers= are torch's and hold a model's tensors; name them by optim= and "
                "lr_scheduler_type=."
            )
        self._sharded: Any = None
        self._live: Live | None = None
        self._step: Any = None
        self._micro: list[dict[str, Any]] = []
        self._norm: Tensor | None = None
        args.take()
        super().__init__(model, args, **kwargs)
        if is_shape_only(self.model) and self.model_init is None:
            raise ValueError(
                "Trainer: the model has no values, and nothing says which; pass model_init=lambda: ..., which "
                "builds it."
            )
        ignored = getattr(self.data_collator, "label_pad_token_id", -100)
        self._padding, self._evaluation_padding = (Padding(self.model, self._processor(), ignored) for _ in range(2))
        self._evaluated = EvaluatedModule(lambda: self.model, self._evaluate_step)
        self._evaluation = zerofn.compile(self._outputs, **self._evaluation_options())

    def _processor(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _evaluation_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.args.compile_options.items() if k == "memory"}

    # ---- the model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return the model with the shapes of its parameters."""
        return zerofn.skeleton(lambda: super(Trainer, self).call_model_init(trial).train())

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if is_shape_only(model) or is_live(model):
            buffers_to(model, device)
        else:
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:
            self._need_state()
            return self._evaluated
        return model

    def _parameters(self) -> dict[str, Tensor]:
        if self.model_init is None:
            return dict(parameters_of(self.model))
        transformers.set_seed(self.args.seed)
        return dict(super().call_model_init().named_parameters())

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
        if self.sharded is None:
            self._make_state(1)

    def _make_state(self, max_steps: int) -> None:
        """Make the state if there is none; else give it the schedule of this run."""
        tx = self._optimizer(max_steps)
        if self.sharded is not None:
            self.sharded = dataclasses.replace(self.sharded, tx=tx)
            self._give_values()
            return

        def create() -> Any:
            return zerofn.TrainState.create(params=self._parameters(), tx=tx, seed=self.args.seed)

        if self.model_init is None:
            first: Any = create()
        else:
            first = create
        self.sharded = zerofn.shard(first, device=self.args.device, **self.args.shard_options)
        del first
        self._give_values()

    def _give_values(self) -> None:
        """Let the model have the state's parameters."""
        if self._live is None or self._live.module is not self.model:
            self._live = Live(self.model, lambda: self._sharded, self._take)

    def _optimizer(self, max_steps: int) -> Any:
        """Return the transformation that the arguments name, with the whole schedule as a table."""
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        decaying = set(self.get_decay_parameter_names(self.model))
        options = {"weight_decay": self.args.weight_decay, **options}
        tx = translated(kind.__name__, options, self._schedule(max_steps), lambda leaf: leaf.name in decaying)
        norm = self.args.max_grad_norm
        return zerofn.optim.chain(zerofn.optim.clip_by_global_norm(norm), tx) if norm and norm > 0 else tx

    def _schedule(self, max_steps: int) -> Callable[[Tensor], Tensor]:
        """Return the learning rate of every update, as transformers' scheduler gives them one after the other."""
        scheduler = self._new_scheduler(max_steps)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "get_last_lr"):
            raise ValueError(
                f"TrainingArguments: lr_scheduler_type={self.args.lr_scheduler_type!r} follows metrics, and is not "
                "known before the run; name one that follows steps."
            )
        rates = []
        for _ in range(max_steps + 1):
            rates.append(scheduler.get_last_lr()[0])
            scheduler.optimizer.step()
            scheduler.step()
        table = torch.tensor(rates)
        return lambda count: torch.take(table.to(count.device), count.clamp(max=max_steps))

    def _new_scheduler(self, max_steps: int) -> Any:
        theirs = self.args.schedule_of_deepspeed(max_steps)
        if theirs is not None:
            return torch.optim.lr_scheduler.LambdaLR(_Rates(1.0), theirs)
        return transformers.get_scheduler(
            self.args.lr_scheduler_type,
            optimizer=_Rates(self.args.learning_rate),
            num_warmup_steps=self.args.get_warmup_steps(max_steps),
            num_training_steps=max_steps,
            scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
        )

    def _follow_schedule(self, max_steps: int) -> None:
        """Let callbacks and reports have an optimizer and a scheduler, which have learning rates and nothing else."""
        self.lr_scheduler = self._new_scheduler(max_steps)
        self.optimizer = self.lr_scheduler.optimizer

    def _compiled_step(self) -> Any:
        """Return the step over all microbatches of an update: `parts`, one after the other, each of which is `stacked`
        of equal shape. `shares`: whether the losses of microbatches add up to the step's, or are averaged.
        """
        loss_module = LossModule(self.model, self.compute_loss)
        clipped = bool(self.args.max_grad_norm and self.args.max_grad_norm > 0)

        def loss_fn(params: dict[str, Tensor], inputs: dict[str, Any], num_items: Any, factor: float) -> Tensor:
            named = {f"model.{name}": x for name, x in params.items()}
            return functional_call(loss_module, named, (inputs, num_items)) * factor

        def train_step(state: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
            parts, num_items, stacked = batch["parts"], batch["num_items"], batch["stacked"]
            factor = 1.0 if batch["shares"] else 1.0 / (stacked * len(parts))
            found = []
            for k, inputs in enumerate(parts):
                key = zerofn.random.fold_in(state.rng_at(), k)
                vg = zerofn.value_and_grad(loss_fn, scale=state.loss_scale, rng=key, frozen=state.frozen)
                if stacked > 1:
                    vg = zerofn.accumulate(vg, stacked)
                found.append(vg(state.params, inputs, num_items, factor * stacked))
            losses, grads = zip(*found, strict=True)
            total = zerofn.tree_map(lambda *x: sum(x[1:], x[0]), *grads)
            aux = {"loss": sum(losses[1:], losses[0])}
            if clipped:
                aux["grad_norm"] = zerofn.global_norm(total)
            return state.apply_gradients(total), aux

        return zerofn.compile(train_step, **self.args.compile_options)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._make_state(max_steps)
        if resume_from_checkpoint is not None:
            path = Path(resume_from_checkpoint) / STATE
            self.sharded = zerofn.load(path, like=self.sharded, donate=True)
        self._follow_schedule(max_steps)
        for _ in range(self.state.global_step):
            self.optimizer.step()
            self.lr_scheduler.step()
        self._step, self._micro = self._compiled_step(), []
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Take a microbatch; at an update's last one, run the step. Returns its loss, over all ranks and "
        "microbatches."""
        model.train()
        self._micro.append(self._padding({k: v for k, v in self._prepare_inputs(inputs).items() if v is not None}))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro, self._micro = self._micro, []
        own = getattr(self, "loss_is_scaled_for_ga", None)
        adds_up = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        shares = own if own is not None else adds_up or self.compute_loss_func is not None
        parts, stacked = stack(micro)
        items = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).reshape(1).repeat(stacked)
        batch = {"parts": parts, "num_items": items, "stacked": stacked, "shares": int(shares)}
        before = self.sharded
        assert self._live is not None
        with self._live.in_step():
            self.sharded, aux = self._step(before, batch)
        self._norm = aux.get("grad_norm")
        return aux["loss"].to(self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm

    def _get_learning_rate(self) -> float:
        """Return the rate of the last update; updates that fp16 skips do not count."""
        if self.args.fp16 and self.sharded is not None:
            return float(self.sharded.learning_rate)
        return float(self.lr_scheduler.get_last_lr()[0])

    # ---- evaluation

    def _outputs(self, params: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad(), LossesInFloat32():
            found = tensors_of(functional_call(self.model, zerofn.gather(params), (), dict(inputs)))
            return zerofn.tree_map(lambda x: x.float() if x.is_floating_point() else x, found)

    def _evaluate_step(self, inputs: dict[str, Any]) -> dict[str, Any]:
        padded = self._evaluation_padding(inputs)
        return self._evaluation_padding.cut(self._evaluation(self.sharded.params, padded), inputs, padded)

    def whole_model(self) -> Any:
        """Return a context in which `self.model` has its parameters, on every rank: to generate, or to look at them.

        All ranks must enter it. It takes the memory of the whole model, in the dtype of the master.
        """
        self._need_state()
        assert self._live is not None
        return self._live.whole()

    # ---- what is saved

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` opens: weights, configuration, tokenizer. All ranks must call it."""
        self._need_state()
        out = Path(output_dir or self.args.output_dir)
        whole = _internal_call and not self.args.save_only_model
        path = out / (STATE if whole else f"{STATE}-export")
        zerofn.save(path, self.sharded if whole else {"params": self.sharded.params})
        if self.args.should_save:
            zerofn.export(path, out, max_shard_size="5GB")
            self._save_beside(out)
            if not whole:
                shutil.rmtree(path)
        # No rank goes on, and perhaps opens the folder, before the first has written it.
        zerofn.collectives.all_reduce(torch.zeros((), device=self.args.device), zerofn.Mesh.of(None).all)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside(self, out: Path) -> None:
        if isinstance(self.model, transformers.PreTrainedModel):
            self.model.config.architectures = [type(self.model).__name__]
            self.model.config.save_pretrained(out)
            if self.model.can_generate() and self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(out)
        if (processor := self._processor()) is not None:
            processor.save_pretrained(out)
        torch.save(self.args, out / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """They are in the state, which `save_model` has saved."""

    def _save_scaler(self, output_dir: str) -> None:
        """It is in the state."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that there is a state; it is loaded once its layout is known."""
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            raise ValueError(
                f"Trainer: {resume_from_checkpoint} has no folder {STATE!r}; it was saved by another Trainer, or with "
                "save_only_model=True. Start from its weights: from_pretrained(...)."
            )

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        params = (
            zerofn.load(best / STATE, like=self.sharded, only="params").params
            if (best / STATE).is_dir()
            else zerofn.load_safetensors(best, like=self.sharded.params)
        )
        self.sharded = dataclasses.replace(self.sharded, params=params)


class _Rates(torch.optim.SGD):
    """An optimizer that has a learning rate and nothing to optimize."""

    def __init__(self, rate: float) -> None:
        super().__init__([torch.zeros(())], lr=rate)


def stack(micro: list[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], int]:
    """Return (parts, stacked): microbatches of equal shapes as one part with all their rows, others one by one."""
    if len(micro) > 1 and len({_shapes(x) for x in micro}) == 1 and _shapes(micro[0]) is not None:
        return ({k: torch.cat([x[k] for x in micro]) for k in micro[0]},), len(micro)
    return tuple(micro), 1


def _shapes(inputs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what must be equal to be stacked; None for what has no rows."""
    if not all(isinstance(x, Tensor) and x.dim() for x in inputs.values()):
        return None
    return tuple((k, tuple(x.shape), x.dtype) for k, x in sorted(inputs.items()))

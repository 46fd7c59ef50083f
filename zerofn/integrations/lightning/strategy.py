"""`ZeroFnStrategy`: Lightning's loops, data, callbacks and loggers around ZeroFn's state and compiled step."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

import zerofn

from ..carried_state import relaid
from ..live_module import Live, parameters_of
from ..losses import as_autocast
from ..modules import buffers_to, is_shape_only
from ..param_groups import ParamGroups, let_go
from . import checkpoints
from .checks import check
from .configured import Configured
from .evaluation import Lender
from .optimizers import clipping
from .ranks import Ranks
from .steps import Steps
from .watched_module import computes, unwatch, watch

_PRECISIONS = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
_NOTHING = Precision()


class ZeroFnStrategy(Ranks):
    """Trains an unmodified `LightningModule` with one of ZeroFn's states and steps.

        trainer = Trainer(strategy=ZeroFnStrategy(stage=3), accelerator="gpu", devices=8, precision="bf16-mixed")
        trainer.fit(MyModule(), loader)

    `stage`, `offload`, `wire`: as in `zerofn.shard`. `memory`, `remat`, `machine`: as in `zerofn.compile`.

    `training_step` is captured, so it must not branch on what is in the batch. What it gives `self.log` is logged at
    every batch; `batch_idx` and `self.global_step` are tensors in it. The optimizer of `configure_optimizers` is
    translated (AdamW, Adam, SGD, Adagrad, RMSprop) and keeps its learning rates, betas, momentum and weight decay,
    which any scheduler, callback or hook may set. Validation, test and prediction run as plain PyTorch, block by
    block, and may do anything. Where the module is built in `configure_model`, no rank ever holds all of it.

    A checkpoint is Lightning's file with the weights, and beside it a folder with the state, which loads on any number
    of ranks; with `save_weights_only` it is the file alone.
    Ranks start with rank 0's parameters. Outside of `training_step` the module has its parameters, which are gathered
    where they are used: all ranks must use the same. `whole_model()` gathers all of them at once.

    Raises `ValueError` for manual optimization, several optimizers, hooks that see gradients, and options without an
    effect here; `zerofn.CaptureError` for a step that is not a pure function.
    """

    strategy_name = "zerofn"

    def __init__(
        self,
        stage: int = 3,
        *,
        offload: Any = None,
        wire: Any = None,
        memory: int | str | None = None,
        remat: str | None = None,
        machine: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if getattr(wire, "feedback", False):
            raise ValueError(
                "ZeroFnStrategy: feedback=True needs one gradient for each step, but each microbatch of "
                "accumulate_grad_batches has its own gradient. Write rounding='stochastic', which stores no errors."
            )
        self._shard_options = {"stage": stage, "offload": offload, "wire": wire}
        self._compile_options = {"memory": memory, "remat": remat, "machine": machine}
        self._state: Any = None
        self._live: Live | None = None
        self._configured: Configured | None = None
        self._of: Any = None  # the module that the state is of
        self._groups: ParamGroups | None = None
        self._steps: Steps | None = None
        self._lender: Lender | None = None
        self._apart = False  # whether a hook runs between gradients and update, which are two programs then
        self._update = ""  # in optimizer_step: "due", or "done" by the closure

    @property
    def state(self) -> Any:
        """The `TrainState`, with what was written to the module."""
        if self._live is not None:
            self._live.settle()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        if self._live is not None:
            self._live.renew()

    # ---- options

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's part of precision: nothing, for ZeroFn's state has it."""
        return _NOTHING

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = plugin

    @property
    def _precision(self) -> str | None:
        plugin = self._precision_plugin
        word = "32-true" if plugin is None else str(plugin.precision)
        if word not in _PRECISIONS:
            raise ValueError(f"ZeroFnStrategy: precision={word!r} must be one of {', '.join(_PRECISIONS)}.")
        return _PRECISIONS[word]

    # ---- the module and its state

    def connect(self, model: pl.LightningModule) -> None:
        """Take a module; its `configure_model` will make shapes only."""
        if model is not self._of and is_shape_only(model):
            raise ValueError(
                f"{type(model).__name__}: the module's parameters have no values. Build it without zerofn.skeleton, or "
                "in configure_model."
            )
        super().connect(model)
        watch(model)
        if model is not self._of and is_overridden("configure_model", model):
            self._configured = Configured(model, self.broadcast)

    def model_to_device(self) -> None:
        """Move the buffers; parameters are moved as shards."""
        module = self.lightning_module
        assert module is not None
        buffers_to(module, self.root_device)
        for part in module.modules():
            if isinstance(part, pl.LightningModule):
                part._device = self.root_device  # what `self.device` says

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the state, or give the one there is the optimizer of this run, and the steps."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.model_to_device()
        if fitting:
            check(trainer, module)
            self.setup_optimizers(trainer)
            clip = clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            self._groups = ParamGroups(self.optimizers[0], module, "configure_optimizers", clip)
        if fitting or self._of is not module:
            self._make_state(module)
            self._of = module
            assert self._live is not None
            self._lender = Lender(module, self._live)
        if fitting:
            options = {k: v for k, v in self._compile_options.items() if v is not None}
            self._apart = any(is_overridden("on_before_zero_grad", x) for x in (module, *trainer.callbacks))  # type: ignore[attr-defined]
            self._steps = Steps(module, watch(module), self._precision, options)

    def _make_state(self, module: pl.LightningModule) -> None:
        if self._of is module:
            self._relay(None)
            return
        tx, frozen = self._tx_and_frozen(module)
        seed = self.broadcast(torch.initial_seed() % 2**31)
        if not is_shape_only(module):
            self._start_alike(module)

        def create() -> Any:
            source = module if self._configured is None else self._configured.build()
            extra = {name: x.to(self.root_device) for name, x in module.named_buffers()}
            params = parameters_of(source)
            return zerofn.TrainState.create(params=params, tx=tx, seed=seed, extra=extra or None, frozen=frozen)

        first = create() if self._configured is None else create
        self._live = None
        self.state = zerofn.shard(first, **self._options())
        del first
        self._configured = None
        before = dict(module.named_parameters())
        self._live = Live(module, lambda: self._state, self._take)
        for optimizer in self.optimizers:
            let_go(optimizer, {id(p): self._live.parameters[name] for name, p in before.items()})

    def _options(self) -> dict[str, Any]:
        given = {k: v for k, v in self._shard_options.items() if v is not None}
        return {"device": self.root_device, "precision": self._precision, **given}

    def _tx_and_frozen(self, module: nn.Module) -> tuple[Any, Callable[[str], bool] | None]:
        if self._groups is None:
            return zerofn.optim.identity(), None
        names = (name for name, p in module.named_parameters() if p.requires_grad)
        others = frozenset(name for name in names if not self._groups.learns(name))
        return self._groups.tx, others.__contains__ if others else None

    def _relay(self, groups: ParamGroups | None) -> None:
        """Lay the state out again, with the moments of other `groups` that there were."""
        module = self.lightning_module
        assert module is not None and self._groups is not None
        before = self.state
        if groups is not None:
            self._groups = groups.renewed(before.opt_state)
        moments = self._groups.with_moments
        self.state = relaid(before, module, *self._tx_and_frozen(module), moments, **self._options())

    def _take(self, state: Any) -> None:
        self._state = state

    def _start_alike(self, module: nn.Module) -> None:
        """Give all ranks rank 0's values."""
        if dist.is_initialized():
            for x in (*module.parameters(), *module.buffers()):
                there = x.detach().to(self.root_device)
                dist.broadcast(there, 0)
                x.data.copy_(there)

    # ---- training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled step on a batch. Returns what the module's own returns, of this rank."""
        assert self._steps is not None and self._groups is not None and self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        if loop._skip_backward:  # set by a callback that measures batch norms, after the last update
            self._update = self._update and "done"
            return self._evaluate("training_step", args, kwargs)
        parts = self.lightning_module.trainer.accumulate_grad_batches
        if loop.epoch_loop.batch_idx % parts == 0:
            self._steps.sums = None  # here Lightning's closure sets gradients to zero
        if self._update == "done":
            raise ValueError(
                f"{type(self.lightning_module).__name__}: the closure passed to optimizer.step called "
                "optimizer_closure twice, but the first call has already updated the parameters. Call it once."
            )
        update = self._update == "due" and not self._apart
        before = self._with_rates()
        assert self._live is not None
        with self._live.in_step():
            self.state, out = self._steps(before, (*args, *kwargs.values()), 1.0 / parts, update)
        self._update = "done" if update else self._update
        return out

    def _with_rates(self) -> Any:
        assert self._groups is not None and self._steps is not None
        self._groups.check_of(self.optimizers[0])
        if self._groups.has_changed():
            if self._steps.sums is not None:
                raise ValueError(
                    f"{type(self.lightning_module).__name__}: the set of trained parameters changed within an update. "
                    "Change requires_grad, or the optimizer, before the first microbatch of an update."
                )
            self._relay(self._groups)
        state = self.state
        return dataclasses.replace(state, opt_state=self._groups.with_rates(state.opt_state))

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The compiled step has done it."""
        return closure_loss.detach()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, whose compiled step updates the parameters, or update them by gradients that are there."""
        assert self._steps is not None
        self._update = "due"
        try:
            found = closure()
            if self._update == "due":
                self.state = self._steps.update(self._with_rates())
        finally:
            self._update = ""
        optimizer.step()  # has no gradients, and tells schedulers that there was an update
        return found

    # ---- evaluation

    def whole_model(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the module has its parameters, on every rank, in the dtype of the master.

        All ranks must enter it. It takes the memory of the whole model.
        """
        assert self._live is not None
        return self._live.whole()

    def on_validation_end(self) -> None:
        """Let go of what was gathered."""
        assert self._lender is not None
        self._lender.close()

    on_test_end = on_predict_end = on_validation_end

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own, as plain PyTorch."""
        return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own, as plain PyTorch."""
        return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own, as plain PyTorch."""
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch, *rest = args
        assert self._lender is not None
        with self._lender.lent(self.state.params), as_autocast(self.root_device, computes(self._precision)):
            return getattr(self.lightning_module, name)(batch, *rest, **kwargs)

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The state that a checkpoint is read into is made in `setup`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's parameters and buffers. Hooks may read and replace them; none is gathered that nobody reads."""
        assert self.lightning_module is not None
        found: dict[str, Any] = self.lightning_module.state_dict(keep_vars=True)
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file as Lightning's, with the weights, and beside it a folder with the state, which loads on any
        number of ranks.
        """
        if storage_options is not None:
            raise ValueError("ZeroFnStrategy: storage_options have no effect. Pass them to your own checkpoint_io=.")
        path, params = Path(filepath), self.state.params
        folder = checkpoints.beside(path)
        if "optimizer_states" in checkpoint:
            checkpoints.save(folder, self.state, checkpoint, self.checkpoint_io, self.is_global_zero)
        elif self.is_global_zero and folder.is_dir():
            shutil.rmtree(folder)
        checkpoints.save_weights(path, checkpoint, params, self.is_global_zero)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file, and the folder beside it."""
        folder = checkpoints.beside(filepath)
        super().remove_checkpoint(filepath)
        if self.is_global_zero and folder.is_dir():
            shutil.rmtree(folder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the state of the folder beside a file; return what Lightning keeps there. A file alone is read as
        Lightning does.
        """
        folder = checkpoints.beside(checkpoint_path)
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        try:
            self.state, found = checkpoints.load(folder, self.state, self.checkpoint_io, weights_only, whole=fitting)
        except zerofn.CheckpointError as error:
            if "opt_state" in str(error):
                error.add_note(
                    "The optimizer's groups, or the trained parameters, differ from those of the saved run. Make them "
                    "equal in __init__ or configure_optimizers. If a hook had changed them, load only the weights: "
                    f"load_from_checkpoint({str(checkpoint_path)!r})."
                )
            raise
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the weights of a file; those of a folder are in the state."""
        tensors = checkpoint["state_dict"]
        if tensors:
            strict = strict and not isinstance(tensors, checkpoints.Rest)
            self.state = checkpoints.with_state_dict(self.state, tensors, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take learning rates, and, of a file, Adam's moments."""
        for optimizer, theirs in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            names = {id(p): name for name, p in self.lightning_module.named_parameters()}  # type: ignore[union-attr]
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            if theirs["state"]:
                self.state = checkpoints.with_moments(self.state, theirs["state"], order)
            optimizer.load_state_dict({**theirs, "state": {}})

    def teardown(self) -> None:
        """Let the module go, with the shapes of its parameters."""
        if self._lender is not None:
            self._lender.close()
        if self.lightning_module is not None:
            unwatch(self.lightning_module)
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

"""`TrainingArguments(mesh="data=2,tensor=2")`: a model on a mesh, and the rows that its ranks get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather, recursively_apply
from torch import Tensor, nn
from torch.func import functional_call

import zerofn

from .modules import calls_as_autocast

AXES = ("pipe", "data", "replicate", "expert", "tensor")


def axes_of(text: str | None) -> dict[str, int] | None:
    """Return the sizes of a mesh's axes, in order; None without a mesh. Raises `ValueError` for what is none."""
    if not text:
        return None
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (x.strip() for x in part.partition("="))
        if name == "context":
            raise ValueError(
                "TrainingArguments: mesh='context=...' splits sequences over ranks, which a Trainer's collator and "
                "metrics do not support. Write the step as a function: see docs/mesh.md."
            )
        if name not in AXES or not size.removeprefix("-").isdigit():
            raise ValueError(
                f"TrainingArguments: mesh={text!r} has {part!r}; expected the size of an axis, as in "
                f"mesh='data=2,tensor=2'. Axes are {', '.join(AXES)}; one size may be -1, for all remaining ranks."
            )
        found[name] = int(size)
    return found


class TrainerOnMesh(transformers.Trainer):
    """A `Trainer` whose ranks may share rows, and layers."""

    mesh: Any = None

    def use_mesh(self, axes: Mapping[str, int] | None) -> None:
        """Make the mesh, if there are axes."""
        if axes is None:
            return
        self.mesh = zerofn.Mesh.make(**axes)
        self._cuts: dict[str, Any] = {}
        self._in_step = False
        self._first: list[int] = []  # of ranks that share rows

    def mesh_options(self) -> dict[str, Any]:
        """Return arguments of `zerofn.shard`."""
        return {} if self.mesh is None else {"mesh": self.mesh, "cuts": self._cuts or None}

    def cut(self, model: nn.Module) -> nn.Module:
        """Let a model compute with a rank's slices, experts and layers. With slices and experts, it does so in steps
        alone; layers of other ranks are gathered where it is called outside of them. Raises what
        `zerofn.parallel.tensor`, `zerofn.moe.experts` and `zerofn.parallel.pipe` raise.
        """
        if self.mesh is None:
            return model
        have_experts = any(axis.kind.experts for axis in self.mesh.slices)
        if self.mesh.partial:
            self._cuts |= zerofn.parallel.tensor(model, self.mesh)
        if have_experts:
            self._cuts |= zerofn.moe.experts(model, self.mesh)
        if self.mesh.partial or have_experts:
            model.register_forward_pre_hook(self._refuse_whole)
        if self.mesh.stages.size > 1:
            with self.step_on_mesh(), calls_as_autocast(model, torch.device("cpu"), self.args.computes_in):
                self._cuts = zerofn.parallel.pipe(
                    model,
                    self.mesh,
                    *_without_labels(model),
                    microbatches=self.args.gradient_accumulation_steps,
                    cuts=self._cuts,
                    precision=self.args.shard_options["precision"],
                )
        return model

    def _refuse_whole(self, model: nn.Module, args: Any) -> None:
        if not self._in_step:
            raise ValueError(
                f"{type(model).__name__}: the model is cut along {self.mesh}, so only the compiled steps of training "
                "and evaluation can call it. Save the model, and load it without a mesh."
            )

    @contextlib.contextmanager
    def step_on_mesh(self) -> Iterator[None]:
        """Inside, a step is captured."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, whose loaders give the same rows to ranks that share them."""
        super().create_accelerator_and_postprocess()
        if self.mesh is not None:
            accelerator, batch = self.accelerator, self.mesh.batch
            ranks = gather(torch.tensor([batch.rank], device=accelerator.device)).tolist()
            self._first = [ranks.index(k) for k in range(batch.size)]
            accelerator.prepare_data_loader = self._prepared

    def _prepared(self, loader: Any, *_: Any, **__: Any) -> Any:
        accelerator, batch = self.accelerator, self.mesh.batch
        return prepare_data_loader(
            loader, accelerator.device, num_processes=batch.size, process_index=batch.rank,
            split_batches=accelerator.split_batches, put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(), dispatch_batches=False, even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler, data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking, use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )  # fmt: skip

    def get_tp_size(self) -> int:
        """Return how many ranks get the same rows."""
        return super().get_tp_size() if self.mesh is None else zerofn.world_size() // self.mesh.batch.size

    @property
    def gather_function(self) -> Any:
        """What evaluation loops gather results with: of ranks that share rows, those of one."""
        return self._gathers if self.mesh is None else self._gathers_rows

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        self._gathers = function

    def _gathers_rows(self, results: Any) -> Any:
        world = zerofn.world_size()

        def pick(whole: Tensor) -> Tensor:
            return whole.unflatten(0, (world, -1))[self._first].flatten(0, 1)

        self.accelerator.gather = lambda x: recursively_apply(pick, gather(x))
        try:
            return self._gathers(results)
        finally:
            del self.accelerator.gather


def _without_labels(model: nn.Module) -> tuple[Any, Any]:
    """Return a function that reads a model's parameters as its loss does, and a batch for it: the model's own example,
    since what a dataset has is known once the stages are.
    """

    def loss_fn(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        out: Any = functional_call(model, dict(params), (), dict(batch))
        return next(x for x in out.values() if isinstance(x, Tensor) and x.is_floating_point()).float().mean()

    return loss_fn, model.dummy_inputs

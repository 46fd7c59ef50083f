"""ZeroFn: a JAX-style functional trainer for PyTorch models that do not fit.

    state = zerofn.shard(init_state, stage=3)
    step = zerofn.compile(train_step)          # train_step(state, batch) is your own pure function
    state, metrics = step(state, batch)

Names are loaded when they are first used, so that `import zerofn` costs next to nothing beside `import torch`.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .util.names import of_package
from .util.version import __version__ as __version__

if TYPE_CHECKING:
    from . import collectives, moe, optim, parallel, passes, random, schedules, sparse
    from .capture.capture import CaptureError
    from .checkpoint import CheckpointError, export, load, load_safetensors, load_state_dict, save, verify
    from .checkpoint.owner import saved_paths
    from .collectives import same
    from .comm.current_mesh import rank, world_size
    from .comm.mesh import Mesh
    from .compile import compile
    from .cost.calibrate import this_machine
    from .cost.machine import Machine
    from .deferred_init.skeleton import skeleton
    from .interop.dcp import export_dcp, load_dcp
    from .interop.deepspeed import from_deepspeed
    from .interop.deepspeed_checkpoint import load_deepspeed
    from .job.failures import abort
    from .job.reasons import because
    from .launch.run import run
    from .notebook.progress import progress
    from .offload.policy import Offload
    from .passes import Pass
    from .planning.planner import plan
    from .runs.manager import Checkpoints
    from .runtime.hooks import register_step_pre_hook
    from .sharded_math.normal_like import normal_like
    from .sharded_math.reductions import all_finite, first_nonfinite, global_norm, leaf_norms, vdot
    from .sharding.abstract import abstract
    from .sharding.copying import copy
    from .sharding.float8 import Fp8
    from .sharding.gather_scatter import gather, scatter
    from .sharding.precision import Precision
    from .sharding.shard import shard, unshard
    from .sharding.sharded import Sharded
    from .sharding.wire import Wire
    from .training.diloco import diloco
    from .training.eager_region import eager_region
    from .training.grad import accumulate, value_and_grad
    from .training.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
    from .training.microbatched import microbatched
    from .training.remat import remat
    from .training.sampler import sampler
    from .training.train_state import TrainState
    from .training.uneven_loaders import even
    from .tree import tree_map
    from .util.peaks import peak_flops


# Where each public name is defined; an empty text for a public module.
_WHERE = {
    **dict.fromkeys(("collectives", "moe", "optim", "parallel", "passes", "random", "schedules", "sparse"), ""),
    **dict.fromkeys(
        ("CheckpointError", "export", "load", "load_safetensors", "load_state_dict", "save", "verify"), "checkpoint"
    ),
    **dict.fromkeys(("all_finite", "first_nonfinite", "global_norm", "leaf_norms", "vdot"), "sharded_math.reductions"),
    **dict.fromkeys(("rank", "world_size"), "comm.current_mesh"),
    **dict.fromkeys(("export_dcp", "load_dcp"), "interop.dcp"),
    **dict.fromkeys(("gather", "scatter"), "sharding.gather_scatter"),
    **dict.fromkeys(("shard", "unshard"), "sharding.shard"),
    **dict.fromkeys(("accumulate", "value_and_grad"), "training.grad"),
    "microbatched": "training.microbatched",
    **dict.fromkeys(("DynamicLossScale", "NoLossScale", "StaticLossScale"), "training.loss_scale"),
    "CaptureError": "capture.capture",
    "Checkpoints": "runs.manager",
    "Fp8": "sharding.float8",
    "Machine": "cost.machine",
    "Mesh": "comm.mesh",
    "normal_like": "sharded_math.normal_like",
    "Offload": "offload.policy",
    "Pass": "passes",
    "Precision": "sharding.precision",
    "Sharded": "sharding.sharded",
    "TrainState": "training.train_state",
    "Wire": "sharding.wire",
    "abort": "job.failures",
    "because": "job.reasons",
    "abstract": "sharding.abstract",
    "compile": "compile",
    "copy": "sharding.copying",
    "diloco": "training.diloco",
    "eager_region": "training.eager_region",
    "from_deepspeed": "interop.deepspeed",
    "load_deepspeed": "interop.deepspeed_checkpoint",
    "even": "training.uneven_loaders",
    "peak_flops": "util.peaks",
    "plan": "planning.planner",
    "register_step_pre_hook": "runtime.hooks",
    "remat": "training.remat",
    "progress": "notebook.progress",
    "run": "launch.run",
    "same": "collectives",
    "sampler": "training.sampler",
    "saved_paths": "checkpoint.owner",
    "skeleton": "deferred_init.skeleton",
    "this_machine": "cost.calibrate",
    "tree_map": "tree",
}

__all__ = [
    "abort",
    "abstract",
    "accumulate",
    "all_finite",
    "because",
    "collectives",
    "compile",
    "copy",
    "diloco",
    "eager_region",
    "even",
    "export",
    "export_dcp",
    "first_nonfinite",
    "from_deepspeed",
    "gather",
    "global_norm",
    "leaf_norms",
    "load",
    "load_dcp",
    "load_deepspeed",
    "load_safetensors",
    "load_state_dict",
    "microbatched",
    "moe",
    "normal_like",
    "optim",
    "peak_flops",
    "plan",
    "progress",
    "parallel",
    "passes",
    "random",
    "rank",
    "register_step_pre_hook",
    "remat",
    "run",
    "same",
    "sampler",
    "save",
    "saved_paths",
    "scatter",
    "schedules",
    "shard",
    "skeleton",
    "sparse",
    "this_machine",
    "tree_map",
    "unshard",
    "value_and_grad",
    "vdot",
    "verify",
    "world_size",
    "CaptureError",
    "CheckpointError",
    "Checkpoints",
    "DynamicLossScale",
    "Fp8",
    "Machine",
    "Mesh",
    "NoLossScale",
    "Offload",
    "Pass",
    "Precision",
    "Sharded",
    "StaticLossScale",
    "TrainState",
    "Wire",
]


class _Package(ModuleType):
    """A package whose public functions keep their names: the import system binds a submodule such as `zerofn.compile`
    to its parent when it is imported, over the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _WHERE.get(name):
            return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions that use the package travel by value to other processes, as with any module (cloudpickle)."""
        return importlib.import_module, (self.__name__,)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext zerofn`: ranks behind a notebook's cells."""
    from .notebook.magics import RankMagics

    RankMagics.load(shell)


if not TYPE_CHECKING:
    _unknown, __dir__ = of_package(__name__, __all__)

    def __getattr__(name: str) -> Any:
        if name not in _WHERE and (name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None):
            _unknown(name)
        where = _WHERE.get(name, "")
        module = importlib.import_module(f".{where or name}", __name__)
        found = getattr(module, name) if where else module
        globals()[name] = found
        return found


sys.modules[__name__].__class__ = _Package

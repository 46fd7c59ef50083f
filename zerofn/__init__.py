"""ZeroFn: a JAX-style functional trainer for PyTorch models that do not fit."""

from . import collectives, optim
from .checkpoint import CheckpointError, export, load, load_safetensors, save
from .comm.mesh import Mesh
from .compile import compile
from .cost.calibrate import this_machine
from .cost.machine import Machine
from .deferred_init.skeleton import skeleton
from .offload.policy import Offload
from .passes import Pass
from .planning.planner import plan
from .sharding.gather_scatter import gather, scatter
from .sharding.precision import Precision
from .sharding.reductions import all_finite, first_nonfinite, global_norm, leaf_norms, vdot
from .sharding.shard import shard, unshard
from .sharding.sharded import Sharded
from .training.grad import accumulate, value_and_grad
from .training.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from .training.remat import remat
from .training.train_state import TrainState
from .tree import tree_map

__all__ = [
    "accumulate",
    "all_finite",
    "collectives",
    "compile",
    "export",
    "first_nonfinite",
    "gather",
    "global_norm",
    "leaf_norms",
    "load",
    "load_safetensors",
    "optim",
    "plan",
    "remat",
    "save",
    "scatter",
    "shard",
    "skeleton",
    "this_machine",
    "tree_map",
    "unshard",
    "value_and_grad",
    "vdot",
    "CheckpointError",
    "DynamicLossScale",
    "Machine",
    "Mesh",
    "NoLossScale",
    "Offload",
    "Pass",
    "Precision",
    "Sharded",
    "StaticLossScale",
    "TrainState",
]

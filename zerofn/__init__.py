"""ZeroFn: a JAX-style functional trainer for PyTorch models that do not fit."""

from . import collectives, optim
from .calibration import this_machine
from .checkpoint import CheckpointError, export, load, load_safetensors, save
from .compile import compile
from .grad import accumulate, value_and_grad
from .loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from .machine import Machine
from .maps import gather, scatter
from .mesh import Mesh
from .offload import Offload
from .partition import shard, unshard
from .plan import plan
from .precision import Precision
from .reductions import all_finite, first_nonfinite, global_norm, leaf_norms, vdot
from .remat import remat
from .sharding import Sharded
from .skeleton import skeleton
from .state import TrainState
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
    "Precision",
    "Sharded",
    "StaticLossScale",
    "TrainState",
]

"""ZeroFn: a JAX-style functional trainer for PyTorch models that do not fit."""

from . import collectives as collectives
from . import optim as optim
from .compile import compile as compile
from .grad import accumulate as accumulate
from .grad import value_and_grad as value_and_grad
from .loss_scale import DynamicLossScale as DynamicLossScale
from .loss_scale import NoLossScale as NoLossScale
from .loss_scale import StaticLossScale as StaticLossScale
from .mesh import Mesh as Mesh
from .partition import shard as shard
from .partition import unshard as unshard
from .precision import Precision as Precision
from .reductions import all_finite as all_finite
from .reductions import first_nonfinite as first_nonfinite
from .reductions import global_norm as global_norm
from .reductions import leaf_norms as leaf_norms
from .reductions import vdot as vdot
from .sharding import Sharded as Sharded
from .sharding import gather as gather
from .sharding import scatter as scatter
from .skeleton import skeleton as skeleton
from .state import TrainState as TrainState
from .tree import tree_map as tree_map

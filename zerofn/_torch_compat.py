"""Every private torch name ZeroFn uses, in this one place, with what it is for.

A new torch release is supported by making this file (and its test) pass.
"""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import (
    _get_default_store as default_store,  # the rendezvous store of the default group
)
from torch.distributed.distributed_c10d import (
    _resolve_process_group as resolve_process_group,  # group name -> ProcessGroup
)
from torch.utils._pytree import (
    register_pytree_node as register_torch_pytree_node,  # torch.func flattens with this one
)

# Calls inside do not enter autograd again: collectives below our own autograd.Function.
below_autograd = torch._C._AutoDispatchBelowAutograd

# Initialisation replay: record operations on tensors without data.
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException as DataDependentError,  # .item() on a fake tensor
    DynamicOutputShapeException as DynamicShapeError,  # nonzero() on a fake tensor
    FakeTensor as FakeTensor,  # shape, dtype and device; no data
    FakeTensorMode as FakeTensorMode,
)
from torch._ops import OpOverload as OpOverload  # noqa: E402  # one ATen operation
from torch.utils._pytree import (  # noqa: E402
    tree_leaves as tree_leaves,  # the arguments of an ATen operation, flat
    tree_map as tree_map,
)
from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode as TorchDispatchMode,  # sees every ATen call
    _disable_current_modes as without_dispatch_modes,  # real execution inside a mode
)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, as long as that storage lives."""
    return tensor.untyped_storage()._cdata


def schema_arguments(op: OpOverload) -> list:
    """The arguments in an operation's schema: `.name`, `.is_out`, `.alias_info.is_write`."""
    return op._schema.arguments


# (module, name) of samplers that draw until all samples are accepted.
REJECTION_SAMPLERS = ((torch.nn.init, "_no_grad_trunc_normal_"),)


def join_fake_group(world: int, rank: int = 0) -> None:
    """Make the default process group one of `world` ranks that are not there: no data moves."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

"""Every private torch name ZeroFn uses, in this one place, with what it is for.

A new torch release is supported by making this file (and its test) pass.
"""
# ruff: noqa: F401, I001  (these imports are the point of the file, and stand in groups)

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

# Adam's update in one pass over memory.
from torch import _fused_adam_ as fused_adam_
from torch import _fused_adamw_ as fused_adamw_

# Process groups and their rendezvous store.
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _resolve_process_group

# Fake tensors: shape, dtype and device, no data. What they raise for `.item()` and `nonzero()`.
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentError
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicShapeError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Modes that see every ATen call; trees of an operation's arguments.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._pytree import register_pytree_node as register_torch_pytree_node
from torch.utils._pytree import tree_leaves, tree_map

# Capture: a function of tensors -> an FX graph of ATen calls; a loop's body is traced inside a trace.
from torch._higher_order_ops.utils import reenter_make_fx as trace_inner
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # code is made when it is run or read
from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_code
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as outside_trace
from torch.fx.experimental.proxy_tensor import get_proxy_mode as current_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.proxy_tensor import track_tensor_tree as bind_outputs
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DataDependentBranch

# Calls inside do not enter autograd again: collectives below our own autograd.Function.
below_autograd = torch._C._AutoDispatchBelowAutograd


def resolve_process_group(name: str) -> torch.distributed.ProcessGroup:
    """Group name -> ProcessGroup."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, as long as that storage lives."""
    return tensor.untyped_storage()._cdata


def packet_of(op: OpOverload) -> Any:
    """All overloads of an operation."""
    return op._overloadpacket


def schema_arguments(op: OpOverload) -> list:
    """The arguments in an operation's schema: `.name`, `.is_out`, `.alias_info.is_write`."""
    return op._schema.arguments


# (module, name) of what puts parameters into a module for a call, and of what runs one checkpointed segment: given
# its function, it calls it again in the backward pass.
LEND_PARAMETERS = (torch.nn.utils.stateless, "_reparametrize_module")
CHECKPOINT_SEGMENT = (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")

# (module, name) of samplers that draw until all samples are accepted.
REJECTION_SAMPLERS = ((torch.nn.init, "_no_grad_trunc_normal_"),)


def join_fake_group(world: int, rank: int = 0) -> None:
    """Make the default process group one of `world` ranks that are not there: no data moves."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Fake tensors log every operation that fails, with a traceback of its own, before they raise."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Libraries that ask `torch.compiler.is_compiling()` are told so (transformers' mask checks do)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def aliased_arguments(op: OpOverload) -> list[tuple[int, str]]:
    """(position, name) of the arguments whose memory a result shares."""
    results = op._schema.returns
    returned = {s for r in results if r.alias_info is not None for s in r.alias_info.before_set}
    # `split(Tensor(a -> *) self, ...) -> Tensor(a)[]`: of a list we are told that it shares memory, not whose.
    in_list = any(r.alias_info is not None and isinstance(r.type, torch.ListType) for r in results)
    return [
        (i, a.name)
        for i, a in enumerate(op._schema.arguments)
        if a.alias_info is not None and (a.alias_info.before_set & returned or in_list and not a.alias_info.is_write)
    ]


# Randomness: a dispatch mode that replaces random operations, and knows when nothing else listens.
def num_dispatch_modes() -> int:
    """How many dispatch modes would see the next ATen call: capture's, fake tensors', a user's."""
    return torch._C._len_torch_dispatch_stack()


def is_composite(op: OpOverload) -> bool:
    """Whether an operation is only written in terms of others, which is what autograd sees.

    Some, `silu_backward` among them, have kernels of their own besides, with other rounding.
    """
    if op.namespace == "prim":  # prim::device and the like are not the dispatcher's
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own = has_kernel(op.name(), "CPU") or has_kernel(op.name(), "CUDA")
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not own


def schema_text(op: OpOverload) -> str:
    """An operation's schema, as `torch.library.Library.define` takes it."""
    return str(op._schema)


def proxies_of(trace: Any, values: Any) -> Any:
    """The nodes a trace knows these tensors by."""
    return tree_map(trace.tracer.unwrap_proxy, values)


def inside_functorch() -> bool:
    """Whether a `torch.func` transform is being applied right now."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_tensor(x: torch.Tensor) -> bool:
    """Whether `x` is tracked by a `torch.func` transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)

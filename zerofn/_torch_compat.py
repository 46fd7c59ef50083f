"""Every private torch name ZeroFn uses, in this one place, with what it is for.

A new torch release is supported by making this file (and its test) pass. Over 400 lines because such names stand
nowhere else.
"""
# ruff: noqa: F401, I001  (these imports are the point of the file, and stand in groups)

from __future__ import annotations

import contextlib
import copy
import math
import importlib
import itertools
import logging
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Adam's update in one pass over memory; the number of the kernel that attention takes, 0 for one that is not fused.
from torch import _fused_adam_ as fused_adam_
from torch import _fused_adamw_ as fused_adamw_
from torch import _fused_sdp_choice as fused_attention

# Process groups and their rendezvous store.
from torch.distributed.distributed_c10d import _get_default_group as default_group
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _resolve_process_group

# Fake tensors: shape, dtype and device, no data. What they raise for `.item()` and `nonzero()`.
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentError
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicShapeError
from torch._subclasses.fake_impls import register_op_impl as register_fake
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Modes that see every ATen call; trees of an operation's arguments.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode_temporarily as without_last_function_mode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import SUPPORTED_NODES as torch_pytree_nodes
from torch.utils._pytree import register_pytree_node as register_torch_pytree_node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# Capture: a function of tensors -> an FX graph of ATen calls; a loop's body is traced inside a trace.
from torch._higher_order_ops.utils import reenter_make_fx as trace_inner
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # code is made when it is run or read
from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_code
from torch.fx.experimental.proxy_tensor import _temp_remove_metadata_torch_function_mode as without_names_of_calls
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as outside_trace
from torch.fx.experimental.proxy_tensor import get_proxy_mode as current_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.proxy_tensor import _ProxyTensor
from torch.fx.experimental.proxy_tensor import track_tensor_tree as bind_outputs

# Whether an operation that runs graphs compiles one of them just now.
compiles_for_itself = getattr(torch._higher_order_ops.utils, "_in_hop_compile", lambda: True)

# Collectives of one tensor: torch 2.13 has given them new names.
all_gather_single = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
reduce_scatter_single = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)

# Hooks of all modules, by kind.
_GLOBAL_HOOKS = tuple(
    x for name, x in vars(torch.nn.modules.module).items() if name.startswith("_global_") and isinstance(x, dict)
)

# Calls inside do not enter autograd again: collectives below our own autograd.Function.
below_autograd = torch._C._AutoDispatchBelowAutograd
# Calls inside are not cast again: a captured step has its casts, and parts in which autocast was off.
without_autocast = torch._C._DisableAutocast


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Calls inside enter autograd again, also below `below_autograd`."""
    c = torch._C
    excluded = c._dispatch_tls_local_exclude_set()
    for name in "AutogradCPU AutogradCUDA AutogradMeta AutogradOther AutogradNestedTensor ADInplaceOrView".split():
        excluded = excluded.remove(getattr(c.DispatchKey, name))
    with c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), excluded):
        yield


# float8 [m, k] by float8 [k, n], each with a scale: the second one's columns are contiguous.
scaled_mm = torch._scaled_mm

backward_running = torch._C._current_graph_task_id  # () -> the number of this thread's backward pass, -1 for none


def resolve_process_group(name: str) -> torch.distributed.ProcessGroup:
    """Group name -> ProcessGroup."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, of a sparse one's of its values, as long as that storage lives."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return dense_parts(tensor)[-1].untyped_storage()._cdata


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's numbers: itself, or the indices and the values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends = (tensor.crow_indices(), tensor.col_indices()) if by_rows else (tensor.ccol_indices(), tensor.row_indices())
    return *ends, tensor.values()


def packet_of(op: OpOverload) -> Any:
    """All overloads of an operation."""
    return op._overloadpacket


def schema_arguments(op: OpOverload) -> list:
    """The arguments in an operation's schema: `.name`, `.is_out`, `.alias_info.is_write`."""
    return op._schema.arguments


# (module, name) of what puts parameters into a module for a call, and of what runs one checkpointed segment: given
# its function, it calls it again in the backward pass.
LEND_PARAMETERS = (torch.nn.utils.stateless, "_reparametrize_module")
_SEGMENT = "_checkpoint_without_reentrant_generator"  # torch 2.15 runs another one
_SEGMENT += "_impl" * hasattr(torch.utils.checkpoint, f"{_SEGMENT}_impl")
CHECKPOINT_SEGMENT = (torch.utils.checkpoint, _SEGMENT)
CONVERT_MODULE = (torch.nn.Module, "_apply")  # converts or moves its parameters
PACKING = torch._VF  # holds what packs padded sequences, and what pads them again
TENSOR_TEXT = (torch._tensor_str, "_str")  # turns a tensor into text
REJECTION_SAMPLERS = ((torch.nn.init, "_no_grad_trunc_normal_"),)  # draw until all samples are accepted


def list_parameters_again(module: torch.nn.Module) -> None:
    """Recurrent networks keep a list of their parameters, which has those that were lent until the next call."""
    for part in module.modules():
        if isinstance(part, torch.nn.RNNBase):
            part._init_flat_weights()


def join_fake_group(world: int, rank: int = 0) -> None:
    """Make the default process group one of `world` ranks that are not there: no data moves."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def abort_groups() -> None:
    """Take all process groups down without waiting for their transfers: NCCL's kernels end."""
    torch.distributed.distributed_c10d._abort_process_group()


def groups_of_process() -> list[Any]:
    """Return all process groups that this process is in."""
    return list(torch.distributed.distributed_c10d._world.pg_map)


def set_allocator(settings: str) -> None:
    """Give the allocator of devices settings as of PYTORCH_ALLOC_CONF, for memory that it takes from now on."""
    torch._C._accelerator_setAllocatorSettings(settings)


def unowned(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory, for which somebody else is answerable: it is free once `x` is."""
    whole = x.untyped_storage()
    there = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), x.device, whole.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(there, x.storage_offset(), x.shape, x.stride())


@contextlib.contextmanager
def repeatable_cudnn() -> Iterator[None]:
    """cuDNN's algorithms repeat their results inside; also where its flags were frozen, as torch's own tests do."""
    before = torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_deterministic(True)
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_deterministic(before[0])
        torch._C._set_cudnn_benchmark(before[1])


def connected_again(store: Any) -> Any:
    """Return a connection of its own to a store, or the store where it has no such thing."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What a trace raises where Python needs a number or a shape that depends on data.

    Imported where it is asked: `symbolic_shapes` brings sympy, most of what `import zerofn` would otherwise cost.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentError, DynamicShapeError, GuardOnDataDependentSymNode


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


def num_global_hooks() -> int:
    """How many hooks every module of the process calls."""
    return sum(map(len, _GLOBAL_HOOKS))


def modes_in_force() -> tuple[Any, ...]:
    """The classes of the function and dispatch modes that see the next call, and the devices that they set."""
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return ()
    modes: list[Any] = [*function_modes(), *dispatch_modes()]
    return tuple(x for mode in modes for x in (type(mode), getattr(mode, "device", None)))


def is_composite(op: OpOverload) -> bool:
    """Whether an operation is only written in terms of others, which is what autograd sees.

    Some, `silu_backward` among them, have kernels of their own besides, with other rounding.
    """
    if op.namespace == "prim":  # prim::device and the like are not the dispatcher's
        return False
    if not torch._C._dispatch_has_kernel(op.name()):  # sym_size and the like of nested tensors
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own = has_kernel(op.name(), "CPU") or has_kernel(op.name(), "CUDA")
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not own


def has_decomposition(op: OpOverload) -> bool:
    """Whether torch writes an operation in terms of simpler ones, in Python."""
    from torch._decomp import decomposition_table

    return op in decomposition_table


def schema_text(op: OpOverload) -> str:
    """An operation's schema, as `torch.library.Library.define` takes it."""
    return str(op._schema)


def proxies_of(trace: Any, values: Any) -> Any:
    """The nodes a trace knows these tensors by."""
    return tree_map(trace.tracer.unwrap_proxy, values)


def inside_functorch() -> bool:
    """Whether a `torch.func` transform is being applied right now."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def takes_forward_derivative() -> bool:
    """Whether a forward-mode derivative is being taken: by `torch.func.jvp`, or inside a `dual_level`."""
    return torch.autograd.forward_ad._current_level >= 0


def functorch_level() -> int:
    """How many `torch.func` transforms are being applied right now, by the number of the innermost; 0 if none is."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return 0 if innermost is None else innermost.level()


def is_functorch_tensor(x: torch.Tensor) -> bool:
    """Whether `x` is tracked by a `torch.func` transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `torch.func` transforms track as `x`."""
    while is_functorch_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


# What a capture that knows an operation's results already needs of torch's: see `shortcut`.
no_dispatch = torch._C._DisableTorchDispatch  # inside, neither modes nor subclasses of tensors see a call
_FAKE, _PROXY, _FUNCTIONAL = (getattr(torch._C._TorchDispatchModeKey, key) for key in ("FAKE", "PROXY", "FUNCTIONAL"))


def lower_modes() -> tuple[Any, Any, Any]:
    """The modes of fake tensors, of a trace, and of functionalisation that would see the next call, or None each."""
    mode = torch._C._get_dispatch_mode
    return mode(_FAKE), mode(_PROXY), mode(_FUNCTIONAL)


def is_implicit(op: OpOverload) -> bool:
    """Whether autograd may see an operation as others, whatever else it has kernels for."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


class Fakes:
    """Fake tensors of one mode, made in a fifth of the time that their constructor takes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._states: dict[torch.device, dict[str, Any]] = {}
        c, unsafe = torch._C, getattr(mode, "_allow_unsafe_data_ptr_access", True)
        self._guard = c._set_warn_deprecated_on_mutable_data_ptr if unsafe else c._set_throw_on_mutable_data_ptr

    def of(self, elem: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor on `device` with the memory of `elem`, which is on "meta"."""
        state = self._states.get(device)
        if state is None:  # what the constructor writes down of one
            state = self._states[device] = dict(vars(FakeTensor(self.mode, elem, device)))
        x: Any = torch.Tensor._make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(x)
        x.__dict__.update(state)
        return x

    def elem(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor on "meta" with the memory of a fake one; call it with `no_dispatch`."""
        out = torch.empty(0, dtype=x.dtype, device="meta")
        return out.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    def simple(self, x: Any) -> bool:
        """Whether a fake tensor is one of this mode that only its shape, strides, dtype and device tell of."""
        return (
            x.fake_mode is self.mode
            and x.constant is None
            and x.real_tensor is None
            and x.device.type != "meta"
            and x.layout is torch.strided
            and not x._has_symbolic_sizes_strides
            and not x.is_quantized
            and not x.is_conj()
            and not x.is_neg()
            and not x._is_zerotensor()  # an immutable zero of forward-mode differentiation: operations drop it
            and not x.is_inference()
        )


def bind(tracer: Any, x: torch.Tensor, node: torch.fx.Node) -> None:
    """Let a trace know `x` as the result of `node`."""
    tracer.tensor_tracker[x] = _ProxyTensor(torch.fx.Proxy(node, tracer), None)


def bind_alike(tracer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Let a trace know `x` by what it knows `y` by."""
    tracer.tensor_tracker[x] = tracer.tensor_tracker[y]


def bound_node(tracer: Any, x: torch.Tensor) -> torch.fx.Node | None:
    """The node that a trace knows `x` by; None for what it does not know, or knows the value of."""
    slot = tracer.tensor_tracker.get(x)
    return slot.proxy.node if slot is not None and slot.constant is None else None


def node_of(tracer: Any, x: torch.Tensor) -> torch.fx.Node | None:
    """The node that a trace knows `x` by, also if it knows the value."""
    slot = tracer.tensor_tracker.get(x)
    return None if slot is None else slot.proxy.node


@contextlib.contextmanager
def plain_dispatch() -> Iterator[None]:
    """Operations inside see no mode, no transform of `torch.func`, no autocast, and no autograd."""
    c = torch._C
    with without_dispatch_modes(), c.DisableTorchFunction(), c._DisableFuncTorch(), c._DisableAutocast():
        with torch.no_grad(), below_autograd():
            yield


def name_of_node(op: OpOverload) -> str:
    """What capture calls the nodes of an operation."""
    return torch.fx.Graph()._target_to_str(op.overloadpacket.__name__)


def new_node(graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """A call of a function, at the end of a graph."""
    node = graph.create_node("call_function", target, (), {}, name)
    node.args = args  # given at once, each would be looked at in Python, for symbolic numbers
    if kwargs:
        node.kwargs = kwargs
    return node


def expression_of(size: torch.SymInt) -> Any:
    """A size that is not known, as a sympy expression."""
    return size.node.expr


def bound_of(size: torch.SymInt, symbol: Any) -> int | None:
    """The most that a symbol in a size may be, as far as torch knows: what its operation, or `torch._check`, has said.

    None where nothing was said.
    """
    most = size.node.shape_env.bound_sympy(symbol).upper
    return int(most) if most.is_Integer and most < sys.maxsize - 1 else None


def sizes_may_be_unknown(inputs: Sequence[torch.Tensor]) -> None:
    """Let the next trace make sizes that depend on data, if its inputs are fake already: the trace then takes their
    mode as it is. Sizes of an earlier trace are forgotten.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # brings sympy

    for mode in {id(x.fake_mode): x.fake_mode for x in inputs if isinstance(x, FakeTensor)}.values():
        mode.shape_env = ShapeEnv()


def tensor_in_mode(x: torch.Tensor, shape: list[int], strides: list[int]) -> torch.Tensor:
    """A fake tensor like `x`, of its mode, with other sizes."""
    assert isinstance(x, FakeTensor)
    with x.fake_mode:
        return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


def compiler_missing(device: str) -> str:
    """Return why Inductor cannot compile for a kind of device, in a sentence; "" if it can."""
    try:
        if device == "cuda":
            importlib.import_module("triton")
        else:
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
    except Exception as error:
        return f"there is no compiler for {device}: {str(error).splitlines()[0]}."
    return ""


def assert_on_device(true: torch.Tensor, sentence: str) -> None:
    """Raise `RuntimeError` with a sentence if a boolean is False. A GPU does so itself: the host does not wait."""
    torch._assert_async(true, sentence)


def compiler_cache() -> str:
    """Return the folder of Inductor's files."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def compiler_state() -> str:
    """Return what Inductor's results depend on beside the graph and torch's threads: versions, settings, devices."""
    import torch._inductor.config as inductor_config

    devices = [torch.cuda.get_device_properties(k).name for k in range(torch.cuda.device_count())]
    cpu = torch.backends.cpu.get_cpu_capability()
    settings = sorted((k, repr(x)) for k, x in inductor_config.save_config_portable().items())
    return f"{torch.__version__} {torch.version.git_version} {devices} {cpu} {settings}"


class _AsPromised(torch.fx.Interpreter):
    """Runs a graph for Inductor, whose decompositions may lay a result out otherwise than torch: `cat` with an empty
    tensor, as of a new cache of keys, becomes a copy that keeps the strides. What reads the result, in this graph or
    behind it, was captured with torch's strides.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        """Return a node's value, laid out as it was captured."""
        out, promised = super().run_node(n), n.meta.get("val")
        if not (isinstance(out, torch.Tensor) and isinstance(promised, torch.Tensor)) or out.shape != promised.shape:
            return out
        shape, strides = out.shape, promised.stride()
        order = sorted(range(out.dim()), key=lambda dim: (-strides[dim], dim))
        along = [dim for dim in order if shape[dim] > 1]
        dense = [math.prod(shape[dim] for dim in along[k + 1 :]) for k in range(len(along))]
        wanted = [strides[dim] for dim in along]
        if wanted != dense or wanted == [out.stride(dim) for dim in along]:
            return out
        moved = out.permute(order).clone(memory_format=torch.contiguous_format)
        return moved.permute(sorted(range(out.dim()), key=order.__getitem__))


def compile_graph(
    gm: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], mode: FakeTensorMode, options: dict[str, Any]
) -> tuple[Callable[[list[Any]], Sequence[Any]], bytes]:
    """Compile a graph without writes by Inductor. `fakes`: its inputs, of `mode`. `options`: of Inductor; those that
    this torch lacks are left out. Return what takes the inputs in a list, which it empties, and the same for
    `load_graph`; b"" where nothing is to be stored.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about itself
        from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    import torch._inductor.config as inductor_config
    from torch._guards import TracingContext, tracing
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    known = {k: v for k, v in options.items() if hasattr(inductor_config, k)}
    if all(x.device.type == "cpu" for x in fakes):
        known["compile_threads"] = 1  # its processes would not write whole files
    with inductor_config.patch(known), torch.no_grad(), tracing(TracingContext(mode)), mode, _whole_files():
        interpreter = _AsPromised(gm)
        flat = make_fx(lambda *xs: interpreter.run(*xs), decomposition_table=select_decomp_table())(*fakes)
        _recursive_joint_graph_passes(flat)
        with V.set_fake_mode(mode):
            found: Any = compile_fx_inner(flat, list(fakes), is_inference=True)
    stored = copy.copy(found) if hasattr(found, "prepare_for_serialization") else None
    if stored is not None:
        stored.prepare_for_serialization()
    return getattr(found, "current_callable", None) or found, b"" if stored is None else pickle.dumps(stored)


def bytes_taken(run: Callable[[], Any]) -> int:
    """Return the most bytes that allocators have given out at one time while `run()` ran, its result among them; 0
    where this torch cannot tell.
    """
    made, a = [], torch.autograd
    try:
        config = a.ProfilerConfig(
            a.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
        )
        a._enable_profiler_legacy(config)  # of this thread; the other one writes to the terminal
    except (AttributeError, TypeError, RuntimeError):
        run()
        return 0
    try:
        made.append(run())
    finally:
        events = [x for thread in a._disable_profiler_legacy() for x in thread if x.kind() == "memory_alloc"]
    return max(itertools.accumulate((x.cpu_memory_usage() + x.cuda_memory_usage() for x in events), initial=0))


def load_graph(content: bytes) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a compiled graph that was stored. Raises whatever damaged or missing files may lead to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants

    constants = CompiledFxGraphConstants()
    with _whole_files():
        found, _ = FxGraphCache.cache_hit_post_compile(pickle.loads(content), {}, constants)
        if found is None:
            raise OSError("a file of torch's cache is missing")
        found.post_compile([], constants, found.fx_kwargs)
    run: Any = found.current_callable
    return run


@contextlib.contextmanager
def _whole_files() -> Iterator[None]:
    """Inside, each file that a C++ compiler writes gets its name when it is complete: one that is killed would leave
    the first part of a library, and the next process would load it.
    """
    import torch._inductor.cpp_builder

    builder: Any = torch._inductor.cpp_builder.CppBuilder
    build = builder.build

    def whole(self: Any) -> None:
        target, output = self._target_file, self._output
        self._target_file = f"{target}.{os.getpid()}.{threading.get_ident()}"
        self._output = output.replace(target, self._target_file)
        try:
            build(self)
            os.replace(self._target_file, target)
        finally:
            self._target_file, self._output = target, output

    builder.build = whole
    try:
        yield
    finally:
        builder.build = build

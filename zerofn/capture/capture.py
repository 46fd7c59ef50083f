"""Capture a step as one FX graph of local operations: forward, backward and update."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Proxy

from .. import tree
from .._torch_compat import (
    compiling,
    current_trace,
    data_dependent_errors,
    lazy_code,
    make_fx,
    proxies_of,
    quiet_fakes,
    sizes_may_be_unknown,
)
from ..graph.program import FlatTree, Program, cached
from ..graph.source_lines import Lines, line_behind, readable, where
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.state_tree import as_tensor
from ..sharding.storage import Stored
from ..tracing.shortcut import Shortcut
from ..util.constants import constant_attributes
from ..util.errors import CaptureError as CaptureError
from ..util.errors import note
from ..util.patches import Patches, autocast_cache, uncollected
from ..util.user_line import at_line
from .advice import instead, note_dtypes
from .as_written import as_written
from .assigned_data import OuterAssignment, assigned_data
from .attention_masks import masks_recognised
from .changing_constants import ChangingConstant, unmoved
from .known_values import answer, values_looked_at
from .model_settings import settings_behind
from .other_model import same_model
from .printing import warned_prints
from .recurrent import recurrent
from .sequence_lengths import known_lengths

log = logging.getLogger("zerofn")


def capture(step: Callable[[Any, Any], Any], state: Any, batch: Any, *, traces: bool = False) -> Program:
    """Run `step(state, batch)` on fake tensors, and record its operations.

    With `traces` every node records the user's line that it comes from. This is slower, so a step is captured with
    it only to explain an error. A number in the new state becomes a tensor if the old state has a tensor there.

    Raises `CaptureError` for a step that branches on data, draws from Python's or NumPy's generators, or returns a
    state of another structure or with entries of other types.
    """
    state_flat, state_tensors = FlatTree.of(state)
    batch_flat, batch_tensors = FlatTree.of(batch)
    copies = cached(state)
    spans, flat_copies = _spans(copies)
    outputs: dict[str, Any] = {}
    casts_once = torch.is_autocast_cache_enabled()

    def run(*flat: Tensor) -> list[Tensor]:
        with Shortcut(answer):
            return recorded(*flat)

    def recorded(*flat: Tensor) -> list[Tensor]:
        num_state, num_copies = len(state_tensors), len(flat_copies)
        full = {k: list(flat[num_state + a : num_state + b]) for k, (a, b) in spans.items()}
        decoded: dict[int, tuple[Tensor, Stored]] = {}
        stored_state = state_flat.spread(flat[:num_state], full)
        fake_state = _decode(stored_state, decoded)
        fake_batch = _decode(batch_flat.spread(flat[num_state + num_copies :]), {})
        _as_given(batch, fake_batch)
        try:
            with Lines() if traces else contextlib.nullcontext(), unmoved(traces), autocast_cache(casts_once):
                out = step(fake_state, fake_batch)
        except ChangingConstant as error:
            raise CaptureError(str(error)).with_traceback(error.__traceback__ if error.here else None) from None
        except OuterAssignment as error:
            raise CaptureError(str(error)).with_traceback(error.__traceback__) from None
        _check_values(out)
        new_state, aux = _split(out, fake_state)
        new: list[Tensor] = []
        outputs["state"] = None
        if new_state is not None:
            new_state = _numbers_as_tensors(new_state, fake_state)
            _check_shards(state_flat, new_state)
            outputs["state"], new = FlatTree.of(state_flat.encode(new_state, stored_state, decoded))
        outputs["aux"], rest = FlatTree.of(aux)
        outputs["num_new"] = len(new)
        return [x.detach() for x in (*new, *rest)]

    inputs = [*state_tensors, *flat_copies, *batch_tensors]
    tracer = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
    try:
        with same_model(any(map(_has_slices, tree.leaves(state, is_leaf=is_sharded)))):
            gm = _trace(tracer, [_at_offset_zero(x.detach()) for x in inputs])
    except Exception as error:
        log.debug("the step could not be captured", exc_info=True)
        note_dtypes(error, state, batch)
        raise _readable(error, step) from None
    return Program(
        gm, state_flat, batch_flat, outputs["state"], outputs["aux"], len(state_tensors), outputs["num_new"], spans
    )


def _has_slices(leaf: Any) -> bool:
    """Whether ranks hold slices of parameters, which `Mesh` axes such as `tensor` cut."""
    return is_sharded(leaf) and any(x.cuts for x in leaf.spec.layout.leaves)


def _at_offset_zero(x: Tensor) -> Tensor:
    """Return `x` or, if it is part of a larger buffer, an empty tensor of its shape and strides, at offset 0.

    A shard may be a view of its gathered copy, at a different offset on each rank. Forward-mode differentiation
    copies a tangent whose offset differs from its primal's, so ranks would get different graphs. Tracing reads no
    elements, so the new memory is never touched.
    """
    if x.layout is not torch.strided or x.untyped_storage().nbytes() == x.numel() * x.element_size():
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _trace(tracer: Callable[..., GraphModule], inputs: list[Tensor]) -> GraphModule:
    """Return the graph. If tracing fails, trace again with `torch.compiler.is_compiling()` true.

    Libraries then skip checks that read data, and kernels that fake tensors do not support. It is not the default,
    because some libraries then choose another algorithm, which rounds differently from the eager step.
    """
    patched = warned_prints, _unvalidated, values_looked_at, masks_recognised, assigned_data, recurrent, known_lengths
    with torch.no_grad(), lazy_code(True), quiet_fakes(), uncollected(), contextlib.ExitStack() as stack:
        for each in patched:
            stack.enter_context(each)
        stack.enter_context(as_written())
        sizes_may_be_unknown(inputs)
        try:
            return tracer(*inputs)
        except CaptureError:
            raise
        except RuntimeError as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        sizes_may_be_unknown(inputs)
        try:
            with compiling():
                gm = tracer(*inputs)
        except RuntimeError as error:
            kinds = data_dependent_errors()
            asked = (".numpy()", "data pointer", "Size-like symbols: none")  # the last: a number's value, no size's
            if isinstance(error, kinds) or any(x in str(error) for x in asked):
                raise CaptureError(_data_dependent(error)).with_traceback(error.__traceback__) from None
            if "has_fw_view" in str(error):
                raise CaptureError(_forward_mode(error)).with_traceback(error.__traceback__) from None
            raise
    log.info(
        "the step was traced with torch.compiler.is_compiling() true, so libraries may choose a different algorithm. "
        "Without this, tracing failed with: %s",
        why,
    )
    return gm


def _spans(copies: dict[int, list[Tensor]]) -> tuple[dict[int, tuple[int, int]], list[Tensor]]:
    """Return (key -> [first, stop) in the flat list, the flat list) of lists of tensors."""
    spans: dict[int, tuple[int, int]] = {}
    flat: list[Tensor] = []
    for k, tensors in copies.items():
        spans[k] = (len(flat), len(flat) + len(tensors))
        flat.extend(tensors)
    return spans, flat


def _split(out: Any, state: Any) -> tuple[Any, Any]:
    """Return (new state, aux); the new state is None for an evaluation step.

    A training step returns a pair whose first item has the structure of the old state. A first item of the state's
    type but of another structure is a mistake, unless they share no names: a dict of metrics, for example.
    """
    tree.orders(out)  # makes nodes of namedtuples with a __new__ of their own
    if isinstance(out, tuple) and len(out) == 2 and not hasattr(out, "_fields"):
        new, aux = out
        if tree.structure(state) == tree.structure(new):
            return new, aux
        plain = isinstance(new, Tensor) or is_sharded(new)
        if type(new) is type(state) and not plain and _shares_names(state, new):
            raise CaptureError(
                f"the step returns a state whose structure differs from its argument: {_difference(state, new)}. "
                "Return the same structure (state.replace(...)), or return (metrics, outputs) from an evaluation step."
            )
    _refuse_new_state(out, state)
    return None, out


def _refuse_new_state(out: Any, state: Any) -> None:
    """Raise for a new state that is not the first of two results: its step would be an evaluation."""
    if type(state) in (dict, list, tuple) or isinstance(state, Tensor) or is_sharded(state):
        return  # results may well have the structure of a plain container
    old = {id(x) for x in tree.leaves(state)}
    paths, found, _ = tree.flatten_with_path(out, is_leaf=lambda x: type(x) is type(state))
    for path, x in zip(paths, found, strict=True):
        if type(x) is type(state) and any(id(leaf) not in old for leaf in tree.leaves(x)):
            place = f" at {tree.name_of(path)!r}" if path else ""
            came = f"{len(out)} values" if type(out) is tuple and len(out) != 2 else f"a {type(out).__name__}"
            raise CaptureError(
                f"the step returns {came}, with a new {type(state).__name__}{place}. A training step returns two "
                "values, the state first. Write `return state, metrics`, and put all other values into the metrics: "
                '{"loss": loss, "more": more}.'
            )


def _names(x: Any) -> set[str]:
    return {tree.name_of(p) for p in tree.flatten_with_path(x)[0]}


def _shares_names(a: Any, b: Any) -> bool:
    return not isinstance(a, dict | list | tuple) or hasattr(a, "_fields") or bool(_names(a) & _names(b))


def _difference(a: Any, b: Any) -> str:
    ours, theirs = _names(a), _names(b)
    if ours == theirs:
        return "the type of a container or a layout has changed"
    missing, extra = sorted(ours - theirs), sorted(theirs - ours)
    return "; ".join(
        part
        for part in (f"{missing[0]!r} is missing" if missing else "", f"{extra[0]!r} is new" if extra else "")
        if part
    )


def _check_values(out: Any) -> None:
    """Raise for a result that would be a constant of the captured step: a number taken from a tensor, an iterator."""
    for path, leaf in zip(*tree.flatten_with_path(out)[:2], strict=True):
        if isinstance(leaf, str) and "FakeTensor(" in leaf or _holds_tensors(leaf):
            raise CaptureError(
                f"the step returns {tree.name_of(path)!r} as a {type(leaf).__name__} that contains a tensor, which has "
                "no value while the step is captured. Return tensors in dicts, lists, tuples or dataclasses, and "
                "format them outside the step."
            )
        if isinstance(leaf, Iterator | AsyncIterator | Coroutine):
            raise CaptureError(
                f"the step returns a {type(leaf).__name__}, whose code would run only after the step. Return values: "
                "write `return` instead of `yield`, `def` instead of `async def`, and a list instead of an iterator."
            )
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                f"the step returns {tree.name_of(path)!r} as a number read from a tensor (.item(), "
                f"float(...)){_line_of(leaf)}. Return the tensor, and read its value outside the step."
            )


def _holds_tensors(leaf: Any) -> bool:
    """Whether an object that is not a container has tensors in it."""
    if isinstance(leaf, Tensor) or is_sharded(leaf):
        return False
    inside = leaf if isinstance(leaf, set | frozenset) else getattr(leaf, "__dict__", {}).values()
    return any(isinstance(x, Tensor) for x in inside)


def _line_of(number: Any) -> str:
    """Return the user's line at which a number was taken from a tensor, if lines are recorded."""
    proxy = proxies_of(current_trace(), number)
    return line_behind(proxy.node if isinstance(proxy, Proxy) else None)


def _numbers_as_tensors(new: Any, old: Any) -> Any:
    """Return the new state with a tensor wherever the old one, of the same structure, has one."""
    paths, leaves, treedef = tree.flatten_with_path(new, is_leaf=is_sharded)
    out: list[Any] = []
    for path, x, before in zip(paths, leaves, tree.leaves(old, is_leaf=is_sharded), strict=True):
        if isinstance(x, int | float) and isinstance(before, Tensor):
            x = as_tensor(x).to(before.device)
        if isinstance(x, Tensor) != isinstance(before, Tensor):
            kind, was = ("tensor" if isinstance(v, Tensor) else type(v).__name__ for v in (x, before))
            raise CaptureError(
                f"the step returns state entry {tree.name_of(path)!r} as a {kind}; it was a {was}. Return a tensor or "
                "a number for an entry that was a tensor, and store other values outside the state."
            )
        out.append(x)
    return tree.unflatten(treedef, out)


def _check_shards(flat: FlatTree, new: Any) -> None:
    """Raise for a shard that comes back with another dtype or size: it could not replace the old one."""
    nodes, treedef = tree.flatten(new, is_leaf=is_sharded)
    for name, cut, x in zip(tree.field_names(treedef), flat.nodes, nodes, strict=True):
        if not is_sharded(x):
            continue
        for unit, storage, shard in zip(x.layout.units, cut.storages, x.shards, strict=True):
            a, b = cut.spec.bounds(unit)
            if (shard.dtype, shard.shape) != (storage.dtype, (b - a,)):
                raise CaptureError(
                    f"the step returns state entry {name}[{unit.name!r}] as {shard.dtype} {list(shard.shape)}; it was "
                    f"{storage.dtype} {[b - a]}. Write .to(p.dtype) where the step computes it."
                )


def _decode(value: Any, decoded: dict[int, tuple[Tensor, Stored]]) -> Any:
    """Return a tree with all shards decoded. It adds to `decoded`: id of a shard -> (the shard, its stored form)."""

    def decode(x: Any) -> Any:
        if not is_sharded(x):
            return x
        shards = x.shards
        decoded.update((id(shard), (shard, source)) for shard, source in zip(shards, x.stored, strict=True))
        return Sharded(x.spec, shards, x.copies)

    return tree.tree_map(decode, value, is_leaf=is_sharded)


def _as_given(batch: Any, fakes: Any) -> None:
    """Let the fake tensors of a batch tell what its tensors do to Python: `requires_grad`, whether they are parameters,
    and attributes that are constants.
    """
    pairs = zip(tree.leaves(batch, is_leaf=is_sharded), tree.leaves(fakes, is_leaf=is_sharded), strict=True)
    for x, fake in pairs:
        if isinstance(x, Tensor):
            fake.requires_grad_(x.requires_grad)
            fake._is_param = isinstance(x, nn.Parameter)
            for name, _ in constant_attributes(x):
                setattr(fake, name, getattr(x, name))


def _readable(error: Exception, step: Callable[[Any, Any], Any]) -> Exception:
    """Return the error to raise: with advice, the user's line, and a traceback of the user's frames."""
    name, code = getattr(step, "__name__", "the step"), getattr(step, "__code__", None)
    place = where(error) or (at_line(code.co_filename, code.co_firstlineno) if code else "")
    advised = instead(error) or error
    if place not in str(advised):
        note(advised, f"in {name}{place}")
    return advised.with_traceback(readable(error.__traceback__))


def _forward_mode(error: BaseException) -> str:
    return (
        f"torch cannot trace this forward-mode derivative{where(error)}, because its inputs are views, as gathered "
        "parameters are. Differentiate with respect to clones (tree_map(torch.clone, params)) or to the shards."
    )


# Checks of a distribution's arguments read data; the values are the same without them.
_unvalidated = Patches(lambda: [(torch.distributions.Distribution, "_validate_args", lambda _: False)])

# What a library asks of data, by the end of its file's name: what to tell it instead.
_ASKED_BY = {
    "/copy.py": "To copy a tensor, write x.clone(); containers are already copies.",
    "torch/nn/modules/transformer.py": "Pass is_causal=True or False (tgt_is_causal= of nn.Transformer) with the mask.",
}


def _data_dependent(error: BaseException) -> str:
    at, hint = error.__traceback__, ""
    rows: list[tuple[FrameType, int]] = []
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        hint = next((f" {x}" for name, x in _ASKED_BY.items() if file.endswith(name)), hint)
        rows.insert(0, (at.tb_frame, at.tb_lineno))
        at = at.tb_next
    way_out = settings_behind(rows) or (
        " Use torch.where, or compute the branch outside and pass it in the batch as a bool or an int; or put the part "
        "that reads it inside zerofn.eager_region. To print, log or store the value, return it in the metrics, and "
        f"read it after the step.{hint}"
    )
    return (
        f"the step asks for the value of a tensor while it is captured{where(error)}. A captured step cannot branch on "
        f"data.{way_out}"
    )

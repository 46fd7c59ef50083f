"""What to write instead, for errors of other libraries that come from common mistakes in a step."""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import Tensor

from .. import tree
from .._torch_compat import FakeTensor
from ..sharding.sharded import is_sharded
from ..util.constants import PLAIN_TENSORS, is_constant, special_values
from ..util.errors import note, said
from ..util.user_line import at_line, frames, is_users

_INSTEAD: tuple[tuple[str, type[Exception], str], ...] = (
    (
        r"Not available for 'meta' device type|Can't pickle local object 'WeakValueDictionary|_share_fd_",
        RuntimeError,
        "while a step is captured, its tensors have no values, so they cannot be pickled, shared or read from memory: "
        "return them, and do this outside the step (zerofn.save writes a state)",
    ),
    (
        r"OpaqueTensorImpl|MkldnnCPU|itensor_from_mkldnn",
        RuntimeError,
        "a captured step cannot use tensors in oneDNN's layout: leave to_mkldnn() out; torch calls oneDNN's kernels by "
        "itself",
    ),
    (
        r"FakeTensor doesn't define __round__",
        TypeError,
        "while a step is captured, its tensors have no values that Python could round: write x.round(decimals=n)",
    ),
    (
        r"INTERNAL ASSERT",
        RuntimeError,
        "torch cannot capture this call, most likely because it needs the value of a tensor, as torch.arange(x.sum()) "
        "does: use a constant size and a mask, or put the part that needs the value inside zerofn.eager_region",
    ),
    (
        r"device.*\bmeta\b|\bmeta\b.*device",
        RuntimeError,
        'a tensor on "meta" has a shape and no values. If it is a parameter of a skeleton, do not call the skeleton '
        "directly: write torch.func.functional_call(model, params, (x,)) with all parameters that the loss function "
        "receives",
    ),
    (
        r"parameter_and_buffer_dicts.*Sharded",
        TypeError,
        "functional_call needs full parameters, but state.params are this rank's shards: write functional_call(model, "
        "zerofn.gather(state.params), ...), or use the params that state.value_and_grad passes to the loss function",
    ),
    (
        r"does not require grad and does not have a grad_fn|backward through the graph a second time",
        RuntimeError,
        "a step cannot call .backward(), because gathered parameters require no grad: write loss, grads = "
        "state.value_and_grad(loss_fn)(batch)",
    ),
    (
        r"not differentiable with respect to argument 'running_(mean|var)'",
        ValueError,
        "state.params contain the model's buffers: write TrainState.create(params=dict(model.named_parameters()), "
        "extra=dict(model.named_buffers()), ...) instead of state_dict(), and pass both to functional_call",
    ),
    (
        r"SparseCPU|SparseCUDA|only supported by strided tensors|between dense and sparse",
        ValueError,
        "sparse gradients are not supported, because shards are updated as a whole: write "
        "nn.Embedding(..., sparse=False)",
    ),
    (
        r"nested_tensor|NestedTensor|not tracked with proxy",
        RuntimeError,
        "jagged and nested tensors cannot be captured: pad and mask, or put the part that uses them inside "
        "zerofn.eager_region, with dense tensors as its arguments and results",
    ),
    (
        r"call_function scan\b.*Mixing fake modes",
        RuntimeError,
        "torch cannot capture the gradient through a scan: write a Python loop over the rows, or put the scan inside "
        "zerofn.eager_region",
    ),
    (
        r"its data is not allocated yet",
        RuntimeError,
        "while a step is captured, its tensors have no values, but this call reads them: write torch.stack([x, y]) "
        "instead of torch.tensor([x, y])",
    ),
    (
        r"argument of type: <class 'torch.storage.UntypedStorage'>",
        RuntimeError,
        "a captured step cannot write to a tensor's storage: write to the tensor, x.copy_(y) or x[0] = y, or assign "
        "x.data = y",
    ),
    (
        r"Sparse [CB]S[RC] tensors do not have strides",
        RuntimeError,
        "torch cannot trace a closed-over matrix in a compressed sparse format: pass it in the batch, or close over "
        "x.to_sparse_coo()",
    ),
    (
        r"Cannot swap t\d because it has weakref",
        RuntimeError,
        "a captured step cannot swap tensors: assign x.data = y, or use the other variable",
    ),
    (
        r"FakeTensor is not JSON serializable|unhashable type.*Sym|loop of ufunc does not support.*of type Sym",
        TypeError,
        "while a step is captured, its tensors have no values, so a tensor, or a number read from one, cannot be "
        "written to a file, used as a key, or passed to NumPy: return it in the metrics and read it outside the step",
    ),
    (
        r"'LocalShard'|not LocalShard|got .*\bLocalShard\b",
        TypeError,
        'state.params["name"] describes this '
        "rank's part of a leaf and is not a tensor: write "
        'zerofn.gather(state.params)["name"] for the leaf, or .local for this '
        "rank's part",
    ),
    (
        r"object has no attribute '(value_and_grad|apply_gradients|rng_at|params|opt_state)'",
        TypeError,
        "call the step as step(state, batch), in this order; state is the result of zerofn.shard, or the first of the "
        "two values that the previous step returned",
    ),
)
_DTYPES = re.compile(r"to have the same dtype|must have the same dtype|expected scalar type|should be the same")


def instead(error: BaseException) -> Exception | None:
    """Return an error that adds advice to `error`; None if there is no advice, or `error` contains it."""
    text = said(error)
    if any(advice in text for _, _, advice in _INSTEAD):
        return None
    for pattern, kind, advice in _INSTEAD:
        if re.search(pattern, text):
            return kind(f"{advice}. ({text.splitlines()[0]})")
    return None


def note_dtypes(error: BaseException, state: Any, batch: Any) -> None:
    """If dtypes do not match, add a note: the parameters' compute dtype, and the batch entries of other dtypes."""
    if not _DTYPES.search(str(error)):
        return
    sharded = [x for x in tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    dtypes = {x.spec.precision.computes(u.dtype) for x in sharded for u in x.layout.units if u.dtype.is_floating_point}
    if len(dtypes) != 1:
        return
    (dtype,) = dtypes
    paths, leaves, _ = tree.flatten_with_path(batch, is_leaf=is_sharded)
    others = [
        f"{tree.name_of(p)!r} ({_name(x.dtype)})"
        for p, x in zip(paths, leaves, strict=True)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype
    ]
    what = (
        f"inputs of the batch to it, here {', '.join(others[:4])}"
        if others
        else "values that are combined with them to it"
    )
    note(error, f"parameters are computed in {_name(dtype)}; cast floating {what}: x.to({dtype}).")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def not_constant(name: str, what: str, value: Any) -> TypeError | None:
    """Return the error for the first leaf of a tree that is neither a plain tensor nor a constant; None if there is
    none.
    """
    for path, x in zip(*tree.flatten_with_path(value, is_leaf=is_sharded)[:2], strict=True):
        entry = tree.name_of(path)
        place = f"{name}: {what} entry {entry!r}" if entry else f"{name}: {what}"
        if what == "batch" and isinstance(x, Tensor) and (hidden := _hidden_in(x)):
            return TypeError(
                f"{place} has an attribute {hidden}, a {type(getattr(x, hidden)).__name__}, which a captured step "
                "cannot see. Pass it as an entry of the batch."
            )
        if isinstance(x, Tensor) and x.is_nested:
            return TypeError(
                f"{place} is a nested tensor, which cannot be captured. Pad it with torch.nested.to_padded_tensor, or "
                "pass its values and offsets as entries of the batch."
            )
        if isinstance(x, Tensor) and (special := special_values(x)):
            return TypeError(f"{place} {special}.")
        if type(x) in PLAIN_TENSORS or is_sharded(x) or is_constant(x):
            continue
        found = f"{place} is a {type(x).__name__}"
        if isinstance(x, Tensor):
            return TypeError(
                f"{found}, a subclass of Tensor with its own operations, which cannot be captured. Pass "
                "x.as_subclass(torch.Tensor), or the plain tensors that it is made of."
            )
        return TypeError(
            f"{found}, but leaves must be tensors, numbers, strings, bools or None, because a capture cannot look "
            "inside other objects. For an array, write torch.as_tensor(...). For a class, make it a dataclass or "
            "register it with optree. For a function or a module, close over it."
        )
    return None


def swapped(name: str, state: Any, batch: Any) -> TypeError | None:
    """Return the error if the batch is a state and the state is none, None otherwise."""
    if _is_state(state) or not _is_state(batch):
        return None
    line = next((x for x in frames(sys._getframe()) if is_users(x.file)), None)
    return TypeError(
        f"{name}{'' if line is None else at_line(line.file, line.number)}: the second argument, a "
        f"{type(batch).__name__}, is the state, and the first, a {type(state).__name__}, is not. Call the step as "
        "step(state, batch), in this order."
    )


def _is_state(x: Any) -> bool:
    return hasattr(type(x), "apply_gradients") or any(map(is_sharded, tree.leaves(x, is_leaf=is_sharded)))


def _hidden_in(x: Tensor) -> str:
    """Return the first name of what somebody has set on a tensor and may change; libraries' own begin with '_'."""
    own = {} if isinstance(x, FakeTensor) else vars(x)
    return next((name for name, value in own.items() if name[0] != "_" and not is_constant(value)), "")


def no_leaf(name: str, state: Any, batch: Any) -> TypeError:
    """Return the error for the first leaf that is neither a tensor nor a constant. `name`: the step's."""
    for what, value in (("state", state), ("batch", batch)):
        if (error := not_constant(name, what, value)) is not None:
            return error
    return TypeError(
        f"{name}: the state or the batch contains a node of its tree whose metadata cannot be hashed. Use "
        "hashable values in the metadata of your own node classes."
    )

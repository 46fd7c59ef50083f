"""What one ATen operation does to memory and to the random generators: which tensors it writes
into, whether it reads what it overwrites, whether it draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch_compat import OpOverload, schema_arguments
from ..ops.registry import written_arguments

aten = torch.ops.aten

# Fresh memory whose content nobody may rely on: no call at all, the buffer appears when it is first
# written.
ALLOCATE = frozenset(
    "aten::empty aten::empty_like aten::empty_strided aten::empty_permuted aten::new_empty "
    "aten::new_empty_strided".split()
)
# These read a tensor for its shape alone: logged as a fill of fresh memory, or moments would keep
# parameters alive.
FILL_LIKE: dict[str, Callable[..., tuple[Any, tuple[Any, ...]]]] = {
    "aten::zeros_like": lambda *a: (aten.zero_.default, ()),
    "aten::ones_like": lambda *a: (aten.fill_.Scalar, (1,)),
    "aten::full_like": lambda _, value: (aten.fill_.Scalar, (value,)),
    "aten::new_zeros": lambda *a: (aten.zero_.default, ()),
    "aten::new_ones": lambda *a: (aten.fill_.Scalar, (1,)),
    "aten::new_full": lambda _, size, value: (aten.fill_.Scalar, (value,)),
    "aten::rand_like": lambda *a: (aten.uniform_.default, (0.0, 1.0)),
    "aten::randn_like": lambda *a: (aten.normal_.default, (0.0, 1.0)),
}
# In-place operations that never read what they overwrite.
_OVERWRITE = frozenset(
    "zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_".split()
)


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensor arguments that `func` writes into."""
    return tensors(written_arguments(func, args, kwargs))


def overwrites(func: Any, kwargs: Any, tensor: torch.Tensor) -> bool:
    """Whether `func` writes into `tensor` without reading what was there."""
    if not isinstance(func, OpOverload):
        return True
    outs = [kwargs.get(argument.name) for argument in schema_arguments(func) if argument.is_out]
    return func.name().partition(".")[0].removeprefix("aten::") in _OVERWRITE or any(o is tensor for o in outs)


def covers(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is every byte of its storage, once."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def is_random(func: Any) -> bool:
    """Whether `func` draws from a generator. An operation that is not ATen's is a whole sampler."""
    return not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an operation."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [x for part in tree for x in tensors(part)]


def mapped(f: Callable[[Any], Any], tree: Any) -> Any:
    """The arguments of an operation with `f` applied to everything that is not a list, tuple or dict."""
    if isinstance(tree, dict):
        return {key: mapped(f, x) for key, x in tree.items()}
    if type(tree) is list or type(tree) is tuple:
        return type(tree)(mapped(f, x) for x in tree)
    return f(tree)

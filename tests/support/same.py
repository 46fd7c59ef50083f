"""Trees compared bit for bit; where they differ, a sentence says at which leaf, on which rank and by what."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerofn import tree


def assert_same_trees(got: Any, expected: Any, what: str = "", *, equal_nan: bool = False) -> None:
    """Raise `AssertionError` unless two trees have the same leaves under the same names: tensors of one dtype and
    shape with equal elements (NaN too with `equal_nan`), or equal values. `what` says which case it is: the stage,
    the tier, the step. On a rank the message begins with it.
    """
    __tracebackhide__ = True
    found = first_difference(got, expected, equal_nan=equal_nan)
    assert not found, ": ".join(filter(None, (_rank(), what, found)))


def first_difference(got: Any, expected: Any, *, equal_nan: bool = False) -> str:
    """What differs between two trees, at the first leaf that does; "" where nothing does."""
    (ours, values), (theirs, others) = ((_names(t), tree.leaves(t)) for t in (got, expected))
    if ours != theirs:
        more, less = ([x for x in a if x not in b] for a, b in ((ours, theirs), (theirs, ours)))
        return f"the trees have other leaves: {more[:5]} are not expected, {less[:5]} are missing"
    for name, value, other in zip(ours, values, others, strict=True):
        found = _between(value, other, equal_nan)
        if found:
            return f"leaf {name!r}: {found}" if name else found
    return ""


def _names(value: Any) -> list[str]:
    return tree.field_names(tree.structure(value))


def _between(a: Any, b: Any, equal_nan: bool) -> str:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return "" if type(a) is type(b) and a == b else f"{a!r}, not {b!r}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
    if torch.equal(a, b):
        return ""
    differs = a != b
    if equal_nan:
        differs &= ~(a.isnan() & b.isnan())
    where = differs.nonzero()
    if not len(where):
        return ""
    first = tuple(where[0].tolist())
    return (
        f"{len(where)} of {a.numel()} elements differ, the first at {list(first)}: "
        f"{a[first].item()!r}, not {b[first].item()!r}"
    )


def _rank() -> str:
    return f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else ""

"""Tensors among the arguments of operations, against torch's own trees."""

import torch
from torch.utils._pytree import tree_leaves

from zerofn.util.nested_arguments import tensors_in, with_tensors

A, B, C, D = (torch.full((2,), float(k)) for k in range(4))
ARGUMENTS = ((A, [B, None, (1, "x", [C])], 2.5), {"out": D, "sizes": torch.Size([2])})


def test_all_are_found_in_torchs_order():
    expected = [x for x in tree_leaves(ARGUMENTS) if isinstance(x, torch.Tensor)]
    assert [id(x) for x in tensors_in(ARGUMENTS)] == [id(x) for x in expected] == [id(x) for x in (A, B, C, D)]


def test_all_are_replaced_and_nothing_else():
    args, named = with_tensors(ARGUMENTS, id)
    assert args == (id(A), [id(B), None, (1, "x", [id(C)])], 2.5)
    assert named == {"out": id(D), "sizes": (2,)}

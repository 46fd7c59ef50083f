"""What operations cost, counted otherwise; and what groups they are timed with."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from zerofn._torch_compat import make_fx
from zerofn.cost import op_timer
from zerofn.cost.op_cost import flops, groups_of
from zerofn.tracing import fake_kernels  # noqa: F401  (registers the one for float32)

ENDS = torch.tensor([3, 8], dtype=torch.int32)
GROUPS = [slice(0, 3), slice(3, 8)]
PRODUCTS = {  # shapes, and the same by a plain product for each group
    "rows in groups": ((8, 16), (2, 16, 12), lambda a, b: [a[x] @ b[k] for k, x in enumerate(GROUPS)]),
    "columns in groups": ((2, 12, 16), (16, 8), lambda a, b: [a[k] @ b[:, x] for k, x in enumerate(GROUPS)]),
    "what is summed in groups": ((16, 8), (8, 12), lambda a, b: [a[:, x] @ b[x] for x in GROUPS]),
}


def grouped(name):
    """The node of a grouped product, and the operations that plain products take."""
    a, b, plain = PRODUCTS[name]
    a, b = torch.randn(a), torch.randn(b).mT.contiguous().mT
    with FlopCounterMode(display=False) as counted:
        plain(a, b)
    gm = make_fx(lambda a, b, ends: torch._grouped_mm(a, b, offs=ends), tracing_mode="fake")(a, b, ENDS)
    (node,) = [x for x in gm.graph.nodes if "grouped" in str(x.target)]
    return node, counted.get_total_flops()


@pytest.mark.parametrize("name", PRODUCTS)
def test_grouped_products_take_what_their_groups_take(name):
    node, expected = grouped(name)
    assert flops(node) == expected


@pytest.mark.parametrize("name", PRODUCTS)
def test_they_are_timed_with_equal_groups_of_all_rows(monkeypatch, name):
    node, _ = grouped(name)
    ends = []
    monkeypatch.setattr(op_timer, "callable_of", lambda target: lambda *args: ends.append(args[groups_of(node).at]))
    op_timer._seconds(node, [0, 0, 0])
    assert all(x.tolist() == [4, 8] for x in ends) and ends

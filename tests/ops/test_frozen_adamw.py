"""AdamW whose variance does not change any more, beside float64 and in torch's operations."""

import pytest
import torch

from tests.support import kernel_cases as cases
from tests.support.kernel_cases import chosen as chosen
from zerofn.ops import cpu, native, sign_rows
from zerofn.ops import frozen_adamw as _op  # noqa: F401  (defines zerofn::frozen_adamw)

ops = torch.ops.zerofn
B2, EPS, COUNT = 0.95, 1e-8, 7


def given(size=1000):
    rng = torch.Generator().manual_seed(size)
    p, m, v = (torch.randn(size, generator=rng) for _ in range(3))
    return p, m, torch.where(v.abs() < 0.1, 0.0, v.square())


def arguments(finite=None, size=1000):
    runs = [0, 400], [400, size - 3], [0.1, 0.02], [0.3, 0.0]
    scalars = torch.tensor(COUNT), torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.25, dtype=torch.float64)
    return *scalars, finite, *runs, B2, EPS


def stepped(p, m, v, finite=None, last=None):
    """(p, m). `last`: the momentum before."""
    return ops.frozen_adamw(p, torch.zeros_like(m) if last is None else last, v, m, *arguments(finite, p.numel()))


@cases.each_isa
def test_a_step_is_float64s(isa):
    p, m, v = given()
    found, momentum = stepped(p, m, v)
    x, y, z = p.double(), m.double(), v.double()
    rate = torch.cat([torch.full((400,), 0.05), torch.full((600,), 0.01)]).double()
    decay = torch.cat([torch.full((400,), 0.3), torch.zeros(600)]).double()
    way = torch.where(z > 0, 1.25 * y / ((z / (1 - B2**COUNT)).sqrt() + EPS), 0.0)
    x = x - rate * (way + decay * x)
    x[-3:] = p[-3:]  # of no run
    assert torch.equal(momentum, m)
    torch.testing.assert_close(found.double(), x, rtol=3e-7, atol=3e-7)


def coded(m, row, block, gaps):
    """(rows of signs, what they stand for)"""
    num = m.numel() // row
    rows = torch.empty(num, sign_rows.row_bytes(row, block), dtype=torch.uint8)
    signs = sign_rows.Signs(rows, row, block, gaps)
    sign_rows.encode(m, signs)
    return rows, sign_rows.decoded(signs)


@cases.each_isa
@pytest.mark.parametrize("num, block", [(1, 2048), (2, 2048), (3, 128)])
def test_momentum_that_came_as_signs_is_decoded_on_the_way(num, block, isa, monkeypatch):
    row = 2 * block
    size, gaps = num * row, [17, 32, num * row - 40, num * row]
    p, m, v = given(size)
    rows, values = coded(m, row, block, gaps)
    for finite in (None, torch.tensor(True)):
        want = stepped(p, values, v)
        how = (*arguments(finite, size), row, block, gaps)
        for g in (rows, rows.view(-1)):
            assert all(map(torch.equal, ops.frozen_adamw(p, m, v, g, *how), want))
        split, kept = list(cpu.split(p)), m.clone()
        ops.frozen_adamw_(split, [kept], v, rows, *how)
        assert torch.equal(cpu.join(*split), want[0]) and torch.equal(kept, want[1])
        with monkeypatch.context() as without:
            without.setattr("zerofn.ops.cpu.missing", lambda: "not there")
            found = ops.frozen_adamw(p, m, v, rows, *how)
        assert torch.equal(found[1], values)
        torch.testing.assert_close(found[0], want[0], rtol=3e-7, atol=3e-7)
    same = ops.frozen_adamw(p, m, v, rows, *arguments(torch.tensor(False), size), row, block, gaps)
    assert torch.equal(same[0], p) and torch.equal(same[1], m)


@pytest.mark.parametrize("num_threads", [3])
def test_a_step_does_not_depend_on_the_number_of_threads(num_threads):
    size, before, found = 1 << 18, torch.get_num_threads(), []
    p, m, v = given(size)
    rows, _ = coded(m, size // 2, 2048, [])
    for num in (1, num_threads):
        torch.set_num_threads(num)
        try:
            found.append(ops.frozen_adamw(p, m, v, rows, *arguments(None, size), size // 2, 2048, []))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_have_torchs_operations(dtype):
    p, m, v = (x.to(dtype) for x in given(4096))
    rows, values = coded(m.float(), 4096, 2048, [])
    found = ops.frozen_adamw(p, m, v, rows, *arguments(None, 4096), 4096, 2048, [])
    assert torch.equal(found[1], values.to(dtype)) and found[0].dtype == dtype
    assert all(map(torch.equal, found, stepped(p, values.to(dtype), v)))


def test_without_kernels_it_is_the_same_to_an_ulp(monkeypatch):
    if native.missing():
        pytest.skip(native.missing())
    found = stepped(*given())
    monkeypatch.setattr("zerofn.ops.frozen_adamw.kernels", lambda g: None)
    for a, b in zip(found, stepped(*given()), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=3e-7)


def test_a_step_that_is_skipped_changes_nothing():
    p, m, v = given()
    m[5] = torch.inf
    found = stepped(p, m, v, torch.tensor(False), last=v)
    assert torch.equal(found[0], p) and torch.equal(found[1], v)

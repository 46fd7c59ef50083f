"""AdamW whose variance does not change any more, beside float64 and in torch's operations."""

import pytest
import torch

from tests.support import kernel_cases as cases
from zerofn.ops import frozen_adamw as _op  # noqa: F401  (defines zerofn::frozen_adamw)
from zerofn.ops import native

B2, EPS, COUNT = 0.95, 1e-8, 7


def given(size=1000):
    rng = torch.Generator().manual_seed(size)
    p, m, v = (torch.randn(size, generator=rng) for _ in range(3))
    return p, m, torch.where(v.abs() < 0.1, 0.0, v.square())


def stepped(p, m, v, finite=None, size=1000):
    runs = [0, 400], [400, size - 3], [0.1, 0.02], [0.3, 0.0]
    scalars = torch.tensor(COUNT), torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.25, dtype=torch.float64)
    return torch.ops.zerofn.frozen_adamw(p, m, v, *scalars, finite, *runs, B2, EPS, None, 0)


@cases.each_isa
def test_a_step_is_float64s(isa):
    p, m, v = given()
    found, same = stepped(p, m, v)
    x, y, z = p.double(), m.double(), v.double()
    rate = torch.cat([torch.full((400,), 0.05), torch.full((600,), 0.01)]).double()
    decay = torch.cat([torch.full((400,), 0.3), torch.zeros(600)]).double()
    way = torch.where(z > 0, 1.25 * y / ((z / (1 - B2**COUNT)).sqrt() + EPS), 0.0)
    x = x - rate * (way + decay * x)
    x[-3:] = p[-3:]  # of no run
    assert torch.equal(same, v)
    torch.testing.assert_close(found.double(), x, rtol=3e-7, atol=3e-7)


def test_without_kernels_it_is_the_same_to_an_ulp(monkeypatch):
    if native.missing():
        pytest.skip(native.missing())
    found = stepped(*given())
    monkeypatch.setattr("zerofn.ops.update_rule.kernels", lambda g: None)
    for a, b in zip(found, stepped(*given()), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=3e-7)


def test_a_step_that_is_skipped_changes_nothing():
    p, m, v = given()
    m[5] = torch.inf
    found = stepped(p, m, v, torch.tensor(False))
    assert torch.equal(found[0], p) and torch.equal(found[1], v)

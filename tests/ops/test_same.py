import pytest
import torch

import zerofn
from zerofn.ops.same import RanksDiffer, check_same, checksum, digest

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


def values(dtype, numel=1000):
    drawn = torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_is_of_the_bits_in_their_order_whatever_the_strides(dtype):
    x = values(dtype)
    other = x.clone()
    other[[3, 900]] = x[[900, 3]]
    assert not torch.equal(x, other)
    assert checksum(x) == checksum(torch.stack([x, x], 1)[:, 0]) == checksum(x.clone().view(10, 100))
    assert len({checksum(x), checksum(other), checksum(x.flip(0)), checksum(x[1:])}) == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 1000])
def test_equal_bits_have_equal_digests_whatever_the_strides(dtype, numel):
    x = values(dtype, numel)
    spread = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(digest(x), digest(spread))
    assert digest(x)[1] == numel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_element_changes_the_digest_and_so_do_two_exchanged_ones(dtype):
    x = values(dtype)
    seen = {tuple(digest(x).tolist())}
    for k in range(0, 1000, 37):
        y = x.clone()
        y[k] = ~y[k] if dtype == torch.bool else y[k] + 1
        seen.add(tuple(digest(y).tolist()))
    assert len(seen) == 1 + len(range(0, 1000, 37))
    i, j = 0, int((x != x[0]).nonzero()[-1])
    x[[i, j]] = x[[j, i]]
    assert tuple(digest(x).tolist()) not in seen


def test_a_digest_does_not_depend_on_chunks(monkeypatch):
    import importlib

    x = values(torch.float32)
    whole = digest(x)
    monkeypatch.setattr(importlib.import_module("zerofn.ops.same"), "_CHUNK", 7)
    assert torch.equal(digest(x), whole)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (torch.tensor(0.5), torch.tensor(0.25), "rank 0 has 0.5, rank 1 has 0.25"),
        (torch.tensor(3), torch.tensor(-4), "rank 0 has 3, rank 1 has -4"),
        (torch.tensor(True), torch.tensor(False), "rank 0 has True, rank 1 has False"),
        (torch.tensor(0.5), torch.tensor(0.25, dtype=torch.bfloat16), "rank 0 has 0.5, rank 1 has"),
        (torch.zeros(2), torch.ones(2), "rank 0 has 2 elements with the checksum 0000000000000000, rank 1 has 2 el"),
        (torch.zeros(2), torch.zeros(4), "rank 0 has 2 elements .*, rank 1 has 4 elements"),
    ],
)
def test_a_difference_is_told_with_both_values(first, second, told):
    rows = torch.cat([digest(first), digest(second)])
    with pytest.raises(RanksDiffer, match=f"the rate must be the same on all ranks.*{told}"):
        check_same(first, rows, "the rate", "data")
    x = check_same(first, torch.cat([digest(first)] * 3), "the rate", "data")
    assert x.data_ptr() == first.data_ptr()


def test_a_check_that_nobody_reads_stays_in_the_graph():
    from zerofn._torch_compat import make_fx

    def f(x):
        torch.ops.zerofn.check_same(x, torch.ops.zerofn.digest(x), "x", "data")
        return x + 1

    gm = make_fx(f, tracing_mode="fake")(torch.ones(3))
    gm.graph.eliminate_dead_code()
    assert any(n.target is torch.ops.zerofn.check_same.default for n in gm.graph.nodes)


def test_one_rank_agrees_with_itself():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (g,) = torch.autograd.grad((zerofn.same(x) ** 2).sum(), x)
    assert torch.equal(g, 2 * x.detach())

"""Where tokens are after `dispatch`, and that `combine` brings them back."""

import pytest
import torch
import torch.distributed as dist

from zerofn.moe import combine, dispatch, own, route

WIDTH, TOKENS = 3, 5


def tokens(rank, num_experts):
    draw = torch.Generator().manual_seed(20 + rank)
    x = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    return x, torch.randn(TOKENS, num_experts, generator=draw, dtype=torch.float64)


def sent(num_experts, k, capacity):
    x, logits = tokens(dist.get_rank(), num_experts)
    routing = route(logits, k, capacity=capacity, min_capacity=1)
    rows = dispatch(x, routing, "data")
    # Experts that multiply by their number and one: what comes back says who it was.
    here = len(rows)
    first = dist.get_rank() * here
    factors = torch.arange(first + 1, first + here + 1, dtype=x.dtype)
    return routing.slot, routing.capacity, rows, combine(rows * factors.view(-1, 1, 1), routing, "data"), routing


@pytest.mark.part(size=[1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_arrive_at_their_experts_and_come_back(ranks, size):
    num_experts = 2 * size if size < 4 else 4
    for k, capacity in ((1, None), (2, None), (2, 0.6)):
        compare(size, num_experts, k, ranks(size, sent, num_experts, k, capacity))


def compare(size, num_experts, k, everything):
    here = num_experts // size
    for rank, (slot, places, _, back, routing) in enumerate(everything):
        x, _ = tokens(rank, num_experts)
        expected = torch.zeros_like(x)
        filled = set()
        for c in range(k):
            for s in range(TOKENS):
                e, place = divmod(slot[c, s].item(), places)
                if e == num_experts:
                    continue
                expected[s] += routing.weight[c, s] * (e + 1) * x[s]
                rows = everything[e // here][2]
                assert rows.shape == (here, size * places, WIDTH)
                assert torch.equal(rows[e % here, rank * places + place], x[s])
                filled.add((e, place))
        torch.testing.assert_close(back, expected, rtol=1e-14, atol=1e-15)
        for e in range(num_experts):
            for place in range(places):
                if (e, place) not in filled:
                    assert not everything[e // here][2][e % here, rank * places + place].any()


def refusals():
    size = dist.get_world_size()
    x, logits = tokens(0, size + 1)
    with pytest.raises(ValueError, match=f"{size} ranks along 'data' cannot divide {size + 1} experts equally"):
        dispatch(x, route(logits), "data")
    with pytest.raises(ValueError, match=f"moe.combine: {size} ranks along 'data' cannot divide {size + 1}"):
        combine(x[None], route(logits), "data")
    with pytest.raises(ValueError, match=f"moe.own: {size} ranks along 'data' cannot divide {size + 1}"):
        own({"w": torch.ones(size + 1, 2)}, "data")
    with pytest.raises(ValueError, match="mesh has no axis 'expert'"):
        dispatch(x, route(logits), "expert")
    return own(torch.arange(size), "data").tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_experts_that_ranks_cannot_share_are_refused(ranks, size):
    assert ranks(size, refusals) == [[r] for r in range(size)]


def test_a_dropped_token_reads_nothing():
    """Its row of the experts' output is another token's, which may be anything."""
    routing = route(torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]]), capacity=0.5, min_capacity=0)
    assert routing.kept.tolist() == [[True, False, True]]
    y = torch.tensor([[[1.0]], [[torch.inf]]])
    assert combine(y, routing).flatten().tolist()[:2] == [pytest.approx(1, abs=1e-3), 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: dispatch(torch.ones(3, 2), r), r"expected the 4 tokens that were routed, \[4, d\], got \[3, 2\]"),
        (lambda r: dispatch(torch.ones(4), r), r"got \[4\]"),
        (lambda r: combine(torch.ones(2, 3, 1), r), r"expected the experts' outputs \[2, 4, d\].*got \[2, 3, 1\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(route(torch.zeros(4, 2)))

"""Routing beside a loop over tokens in plain torch."""

import pytest
import torch

from tests.support.plain_moe import plain_balance, plain_route
from tests.support.same import assert_same_trees
from zerofn import tree
from zerofn.moe import Routing, load_balance_loss, route


def logits_of(num_tokens, num_experts, seed=0):
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def spread(found):
    """The weight of each expert for each token, [S, E]."""
    k, num_tokens = found.expert.shape
    out = torch.zeros(num_tokens, found.num_experts, dtype=found.weight.dtype)
    return out.scatter_add(1, found.expert.t(), found.weight.t())


def check(logits, k, **options):
    found = route(logits, k, **options)
    kept, experts, counts = plain_route(logits, k, **options)
    weights = torch.zeros_like(logits)
    for s, mine in enumerate(kept):
        for e, weight in mine.items():
            weights[s, e] = weight
    torch.testing.assert_close(spread(found), weights, rtol=1e-14, atol=0)
    assert found.expert.t().tolist() == experts
    assert found.counts.tolist() == counts
    assert found.kept.t().tolist() == [[e in mine for e in of] for mine, of in zip(kept, experts, strict=True)]
    assert found.dropped.item() == sum(counts) - sum(map(len, kept))
    slots = found.slot[found.kept]
    assert len(set(slots.tolist())) == len(slots)  # nobody shares a place
    assert (slots // found.capacity).tolist() == found.expert[found.kept].tolist()
    assert (found.slot[~found.kept] == found.num_slots).all()
    return found


CASES = [(s, e, k) for s, e in ((1, 1), (1, 3), (7, 2), (12, 5), (16, 4)) for k in (1, 2, 3) if k <= e]


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), CASES)
@pytest.mark.parametrize("priority", ["choice", "position", "probability", "random"])
def test_routes_are_those_of_a_loop(num_tokens, num_experts, k, priority):
    logits = logits_of(num_tokens, num_experts, 7 * num_tokens + k)
    if priority == "random":
        priority = torch.rand(k, num_tokens, generator=torch.Generator().manual_seed(1))
    for capacity, least in ((None, 0), (0.5, 0), (1.0, 0), (1.1, 1), (0.25, 2), (3, 4)):
        found = check(logits, k, capacity=capacity, min_capacity=least, priority=priority)
        assert found.capacity <= num_tokens
        if capacity is None:
            assert found.kept.all()


def test_what_is_dropped_is_seen():
    """The cases above would say little if nothing was ever dropped."""
    found = check(logits_of(12, 3), 2, capacity=0.5, min_capacity=0)
    assert found.capacity == 4 and found.dropped > 0 and not found.kept.all(1).any()


@pytest.mark.parametrize("noisy_first", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_noise_chooses_and_does_not_weigh(k, noisy_first):
    logits, noise = logits_of(9, 4), logits_of(9, 4, 5) * 3
    found = check(logits, k, noise=noise, noisy_first=noisy_first, normalize=False, capacity=None)
    assert (found.expert[0] == logits.argmax(1)).all() == (not noisy_first)
    torch.testing.assert_close(found.weight, logits.softmax(1).gather(1, found.expert.t()).t())


@pytest.mark.parametrize("normalize", [None, False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_weights_of_kept_choices_add_up_to_one_if_asked(k, normalize):
    found = check(logits_of(12, 3), k, capacity=0.5, min_capacity=0, normalize=normalize)
    total = found.weight.sum(0)
    if k > 1 if normalize is None else normalize:
        assert torch.allclose(total, found.kept.any(0).double())
    else:
        assert (total < 1).all()


def test_tokens_that_are_not_used_take_no_place():
    used = torch.arange(12) % 3 != 0
    found = check(logits_of(12, 3), 2, capacity=0.5, min_capacity=0, used=used)
    assert found.counts.sum() == 16 and not found.kept[:, ~used].any() and not found.weight[:, ~used].any()


def test_a_capacity_is_the_decimal_that_was_written():
    """1.1 * 10 is a little more than 11 in floating point."""
    assert route(torch.zeros(10, 1), capacity=1.1, min_capacity=0).capacity == 10
    assert route(torch.zeros(100, 10), capacity=1.1, min_capacity=0).capacity == 11
    assert route(torch.zeros(100, 10), 2, capacity=1.1, min_capacity=0).capacity == 22
    assert route(torch.zeros(101, 10), capacity=1.1, min_capacity=0).capacity == 12


def test_weights_are_differentiable_to_second_order():
    logits = logits_of(6, 4)

    def of(x):
        return route(x, 2, capacity=0.75, min_capacity=1).weight

    assert torch.autograd.gradcheck(of, logits.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(of, logits.clone().requires_grad_())


@pytest.mark.parametrize("priority", ["choice", "position", "probability"])
def test_vmap_is_a_loop(priority):
    def of(x):
        return route(x, 2, capacity=0.75, min_capacity=1, priority=priority)

    batch = torch.stack([logits_of(6, 4, seed) for seed in range(5)])
    found = torch.vmap(of)(batch)
    assert isinstance(found, Routing) and (found.num_experts, found.capacity) == (4, 3)
    for k, one in enumerate(map(of, batch)):
        assert_same_trees(tree.tree_map(lambda x, k=k: x[k], found), one)


def test_half_precision_is_routed_in_float32():
    found = route(logits_of(6, 4).bfloat16(), 2)
    assert found.weight.dtype == torch.float32
    assert torch.equal(found.weight, route(logits_of(6, 4).bfloat16().float(), 2).weight)


@pytest.mark.parametrize("num_first", [1, 3])
@pytest.mark.parametrize("with_used", [False, True])
def test_the_balance_of_a_loop(num_first, with_used):
    logits, used = logits_of(9, 4), torch.arange(9) % 4 != 0 if with_used else None
    found, (_, experts, _) = route(logits, 3, used=used), plain_route(logits, 3)
    mine = load_balance_loss(logits, found.expert[:num_first], used=used)
    torch.testing.assert_close(mine, plain_balance(logits, experts, num_first, used), rtol=1e-14, atol=0)


X = torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: route(X, 5), r"k=5 experts for each token are more than the 4"),
        (lambda: route(X, 0), r"k=0, the number of experts"),
        (lambda: route(X, True), r"k=True, the number of experts"),
        (lambda: route(X, capacity=0.0, min_capacity=0), r"capacity=0.0 and min_capacity=0 would drop all tokens"),
        (lambda: route(X, capacity=-1.0, min_capacity=0), r"drop all tokens"),
        (lambda: route(X, capacity=float("nan")), r"capacity=nan must be a factor"),
        (lambda: route(X, capacity="2"), r"capacity='2' must be a factor"),
        (lambda: route(X, min_capacity=-1), r"min_capacity=-1, a number of tokens"),
        (lambda: route(X, priority="choise"), r"priority='choise' is not known; did you mean 'choice'"),
        (lambda: route(X, priority=3), r"priority=3 is not known; expected one of choice, position, probability"),
        (lambda: route(X, priority=torch.ones(2, 6)), r"priority has shape \[2, 6\], expected \[1, 6\]"),
        (lambda: route(X, noise=torch.ones(4, 6)), r"noise has shape \[4, 6\], expected \[6, 4\]"),
        (lambda: route(X, used=torch.ones(4)), r"used has shape \[4\], expected \[6\]"),
        (lambda: route(X[None]), r"expected floating logits \[tokens, experts\], got torch.float32 \[1, 6, 4\]"),
        (lambda: route(X.long()), r"got torch.int64"),
        (lambda: route(X[:0]), r"got torch.float32 \[0, 4\]"),
        (lambda: load_balance_loss(X, torch.zeros(6, 1)), r"expected logits \[tokens, experts\] and choices"),
    ],
)
def test_mistakes_are_sentences(call, words):
    with pytest.raises(ValueError, match=words):
        call()

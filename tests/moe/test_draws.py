"""The noise of gates: its distribution, and that it is a function of a key."""

import math

import pytest
import torch

import zerofn
from zerofn.moe import gumbel, jitter, route
from zerofn.random import key


def test_gumbel_noise_has_its_mean_and_variance():
    noise = gumbel(torch.zeros(200_000, dtype=torch.float64), key(0))
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert gumbel(torch.zeros(200_000, dtype=torch.bfloat16), key(0)).isfinite().all()


def test_experts_are_drawn_by_their_probabilities():
    logits = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64).expand(100_000, 3)
    found = route(logits, noise=gumbel(logits, key(1)), capacity=None)
    torch.testing.assert_close(found.counts.double() / 100_000, logits[0].softmax(0), rtol=0.02, atol=0.002)


def test_jitter_multiplies_by_draws_around_one():
    x = torch.full((10_000,), 3.0)
    found = jitter(x, key(0), 0.1) / x
    assert (
        0.9 <= found.min() < 0.901 and 1.099 < found.max() <= 1.1 and found.mean().item() == pytest.approx(1, abs=2e-3)
    )
    assert jitter(x, key(0), 0.0) is x


@pytest.mark.parametrize("draw", [gumbel, jitter])
def test_draws_are_functions_of_the_key(draw):
    x = torch.ones(50)
    assert torch.equal(draw(x, key(0)), draw(x, key(0)))
    assert not torch.equal(draw(x, key(0)), draw(x, key(1)))


@pytest.mark.parametrize("draw", [gumbel, jitter])
def test_without_a_key_they_are_the_steps_own(draw):
    x = torch.ones(50)
    with zerofn.random.randomness(key(0)):
        a, b = draw(x), draw(x)
    with zerofn.random.randomness(key(0)):
        assert torch.equal(draw(x), a)
    assert not torch.equal(a, b)
    with zerofn.random.randomness(None), pytest.raises(RuntimeError, match="is random, but has no key"):
        draw(x)


def test_mistakes_are_sentences():
    with pytest.raises(ValueError, match=r"epsilon=1.5 must be at least 0"):
        jitter(torch.ones(2), key(0), 1.5)
    with pytest.raises(TypeError, match="moe: the key must be an int64 scalar"):
        gumbel(torch.ones(2), 3)

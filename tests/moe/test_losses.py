"""The losses of gates, in closed form."""

import pytest
import torch

from zerofn.moe import load_balance_loss, z_loss


def test_an_even_gate_has_balance_one_and_a_collapsed_one_e():
    even = torch.zeros(8, 4), torch.arange(8).view(1, 8) % 4
    assert load_balance_loss(*even).item() == pytest.approx(1)
    logits = torch.zeros(8, 4).index_fill(1, torch.tensor([2]), 100.0)
    assert load_balance_loss(logits, torch.full((1, 8), 2)).item() == pytest.approx(4)


def test_the_z_loss_is_that_of_its_formula():
    logits = torch.tensor([[0.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    expected = (
        torch.tensor(2.0).double().log() ** 2 + (torch.tensor(1.0).double().exp() + 20.085536923187668).log() ** 2
    )
    assert z_loss(logits).item() == pytest.approx(expected.item() / 2, rel=1e-12)
    assert z_loss(torch.full((2, 2), 1000.0)).isfinite()  # whose exponentials are not
    assert torch.autograd.gradcheck(z_loss, logits.requires_grad_())

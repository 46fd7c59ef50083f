"""What torch.compile was given is captured as it was written."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import state_of, step_with


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_functions_and_parts_of_modules_that_were_compiled():
    rows = torch.arange(8.0).view(2, 4)
    plain, module = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    module.load_state_dict(plain.state_dict())
    module[0] = torch.compile(module[0])  # a module around it: its parameters have another name
    module[1].compile()

    @torch.compile
    def loss_of_rows(params, batch):
        return functional_call(module, params, (batch,)).square().mean()

    _, loss = zerofn.compile(step_with(loss_of_rows))(state_of(module, 3), rows)
    assert torch.equal(loss, plain(rows).square().mean().detach())

"""What torch.compile was given is captured as it was written."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import state_of, step_with

pytestmark = pytest.mark.slow  # Dynamo's first capture


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


class Compiles(nn.Module):
    """Compiles parts of itself when it is called."""

    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = torch.compile(lambda z: z.sin() * 2)(x)
        y = torch.compile(self.inner, fullgraph=True)(y)
        self.other.compile()

        @torch.compile(dynamic=False)
        def last(z):
            return torch.cond(z.sum() > 1e6, lambda z: z.cos(), lambda z: z.tanh(), (self.other(z).detach(),)) + z

        return last(y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_step_compiles_itself():
    rows, module, plain = torch.arange(8.0).view(2, 4), Compiles(), Compiles()
    plain.load_state_dict(module.state_dict())

    def loss_of_rows(params, batch):
        return functional_call(module, params, (batch,)).square().mean()

    run = zerofn.compile(step_with(loss_of_rows))
    with torch.compiler.set_stance("force_eager"):
        expected = plain(rows).square().mean().detach()
    assert torch.equal(run(state_of(module, 3), rows)[1], expected)


FIRST = """
import sys, torch, zerofn
def step(state, x):
    return state, torch.compile(lambda y: y.sin() + 1)(x)
state, x = zerofn.shard({"params": {"w": torch.ones(2)}}), torch.arange(3.0)
assert "torch._dynamo" not in sys.modules
assert torch.equal(zerofn.compile(step)(state, x)[1], x.sin() + 1)
compiled = torch.compile(lambda y: y + 1, backend=lambda gm, inputs: lambda *xs: [x * 10 for x in xs])
print(compiled(torch.ones(2))[0].item())  # the backend's: afterwards torch.compile compiles
"""


@pytest.mark.whole
def test_the_first_that_is_compiled_in_a_process():
    out = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["10.0"]

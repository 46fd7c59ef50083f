"""Updates run early; those that wait for the finite check run in the order in which the next step uses the result."""

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import ROWS, WIDTH, fake_ranks, scheduled, unit_of
from zerofn import Offload, optim

NORMED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))


class Backwards(torch.nn.Module):
    """Layers that are used in another order than that of their names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.a(self.c(self.b(x).tanh()).tanh())


def updated(stage, tx, num_ranks, on_nonfinite="skip", **options):
    """Names of the units, in the order in which a step updates them."""
    module = Backwards()

    def train_step(state, batch):
        loss, grads = state.value_and_grad(lambda p, x: functional_call(module, p, (x,)).square().mean())(batch)
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite), loss

    with fake_ranks(num_ranks):
        plain = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=tx)
        state = zerofn.shard(plain, stage=stage, unit=unit_of, **options)
        names = [unit.name for unit in state.params.layout.units]
        program = scheduled(train_step, state, torch.randn(ROWS, WIDTH), donating=True)
    first = program.state.names.index("params['a']")
    order = []
    for node in program.gm.graph.nodes:
        if node.target is torch.ops.zerofn.adamw_.default:
            memory = node.args[0][0]
            while memory.op != "placeholder":
                memory = memory.all_input_nodes[0]
            order.append(names[program.placeholders.index(memory) - first])
    return order


@pytest.mark.parametrize("stage", range(4))
def test_updates_that_wait_for_the_finite_check_run_in_order_of_first_use(stage):
    assert updated(stage, NORMED, 2) == ["b", "c", "a"]


@pytest.mark.parametrize("tiers", [{"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}])
def test_updates_of_state_on_drives_run_in_order_of_first_use_too(tmp_path, tiers):
    assert updated(3, NORMED, 1, offload=Offload(**tiers, path=tmp_path)) == ["b", "c", "a"]


def test_what_waits_for_none_is_updated_as_gradients_come():
    assert updated(3, optim.adamw(1e-2), 1, on_nonfinite="ignore") == ["a", "c", "b"]

"""Which messages a scheduled step sends and receives."""

import torch

from tests.support.small_steps import (
    batch_of,
    build,
    fake_ranks,
    layers_on_stages,
    loss_of,
    scheduled,
    state_of,
    step_with,
)
from zerofn.comm.mesh import Mesh
from zerofn.graph.messages import message_ends


def test_two_stages_send_an_activation_and_a_gradient_of_each_microbatch():
    found = []
    for rank in range(2):
        with fake_ranks(2, rank):
            state = state_of(build(2), 1, mesh=Mesh.make(pipe=2), cuts=layers_on_stages(2, 2))
            program = scheduled(step_with(loss_of(build(2)), 4), state, batch_of())
            found.append([*message_ends(program.gm.graph)])
    for ends, others in (found, found[::-1]):
        sent = [(x.edge, x.value.shape, x.peer) for x in ends if x.sends]
        assert sent == [(x.edge, x.value.shape, 1 - x.peer) for x in others if not x.sends]
        assert len(sent) == 4 and {shape for _, shape, _ in sent} == {torch.Size([1, 16])}

"""A step with one microbatch on a mesh of stages: how long they are idle is said once."""

import logging

import pytest

import zerofn
from tests.support.pipe_steps import batches, loss_fn, params, stages_of
from tests.support.small_steps import fake_ranks
from zerofn import optim
from zerofn.capture.capture import capture
from zerofn.capture.idle_stages import warn_of_idle_stages
from zerofn.comm.mesh import Mesh


@pytest.mark.part(numbers=[(1,)], rank=[0])
@pytest.mark.part(numbers=[(2, 1)])
@pytest.mark.parametrize(
    ("numbers", "rank", "said"), [((1,), 0, True), ((1,), 1, False), ((2,), 0, False), ((2, 1), 0, False)]
)
def test_one_microbatch(caplog, numbers, rank, said):
    """`numbers`: the microbatches of each update; a single one behind others is what is left of the rows."""
    with fake_ranks(2, rank):
        mesh, given = Mesh.make(pipe=2), params()
        state = zerofn.TrainState.create(params=given, tx=optim.sgd(0.1))
        state = zerofn.shard(state, mesh=mesh, cuts=stages_of(given, mesh, "1f1b"))

        def train_step(state, batch):
            for number in numbers:
                loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), number)(batch)
                state = state.apply_gradients(grads)
            return state, loss

        with caplog.at_level(logging.WARNING, "zerofn"):
            warn_of_idle_stages(capture(train_step, state, batches(1)[0]), "train_step")
    told = [x.getMessage() for x in caplog.records]
    assert len(told) == said
    assert not said or "train_step: the 2 ranks along 'pipe' are idle for 50 % of the step" in told[0]

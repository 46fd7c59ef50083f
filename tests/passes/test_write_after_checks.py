import pytest
import torch

import zerofn
from tests.support.small_steps import batch_of, build, captured, fake_ranks, loss_of, scheduled, state_of, train_step_of
from zerofn.capture.capture import CaptureError
from zerofn.graph.alias import writes
from zerofn.passes.write_after_checks import write_after_checks

MODULE = build(3)
CHECK = torch.ops.zerofn.check_same.default


def step(state, batch):
    """An update that needs no finite check, and a check at the step's end."""
    loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
    new = state.apply_gradients(grads, on_nonfinite="ignore")
    zerofn.same(batch["n"])
    return new, loss


def batch():
    return {**batch_of(), "n": torch.tensor(1.0)}


@pytest.mark.parametrize("stage", range(4))
def test_nothing_is_written_before_a_check(stage):
    with fake_ranks(2):
        program = scheduled(step, state_of(MODULE, stage), batch(), donating=True)
    nodes = list(program.gm.graph.nodes)
    first = next(
        k for k, n in enumerate(nodes) if any(x in program.placeholders[: program.num_state] for x in writes(n))
    )
    assert [k < first for k, n in enumerate(nodes) if n.target is CHECK] == [True]


def test_a_step_without_checks_stays():
    with fake_ranks(2):
        program = captured(train_step_of(MODULE), state_of(MODULE, 3), batch_of())
        before = list(program.gm.graph.nodes)
        write_after_checks(program)
    assert list(program.gm.graph.nodes) == before


def test_a_check_of_the_new_state_is_refused():
    def late(state, batch):
        loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
        new = state.apply_gradients(grads)
        zerofn.same(zerofn.global_norm(new.params))
        return new, loss

    with fake_ranks(2), pytest.raises(CaptureError, match="zerofn.same checks a value that is computed from the new"):
        scheduled(late, state_of(MODULE, 3), batch(), donating=True)

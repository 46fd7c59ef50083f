"""CTC loss of lengths that only a running step knows, beside ATen's."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.captured_steps import assert_captured_is_eager, run
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import optim, shard
from zerofn.training.train_state import TrainState

aten, ops = torch.ops.aten, torch.ops.zerofn
TIME, ROWS, CLASSES = 6, 3, 5
TARGETS = {
    "rows": torch.tensor([[1, 2, 2, 0], [3, 0, 0, 0], [4, 1, 0, 0]]),
    "in one dim": torch.tensor([1, 2, 2, 3, 4, 1]),
}
LENGTHS = torch.tensor([6, 5, 6]), torch.tensor([3, 1, 2])


@pytest.mark.parametrize("targets", TARGETS)
def test_losses_and_derivatives_are_atens(targets):
    x = torch.randn(TIME, ROWS, CLASSES).log_softmax(-1)
    given = TARGETS[targets], *LENGTHS
    losses, table = aten._ctc_loss.Tensor(x, *given)
    ours, padded = ops.ctc_loss(x, *given)
    assert torch.equal(ours, losses)
    assert padded.shape[-1] == 2 * TARGETS[targets].shape[-1] + 1 > table.shape[-1]
    grad = torch.randn(ROWS)
    expected = aten._ctc_loss_backward.Tensor(grad, x, *given, losses, table, 0)
    assert torch.equal(ops.ctc_loss_backward(grad, x, *given, ours, padded, 0), expected)


def step_of(**options):
    def loss_fn(params, batch):
        x = (batch["x"] @ params["w"]).log_softmax(-1)
        return F.ctc_loss(x, batch["y"], batch["inputs"], batch["lengths"], **options)

    return step_with(loss_fn)


def make_state():
    params = {"w": torch.linspace(-1, 1, CLASSES * CLASSES).sin().view(CLASSES, CLASSES)}
    return shard(TrainState.create(params=params, tx=optim.adamw(1e-2)), stage=3)


def batch_of(targets="rows", inputs=LENGTHS[0], lengths=LENGTHS[1]):
    x = torch.randn(TIME, ROWS, CLASSES, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": TARGETS[targets], "inputs": inputs, "lengths": lengths}


@pytest.mark.part(targets=["rows"], options=[{}])
@pytest.mark.part(targets=["in one dim"], options=[{"reduction": "sum", "blank": 4, "zero_infinity": True}])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "blank": 4, "zero_infinity": True}], ids=str)
@pytest.mark.parametrize("targets", TARGETS)
def test_a_captured_loss_is_the_eager_one_with_other_lengths_in_every_batch(targets, options, caplog):
    others = torch.tensor([4, 6, 5]), torch.tensor([2, 2, 1 if targets == "rows" else 2])
    with caplog.at_level("INFO", "zerofn"):
        assert_captured_is_eager(step_of(**options), make_state, [batch_of(targets), batch_of(targets, *others)])
    assert sum("captured" in x.message for x in caplog.records) <= 1


def test_lengths_may_be_numbers():
    numbers = batch_of(inputs=(6, 5, 6), lengths=(3, 1, 2))
    assert_captured_is_eager(step_of(), make_state, [numbers])
    assert_same_trees(run(step_of(), make_state(), [numbers]), run(step_of(), make_state(), [batch_of()]))

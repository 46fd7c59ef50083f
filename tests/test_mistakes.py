"""What a person reads after a common mistake: where it is, and what to write instead."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

import zerofn
from small_steps import state_of


def said(error):
    """The message of an error with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def failure(call):
    """What a call raises, in words."""
    with pytest.raises(Exception) as caught:
        call()
    return said(caught.value)


# --- a captured step that fails while it runs --------------------------------------------------------------------


class Picker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, x, y):
        logits = self.inner(x)
        return torch.nn.functional.cross_entropy(logits.float(), y)  # the label's line


def picking(n=1):
    module = Picker()

    def loss_fn(params, batch):
        return functional_call(module, params, (batch["x"], batch["y"]))

    def train_step(state, batch):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, n) if n > 1 else vg)(batch)
        return state.apply_gradients(grads), loss

    return module, train_step


def labels(last=2):
    return {"x": torch.ones(4, 4), "y": torch.tensor([0, 1, 2, last])}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_failing_operation_names_its_line(n, stage):
    module, train_step = picking(n)
    step, state = zerofn.compile(train_step), state_of(module, stage)
    state, _ = step(state, labels())
    with pytest.raises(IndexError, match="Target 7 is out of bounds") as caught:
        step(state, labels(7))
    (text,) = caught.value.__notes__
    assert re.search(r"^in train_step: aten.nll_loss_forward at .*test_mistakes.py:\d+ \(.*# the label's line\)$", text)


def test_a_dtype_that_does_not_fit_says_which_entry_to_cast():
    module, train_step = picking()
    text = failure(lambda: zerofn.compile(train_step)(state_of(module, 3, precision="bf16"), labels()))
    assert re.search(r"in train_step: aten.addmm at .*test_mistakes.py:\d+ \(logits = self.inner\(x\)\)", text)
    assert "computed in bfloat16; cast floating inputs of the batch to it, here 'x' (float32)" in text


def one_rank_fails(stage):
    module, train_step = picking()
    step, state = zerofn.compile(train_step), state_of(module, stage)
    state, _ = step(state, labels())
    return failure(lambda: step(state, labels(7 if dist.get_rank() == 1 else 2)))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_other_ranks_read_the_line_too(ranks, stage):
    found = ranks(2, one_rank_fails, stage)
    ranks.stop()
    for text in found:
        assert "IndexError: Target 7" in text or "Target 7 is out" in text
        assert "# the label's line" in text


def calls_after_failure(stage):
    module, train_step = picking()
    step, state = zerofn.compile(train_step, donate=False), state_of(module, stage)
    first = failure(lambda: step(state, labels(7 if dist.get_rank() == 1 else 2)))
    calls = [lambda: step(state, labels()), lambda: zerofn.unshard(state), lambda: state_of(module, stage),
             lambda: zerofn.compile(train_step)(state, labels())]
    return [first, *map(failure, calls)]


@pytest.mark.parametrize("stage", [1, 3])
def test_after_a_failure_every_call_says_why_the_group_is_gone(ranks, stage):
    found = ranks(2, calls_after_failure, stage)
    ranks.stop()
    for first, *later in found:
        assert "Target 7" in first
        for text in later:
            assert text.startswith("the process group was taken down because rank 1: train_step failed: IndexError")
            assert text.endswith("Restart the processes and load the last checkpoint.")

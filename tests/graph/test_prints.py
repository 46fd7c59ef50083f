"""A print in a step is told when the step is captured, and our own messages are not."""

import logging

import torch

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, state_of

MODULE = build(2)


def test_a_print_is_told_with_its_line(caplog, capsys):
    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
        for _ in range(3):
            print("loss", loss)
        return state.apply_gradients(grads), loss

    run, state = zerofn.compile(step), state_of(MODULE, 3)
    with caplog.at_level(logging.WARNING, "zerofn"):
        for _ in range(2):
            state, _ = run(state, batch_of())
    (told,) = (x.message for x in caplog.records if "is printed while the step is captured" in x.message)
    assert told.startswith(f"{__file__}:") and "Return it in aux" in told
    assert capsys.readouterr().out.count("loss") == 3
    original = torch._tensor_str._str
    assert original.__module__ == "torch._tensor_str"


def test_nothing_is_told_of_a_step_that_prints_nothing(caplog):
    with caplog.at_level(logging.WARNING, "zerofn"):
        zerofn.compile(lambda state, batch: (state, f"{len(batch['x'])}" and batch["x"].sum()))(
            state_of(MODULE, 3), batch_of()
        )
    assert not caplog.records

"""Ranks that have the same batch are told, once a capture; ranks that have their own are not."""

import logging

import pytest
import torch.distributed as dist

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, state_of, train_step_of

MODULE = build(2)


def told(equal, evaluating):
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("zerofn").addHandler(handler)
    step, state = zerofn.compile(train_step_of(MODULE)), state_of(MODULE, 3)
    if evaluating:
        step = zerofn.compile(lambda state, batch: {"loss": loss_of(MODULE)(zerofn.gather(state.params), batch)})
    try:
        for seed in range(2):
            out = step(state, batch_of(0 if equal else dist.get_rank(), seed=seed))
            state = state if evaluating else out[0]
    finally:
        logging.getLogger("zerofn").removeHandler(handler)
    return [x for x in found if "have the same batch" in x]


@pytest.mark.part(equal=[True])
@pytest.mark.parametrize(("equal", "evaluating"), [(True, False), (False, False), (True, True)])
def test_equal_batches_are_told_by_the_first_rank(ranks, equal, evaluating):
    first, *others = ranks(3, told, equal, evaluating)
    assert others == [[], []]
    assert first == [
        "train_step: all 3 ranks have the same batch, so they all compute the same. Use different rows on each rank: "
        "zerofn.sampler(dataset, mesh)."
    ] * (equal and not evaluating)

"""Batches of another shape, on all ranks or on one."""

import dataclasses
import re
import time

import pytest
import torch

import zerofn
from tests.support.captured_steps import TX, masked_batch, masked_step, rank
from tests.support.small_steps import batch_of, build, captures_of, loss_of, state_of, train_step_of

MODULE = build(3)


def ragged_on_all():
    """The last batch has fewer rows on every rank, and not the same number."""
    module = build(3)
    rows = [4, 4, 2]
    step, state = zerofn.compile(masked_step(module, 1)), state_of(module, 3, TX)
    losses = []
    for k, n in enumerate(rows):
        state, aux = step(state, masked_batch(k, n))
        losses.append(aux["loss"].item())
    return losses


def test_a_ragged_last_batch_on_all_ranks(ranks):
    first, second = ranks(2, ragged_on_all)
    assert first == second
    module = build(3)
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for k, n in enumerate([4, 4, 2]):
        parts = [batch_of(r, rows=n, seed=k) for r in range(2)]
        masks = [(p["y"][:, 0] > -0.7).float() + 0.5 for p in parts]
        gaps = [(module(p["x"]) - p["y"]).square().mean(1) for p in parts]
        loss = sum((g * m).sum() for g, m in zip(gaps, masks, strict=True)) / sum(m.sum() for m in masks)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        optimizer.step()
        assert first[k] == pytest.approx(loss.item(), rel=1e-5)


# By rank. Each has sizes that the other one has not, and sizes at another step.
SIZES = [4, 5, 4, 3, 3, 6], [2, 4, 5, 3, 4, 7]
OPTIONS = {0: {}, 3: {}, "remat": {"remat": "full"}, "memory": {"memory": "1GiB"}}


def other_sizes(name):
    module = build(3)
    step, state = zerofn.compile(train_step_of(module), **OPTIONS[name]), state_of(module, name if name == 0 else 3, TX)
    for k, rows in enumerate(SIZES[rank()]):
        state, _ = step(state, batch_of(rank(), rows=rows, seed=k))
    assert len(captures_of(step)) == len(set(SIZES[rank()]))
    return zerofn.unshard(state.params)


@pytest.mark.part(name=[3])
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_with_other_sizes_train_as_ddp_does(ranks, name):
    """Each rank's loss is a mean over its rows, and the gradient the mean of these."""
    first, second = ranks(2, other_sizes, name)
    module = build(3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for k, rows in enumerate(zip(*SIZES, strict=True)):
        parts = [batch_of(r, rows=n, seed=k) for r, n in enumerate(rows)]
        optimizer.zero_grad()
        (sum((module(x["x"]) - x["y"]).square().mean() for x in parts) / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    for key, p in module.named_parameters():
        torch.testing.assert_close(first[key], p.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(first[key], second[key])


def by_rows(state, batch):
    """An update by the number of rows, which is not the same on all ranks."""
    new, aux = train_step_of(MODULE)(state, batch)
    return dataclasses.replace(new, extra={"seen": new.extra["seen"] + batch["x"].shape[0]}), aux


def of_others(state, batch):
    """A loss of all ranks' rows."""
    every = zerofn.collectives.all_gather(batch["x"])
    loss, grads = state.value_and_grad(lambda p, b: loss_of(MODULE)(p, b) * every.sum())(batch)
    return state.apply_gradients(grads), loss


def few_rows(state, batch):
    if batch["x"].shape[0] == 5:
        raise ValueError("5 rows are too many")
    return train_step_of(MODULE)(state, batch)


# step -> (what ranks say of it, where they have other sizes at first, and where one has new ones later)
TOLD = {
    by_rows: ("ranks differ.*state entry 'extra.seen'", "because .*state entry 'extra.seen'"),
    of_others: (r"ranks differ.*all_gather \[(80|64)\].*drop_last", r"because .*\[64\].*is .*\[80\].* now"),
    few_rows: ("5 rows are too many", "5 rows are too many"),
}


def uneven(step, at_first):
    extra = {"seen": torch.tensor(0)}
    run, state = zerofn.compile(step), state_of(MODULE, 3, extra=extra)
    if not at_first:
        state, _ = run(state, batch_of(rank()))
    run(state, batch_of(rank(), rows=5 - rank()))


@pytest.mark.part(at_first=[False], step=[few_rows, by_rows])
@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("step", TOLD)
def test_what_ranks_with_other_sizes_may_not_do_is_told_on_all(ranks, step, at_first):
    began = time.monotonic()
    for told in ranks(2, uneven, step, at_first, expect_errors=True, timeout=60):
        assert re.search(TOLD[step][not at_first], told.message, re.DOTALL), told.message
    assert time.monotonic() - began < 30

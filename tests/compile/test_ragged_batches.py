"""Batches of another shape, on all ranks or on one."""

import time

import pytest
import torch

import zerofn
from tests.support.captured_steps import TX, masked_batch, masked_step, rank
from tests.support.small_steps import batch_of, build, state_of, train_step_of


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


def ragged_on_one():
    module = build(3)
    step, state = zerofn.compile(train_step_of(module)), state_of(module, 3)
    state, _ = step(state, batch_of(rank()))
    step(state, batch_of(rank(), rows=4 if rank() == 0 else 3))


def test_a_ragged_last_batch_on_one_rank_is_an_error_on_all(ranks):
    began = time.monotonic()
    for told in ranks(2, ragged_on_one, expect_errors=True, timeout=60):
        assert told.type in ("RuntimeError", "RanksOutOfStep") and "ranks are out of step" in told.message
        assert "batch.x: [3, 16] float32" in told.message
    assert time.monotonic() - began < 10


def different_first_batches():
    module = build(3)
    zerofn.compile(train_step_of(module))(state_of(module, 3), batch_of(rank(), rows=4 - rank()))


def test_ranks_that_begin_with_different_batches(ranks):
    for told in ranks(2, different_first_batches, expect_errors=True):
        assert told.type == "RuntimeError"
        assert "ranks differ" in told.message and "[4, 16]" in told.message and "[3, 16]" in told.message
        assert "drop_last=True" in told.message

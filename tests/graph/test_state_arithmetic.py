import pytest
import torch

import zerofn
from tests.support.small_steps import batch_of, build, captured, fake_ranks, loss_of, state_of
from zerofn import optim, tree
from zerofn.graph.state_arithmetic import state_arithmetic

MODULE = build(2)
TABLE = torch.tensor([1.0, 2.0])


def lines(change, stage=3, n=1, extra=None, tx=None, rank=0, loss_scale=1.0):
    def step(state, batch):
        def loss_fn(params, batch):
            return loss_of(MODULE)(params, batch) * loss_scale

        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, n) if n > 1 else vg)(batch)
        new = state.apply_gradients(tree.tree_map(change, grads))
        return new if extra is None else new.replace(extra=extra(batch)), loss

    with fake_ranks(2, rank):
        state = state_of(MODULE, stage, tx, extra=torch.zeros(()))
        return state_arithmetic(captured(step, state, batch_of()))


def count(found, text):
    return sum(text in line for line in found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_number_between_the_transfers_and_the_state_is_told(stage, n):
    found = lines(lambda g: g * 0.625, stage, n)
    assert count(found, "aten.mul.Tensor(x, 0.625), 2 times") == 1
    assert all(line.startswith("meets the state, so it must be the same on all ranks: ") for line in found)


def test_numbers_of_the_loss_are_free():
    assert lines(lambda g: g, loss_scale=0.625) == lines(lambda g: g, loss_scale=0.5)


def test_a_constant_is_told_by_its_bits():
    first, second = (lines(lambda g, t=t: g * t.sum()) for t in (TABLE, torch.tensor([1.0, 2.5])))
    assert count(first, "a constant [2] float32 (checksum") == 1 and first != second
    assert count(lines(lambda g: g * torch.tensor(0.75)), "(0.75)") == 1


def test_what_is_averaged_is_left_out_and_what_is_not_is_told():
    assert count(lines(lambda g: g, extra=lambda b: b["x"].mean() * 0.625), "0.625") == 0
    assert count(lines(lambda g: g, extra=lambda b: torch.ones(()) * 0.625), "0.625") == 1


@pytest.mark.parametrize(
    "tx",
    [
        optim.adamw(1e-2, weight_decay=0.1, mask=lambda leaf: leaf.name.endswith("weight")),
        optim.muon(1e-2),
        optim.chain(optim.add_decayed_weights(0.1, lambda leaf: leaf.name.startswith("0")), optim.sgd(0.1)),
        optim.lamb(1e-2),
        optim.adafactor(1e-2),
    ],
    ids=lambda tx: tx.name or "own",
)
def test_ranks_with_other_leaves_have_the_same_lines(tx):
    assert lines(lambda g: g, tx=tx, rank=0) == lines(lambda g: g, tx=tx, rank=1)


def test_an_evaluation_has_none():
    with fake_ranks(2):
        program = captured(lambda s, b: loss_of(MODULE)(zerofn.gather(s.params), b), state_of(MODULE, 3), batch_of())
    assert state_arithmetic(program) == []

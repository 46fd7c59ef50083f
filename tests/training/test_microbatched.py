"""`microbatched`: predictions by parts of the rows, beside plain torch's of all rows."""

import pytest
import torch

import zerofn
from tests.support.pipe_steps import batches, embedded, logits, params, rows_of, stages_of, uncut
from zerofn.comm.mesh import Mesh
from zerofn.comm.transport import SentBytes
from zerofn.util.process import the


def predicted(params, batch):
    x = embedded(params, batch)
    return {"mean": x.mean(1), "out": [logits(params, x)]}


@pytest.mark.parametrize("n", [1, 3, 12])
def test_results_are_those_of_all_rows(n):
    batch, given = batches(1)[0], params()
    found = zerofn.microbatched(predicted, n)(given, batch)
    expected = predicted(given, batch)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    state = zerofn.shard({"params": given})
    step = zerofn.compile(lambda state, batch: zerofn.microbatched(predicted, n)(state["params"], batch))
    for x, y in zip(zerofn.tree.leaves(step(state, batch)), zerofn.tree.leaves(found), strict=True):
        assert torch.equal(x, y)


def test_a_part_sees_what_the_one_before_wrote():
    seen = torch.zeros((), dtype=torch.int64)

    def counted(params, x):
        seen.add_(1)
        return x * seen

    assert zerofn.microbatched(counted, 3)({}, torch.ones(6)).tolist() == [1, 1, 2, 2, 3, 3]


def test_parts_draw_different_numbers_which_a_captured_step_draws_too():
    drawn = zerofn.microbatched(lambda params, x: torch.rand_like(x) * params, 3)

    def step(state, batch):
        with zerofn.random.randomness(zerofn.random.key(5)):
            return drawn(state, batch)

    state, batch = torch.ones(()), torch.zeros(6)
    found = step(state, batch)
    assert len(set(found.tolist())) == 6 and torch.equal(zerofn.compile(step)(state, batch), found)


def test_what_it_refuses():
    whole = zerofn.microbatched(lambda params, x: params * x, 2)
    with pytest.raises(ValueError, match=r"microbatched: n must be a positive integer, got 0"):
        zerofn.microbatched(lambda params, x: params * x, 0)
    with pytest.raises(TypeError, match="fn must be a function of 2 arguments, got <built-in function len>"):
        zerofn.microbatched(len, 2)
    with pytest.raises(
        RuntimeError,
        match=r"microbatched: the parameters or the batch require gradients.*accumulate\(state.value_and_grad",
    ):
        whole(torch.ones(1, requires_grad=True), torch.ones(4))
    with pytest.raises(
        ValueError, match=r"microbatched: a batch leaf of shape \(3,\) cannot be cut along dim 0 into 2"
    ):
        whole(torch.ones(1), torch.ones(3))
    with pytest.raises(ValueError, match=r"a scalar, .*Return one value for each row"):
        zerofn.microbatched(lambda params, x: x.sum(), 2)(None, torch.ones(4))
    with pytest.raises(TypeError, match=r"fn returned a int, but only tensors can be concatenated"):
        zerofn.microbatched(lambda params, x: 3, 2)(None, torch.ones(4))


def through_a_pipeline(schedule, n, **sizes):
    mesh, given = Mesh.make(pipe=2, **sizes), params()
    state = zerofn.shard({"params": given}, mesh=mesh, cuts=stages_of(given, mesh, schedule))
    batch, whole = rows_of(batches(1)[0], mesh), zerofn.microbatched(predicted, n)
    sent, found = [], []
    for passes in (None, uncut):
        step = zerofn.compile(lambda state, batch: whole(state["params"], batch), passes=passes)
        before = sum(the(SentBytes).by_group.values())
        found.append(step(state, batch))
        sent.append(sum(the(SentBytes).by_group.values()) - before)
    return *found, whole(state["params"], batch), predicted(given, batch), sent


@pytest.mark.parametrize(
    ("schedule", "n", "sizes"),
    [
        ("zbv", 3, {}),
        pytest.param("1f1b", 6, {"data": 2}, marks=pytest.mark.whole),
        pytest.param("interleaved", 1, {}, marks=pytest.mark.whole),
    ],
)
def test_a_pipeline_predicts_the_same(ranks, schedule, n, sizes):
    for cut, uncut_, eager, expected, sent in ranks(2 * sizes.get("data", 1), sized, schedule, n, sizes):
        torch.testing.assert_close(cut, expected, rtol=1e-13, atol=1e-14)
        for x, y, z in zip(*map(zerofn.tree.leaves, (cut, uncut_, eager)), strict=True):
            assert torch.equal(x, y) and torch.equal(x, z)
        assert sent[0] != sent[1]


def sized(schedule, n, sizes):
    return through_a_pipeline(schedule, n, **sizes)

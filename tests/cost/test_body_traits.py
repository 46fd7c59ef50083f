import torch

import zerofn
from tests.graph.test_call import W, X, called, finished
from tests.support.bodies import body_of, call_in, inlined
from tests.support.small_steps import batch_of, build, captured, fake_ranks, state_of, train_step_of
from zerofn.cost.body_traits import body_traits
from zerofn.cost.op_cost import flops
from zerofn.graph.nested import calls

aten = torch.ops.aten


def work(total, x, w, unused):
    y = x @ w
    total.add_(y.sum(0))
    return [zerofn.collectives.all_gather((y @ w).view(-1))]


def test_of_a_body_they_are_its_operations_sums():
    with fake_ranks(2):
        gm = body_of(work, X[0].clone(), X, W, W)
    traits = body_traits(gm)
    assert (traits.reads, traits.writes) == ([0, 1, 2], [0])
    assert traits.flops == 2 * 2 * 8 * 64 * 64
    ((sent, times),) = traits.sends.items()
    assert (sent.how, sent.nbytes, times) == ("sent", 8 * 64 * 4, 1)
    # Before the transfer y and y @ w, then y @ w and what comes of both ranks.
    assert traits.peak == 3 * 8 * 64 * 4


def test_of_calls_they_are_those_without_a_call():
    def summed(x, w):
        return [x @ w, zerofn.collectives.psum(x.sum(), "data")]

    with fake_ranks(2):
        root, graph, (body,), x, w = called(body_of(summed, X, W))
        found = [call_in(graph, body, x, w)[0] for _ in range(3)]
        gm = finished(root, graph, found)
        assert body_traits(gm) == body_traits(inlined(gm))


def test_of_a_loop_they_are_those_of_all_rounds():
    found = {}
    for n in (2, 4):
        with fake_ranks(2):
            state = state_of(build(2), 3)
            program = captured(train_step_of(build(2), n), state, batch_of(rows=8))
            ((_, call),) = calls(program.gm)
            found[n] = body_traits(program.gm, program.mesh), body_traits(call.body, program.mesh)
            assert found[n][0].flops == n * sum(map(flops, call.body.graph.nodes)) > 0
            assert {x: n * times for x, times in found[n][1].sends.items()}.items() <= found[n][0].sends.items()
            assert all(x.axis == "data" for x in found[n][0].sends)
    assert found[2][0].flops == found[4][0].flops  # of half the rows, twice as often

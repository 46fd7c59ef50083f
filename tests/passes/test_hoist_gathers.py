"""A unit that the decisions name is gathered once, before the microbatches, and nothing else changes."""

from collections import Counter

import pytest

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    assert_results_stay,
    batch_of,
    build,
    captured,
    fake_ranks,
    gathers,
    scatters,
    state_of,
    train_step_of,
    trained,
)
from tests.support.some import some_of
from zerofn import Offload, optim
from zerofn.comm.transport import SentBytes
from zerofn.cost.op_cost import READ, SENT, moved, traffic
from zerofn.graph.nested import calls, graphs_of
from zerofn.passes import standard
from zerofn.passes._context import context_of
from zerofn.passes.budget.decision import Choice
from zerofn.passes.budget.search import graphs
from zerofn.passes.hoist_gathers import hoist_gathers, hoistable
from zerofn.util.process import the


def choose_first(num):
    """A pass that decides on the first gathers of every body."""

    def decide(program):
        found = {call.body: list(hoistable(call))[:num] for gm in graphs_of(program.gm) for _, call in calls(gm)}
        choices = [Choice(hoisted=frozenset(x.name for x in found.get(gm, ()))) for gm in graphs(program.gm)]
        program.context = context_of(program).decided(graphs(program.gm), choices)

    return decide


def hoisting(num):
    """All passes, with so many gathers moved."""
    found = standard(donating=True)
    at = [x.fn for x in found].index(hoist_gathers)
    return [*found[:at], choose_first(num), *found[at:]]


def times(program, how, word=""):
    """unit -> how often it is moved so."""
    found = Counter()
    for x, n in traffic(program.gm).items():
        if x.how == how and x.unit and word in x.what:
            found[x.unit] += n
    return found


def reads(gm):
    """How often each node of a graph and its bodies runs that reads from a drive."""
    once = [1 for x in gm.graph.nodes if (found := moved(x)) is not None and found.how == READ]
    return once + [n * call.rounds for _, call in calls(gm) for n in reads(call.body)]


@pytest.mark.parametrize("offload", [False, True])
def test_units_are_gathered_as_often_as_said(tmp_path, offload):
    with fake_ranks(2):
        where = Offload(params="nvme", path=tmp_path) if offload else None
        state = state_of(build(4), 3, offload=where)
        program = captured(train_step_of(build(4), 3), state, batch_of(rows=6), *hoisting(2))
        _, body = graphs_of(program.gm)
    assert sorted(times(program, SENT, "gather").values()) == [1, 1, 3, 3]
    assert sorted(times(program, SENT, "scatter").values()) == [3] * 4
    assert len(gathers(body)) == 2 and len(scatters(body)) == 4
    if offload:  # each is read for its update, too
        assert Counter(reads(program.gm)) == {3: 2, 1: 2 + 4 + 2}  # and gradients


def test_without_a_decision_nothing_moves():
    with fake_ranks(2):
        program = captured(train_step_of(build(4), 3), state_of(build(4), 3), batch_of(rows=6), hoist_gathers)
    assert gathers(program.gm) == [] and len(gathers(graphs_of(program.gm)[1])) == 4


def results_stay():
    assert_results_stay(hoist_gathers, num_microbatches=2)
    assert_results_stay(choose_first(3), hoist_gathers, num_microbatches=2)


def counted(memory):
    """(bytes that a step is planned to send, and sends)."""
    step = zerofn.compile(train_step_of(build(4), 3), memory=memory)
    batch = batch_of(zerofn.rank(), rows=6)
    state, _ = step(state_of(build(4), 3), batch)
    plan, before = step.lower(state, batch), the(SentBytes).by_group.total()
    step(state, batch)
    return plan.sent, the(SentBytes).by_group.total() - before


def with_ample_memory(path):
    drives = {"offload": Offload(params="nvme", path=path)}
    for options in some_of(({}, {"precision": "bf16"}, drives), {"precision": "bf16"}):
        (tight, expected), (roomy, found) = (
            trained(4, 6, optim.adamw(1e-2), 2, num_microbatches=3, memory=memory, **options)
            for memory in (None, "1GB")
        )
        assert roomy.sent < tight.sent
        assert_same_trees(found, expected)
    return counted("1GB")


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [2, 3])
def test_with_ample_memory_bits_are_those_without_it_and_fewer_bytes_are_sent(ranks, tmp_path, size):
    ranks(size, results_stay)
    for planned, sent in ranks(size, with_ample_memory, tmp_path):
        assert planned == sent

"""Sends and receives of schedules, run by NCCL's rules."""

import pytest

from tests.support.rendezvous import received_where_used, stuck
from zerofn.schedules import NAMES, Compute, Costs, Edge, Receive, Schedule, Send, Sent, make, messages

RANKS, MICROBATCHES = (2, 3, 4, 8), (1, 2, 4, 5, 8, 16)


def edges_of(stages, skip):
    """One value down and one gradient up at each boundary. `skip`: stage 0 sends one to all stages, and has a gradient
    back from each, as with an encoder's output or the logits of routers."""
    out = [x for s in range(stages - 1) for x in (Edge(s, s + 1, "F"), Edge(s + 1, s, "I"))]
    if skip:
        out += [x for s in range(2, stages) for x in (Edge(0, s, "F", "first"), Edge(s, 0, "I", "first"))]
    return out


def programs_of(name, p, m, skip, chunks=None):
    schedule = make(name, p, m, chunks)
    costs = Costs.even(schedule.num_stages, 1.0, 1.4, 0.8, 0.05)
    return messages(schedule, edges_of(schedule.num_stages, skip), costs)


def cases(ranks, microbatches):
    for name, row in NAMES.items():
        for p in ranks:
            for m in microbatches:
                for skip in (False, True):
                    yield from ((name, p, m, skip, v) for v in ((2, 3) if row.any_chunks else [row.chunks]))


def none_gets_stuck(ranks, microbatches):
    for case in cases(ranks, microbatches):
        assert stuck(programs_of(*case)) == [], case


def test_no_schedule_gets_stuck():
    none_gets_stuck((2, 3, 4), (1, 2, 5, 8))


@pytest.mark.whole
def test_no_schedule_gets_stuck_for_many_more_numbers():
    none_gets_stuck(RANKS, MICROBATCHES)


def test_received_where_they_are_used_some_get_stuck():
    """What the test above would find: a V sends activations and gradients of different chunks down one channel."""
    found = {case[0] for case in cases((2, 4), (4, 8)) if stuck(received_where_used(programs_of(*case)))}
    assert "zbv" in found and "interleaved" in found
    assert not found & {"gpipe"}


def test_one_stream_for_both_directions_gets_stuck():
    """So each direction needs a stream of its own, whatever the order."""
    programs = programs_of("1f1b", 2, 4, skip=False)
    assert stuck(programs, stream=lambda message: frozenset(message.channel))


@pytest.mark.parametrize("case", [("zbv", 4, 8, True), ("interleaved-zb", 3, 5, True), ("1f1b", 4, 5, False)])
def test_every_value_is_sent_and_received_once_and_in_one_order(case):
    programs = programs_of(*case)
    schedule = make(*case[:3])
    ends = {}
    for rank, steps in enumerate(programs):
        for kind in (Send, Receive):
            for step in steps:
                if isinstance(step, kind):
                    ends.setdefault((step.message.channel, kind), []).append(step.message)
                    assert rank == step.message.channel[kind is Receive]
    channels = {channel for channel, _ in ends}
    for channel in channels:
        assert ends[channel, Send] == ends[channel, Receive]
        assert [x.number for x in ends[channel, Send]] == list(range(len(ends[channel, Send])))
    rank_of = schedule.placement.rank_of
    wanted = {
        (edge, k)
        for edge in edges_of(schedule.num_stages, case[3])
        for k in range(schedule.microbatches)
        if rank_of(edge.source) != rank_of(edge.target)
    }
    sent = [(x.edge, x.microbatch) for channel in channels for x in ends[channel, Send]]
    assert set(sent) == wanted and len(sent) == len(wanted)


@pytest.mark.parametrize("case", [("zbv", 4, 8, True), ("gpipe", 2, 3, False)])
def test_a_computation_reads_what_its_edges_bring_and_sends_what_they_take(case):
    schedule = make(*case[:3])
    for rank, steps in enumerate(programs_of(*case)):
        received, made, order = set(), None, []
        for step in steps:
            if isinstance(step, Receive):
                received.add(step.message)
            elif isinstance(step, Send):
                edge = step.message.edge
                assert (edge.source, edge.kind, step.message.microbatch) == made.makes
            elif isinstance(step, Compute):
                made = step.action
                order.append(made)
                assert received.issuperset(step.reads)
                assert {(x.edge.target, x.edge.kind, x.microbatch) for x in step.reads} <= {made.makes}
        assert tuple(order) == schedule.orders[rank]
        assert {x for step in steps if isinstance(step, Compute) for x in step.reads} == received


def test_a_receive_stands_before_what_its_rank_computes_when_the_send_begins():
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")
    rank_0, rank_1 = messages(schedule, edges_of(2, False), Costs.even(2, send=0.5))
    # at 1.5 s rank 1 begins with 1F0; at 2 s 0F1 is sent
    assert shown(rank_1) == "Receive Receive 1F0 1F1 1B0 Send 1B1 Send Sent Sent"
    # the gradients are sent at 5.5 s and 7.5 s; what is sent at 1 s has come at 1.5 s, before 0B0 at 6 s
    assert shown(rank_0) == "0F0 Send Receive 0F1 Send Receive 0B0 Sent Sent 0B1"


def shown(steps):
    return " ".join(str(step.action) if isinstance(step, Compute) else type(step).__name__ for step in steps)


def test_what_was_sent_is_waited_for_once():
    for case in (("zbv", 4, 8, True), ("1f1b", 2, 3, False), ("gpipe", 3, 1, True)):
        for steps in programs_of(*case):
            sent = [step.message for step in steps if isinstance(step, Send)]
            ended = [step.message for step in steps if isinstance(step, Sent)]
            assert sorted(sent) == sorted(ended)
            where = {(type(step), step.message): k for k, step in enumerate(steps) if not isinstance(step, Compute)}
            assert all(where[Send, x] < where[Sent, x] for x in sent)


def test_waiting_at_once_for_what_is_sent_gets_stuck():
    def at_once(steps):
        rest = [step for step in steps if not isinstance(step, Sent)]
        return [y for x in rest for y in ([x, Sent(x.message)] if isinstance(x, Send) else [x])]

    found = {x for x in NAMES if stuck(received_where_used([at_once(y) for y in programs_of(x, 4, 8, False)]))}
    assert "1f1b" in found and "gpipe" not in found


def test_costs_change_no_order():
    received = []
    for costs in (None, Costs.even(8, 5.0, 0.1, 0.0), Costs.even(8, 0.0, 0.0, 0.0), Costs.even(8, 1.0, 1.0, 9.0, 3.0)):
        programs = messages(make("zbv", 4, 8), edges_of(8, True), costs)
        assert stuck(programs) == []
        received.append([s.message for s in programs[1] if isinstance(s, Receive) and s.message.source == 2])
    assert all(x == received[0] for x in received)


@pytest.mark.parametrize("edge, said", [
    (Edge(0, 4, "F"), "a line of 4 ranks has stages 0 to 3"),
    (Edge(1, 0, "F"), "values of kind F are sent to later stages, and values of kind I to earlier"),
    (Edge(1, 1, "I"), "values of kind F are sent to later stages"),
])  # fmt: skip
def test_edges_that_lead_nowhere_are_refused(edge, said):
    with pytest.raises(ValueError, match=said):
        messages(make("1f1b", 4, 4), [edge])

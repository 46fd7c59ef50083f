"""Simulated times and memory, against closed forms."""

import dataclasses

import pytest

from zerofn.schedules import NAMES, Costs, Placement, Schedule, make, simulate

P_M = [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16)]


def run(name, p, m, f=1.0, i=1.0, w=1.0, send=0.0, chunks=None):
    """A simulated run in which a rank's F, I and W take so long, and a microbatch leaves one byte on it."""
    schedule = make(name, p, m, chunks)
    v = schedule.chunks
    costs = Costs.even(v * p, f / v, i / v, w / v, send)
    return simulate(schedule, dataclasses.replace(costs, saved=(1 / v,) * v * p, kept=(1 / v,) * v * p))


@pytest.mark.parametrize("f, i, w", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.8)])
@pytest.mark.parametrize("p, m", P_M)
def test_idle_times_are_those_of_the_papers(p, m, f, i, w):
    work = m * (f + i + w)
    for name, chunks, idle in [
        ("gpipe", 1, (p - 1) * (f + i + w)),
        ("1f1b", 1, (p - 1) * (f + i + w)),
        ("zb-h1", 1, (p - 1) * (f + i - w)),
        ("interleaved", 2, (p - 1) * (f + i + w) / 2),
        ("interleaved", 4, (p - 1) * (f + i + w) / 4),
        ("interleaved-zb", 2, (p - 1) * (f + i - w) / 2),
        ("interleaved-zb", 4, (p - 1) * (f + i - w) / 4),
    ]:
        assert run(name, p, m, f, i, w, chunks=chunks).makespan == pytest.approx(work + idle), (name, chunks)


@pytest.mark.parametrize("p, m", P_M)
def test_a_v_idles_for_a_third_of_a_chunk_a_rank(p, m):
    if m >= 2 * p - 1:
        assert run("zbv", p, m).makespan == pytest.approx(3 * m * (1 + (p - 1) / (3 * 2 * m)))


@pytest.mark.parametrize("p, m", P_M)
def test_memory_is_that_of_the_papers(p, m):
    for name, chunks, wanted in [
        ("gpipe", 1, [m] * p),
        ("1f1b", 1, [p - r for r in range(p)]),
        ("zb-h1", 1, [p] * p),
        ("interleaved", 2, [p + (p - 1 - 2 * r) / 2 for r in range(p)]),
        ("interleaved", 4, [p + (p - 1 - 2 * r) / 4 for r in range(p)]),
        ("interleaved-zb", 2, [p] * p),
        ("zbv", 2, [p] * p),
    ]:
        if m >= 2 * p:
            line = run(name, p, m, chunks=chunks)
            assert list(line.in_flight) == pytest.approx(wanted), (name, chunks)
            assert list(line.peak_bytes) == pytest.approx(wanted), (name, chunks)


def test_no_rank_idles_alone():
    line = run("1f1b", 1, 5)
    assert line.makespan == 15.0 and line.idle == (0.0,) and line.in_flight == (1.0,)


def test_the_idle_part_is_what_a_rank_does_not_compute():
    line = run("1f1b", 4, 8)
    assert line.idle == pytest.approx((1 - 24 / 33,) * 4)


def test_a_transfer_is_paid_on_the_way_down_and_up_and_not_within_a_rank():
    placement = Placement("v", 2, 2)  # stages 1 and 2 are on rank 1
    schedule = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert schedule.placement == placement
    sends = dataclasses.replace(Costs.even(4), down=(10.0, 100.0, 20.0), up=(1000.0, 100.0, 2000.0))
    assert simulate(schedule, sends).makespan == 4 + 8 + 10 + 20 + 1000 + 2000


def test_stages_may_differ():
    costs = Costs((1.0, 2.0), (0.0, 3.0), (5.0, 4.0), (0.5,), (0.25,), (8.0, 2.0), (8.0, 6.0), (100.0, 200.0))
    line = simulate(Schedule.from_csv("0F0,0B0\n1F0,1I0,1W0"), costs)
    assert [(str(x.action), x.start, x.stop) for spans in line.spans for x in spans] == [
        ("0F0", 0.0, 1.0), ("0B0", 6.75, 11.75), ("1F0", 1.5, 3.5), ("1I0", 3.5, 6.5), ("1W0", 6.5, 10.5),
    ]  # fmt: skip
    assert line.peak_bytes == (108.0, 206.0)  # I adds what W needs


def test_a_gradient_leaves_before_the_weights_are_done():
    whole = simulate(Schedule.from_csv("0F0,0B0\n1F0,1B0"), Costs.even(2))
    split = simulate(Schedule.from_csv("0F0,0B0\n1F0,1I0,1W0"), Costs.even(2))
    assert (whole.makespan, split.makespan) == (6.0, 5.0)


def test_costs_have_a_number_for_each_stage():
    with pytest.raises(ValueError, match="costs of 3 stages need 2 numbers in 'up', got 3"):
        dataclasses.replace(Costs.even(3), up=(1.0,) * 3)
    with pytest.raises(ValueError, match="a line of 4 ranks has 4 stages, but the costs are for 3"):
        simulate(make("1f1b", 4, 4), Costs.even(3))


def test_a_schedule_that_gets_stuck_is_refused():
    with pytest.raises(ValueError, match="schedule 'csv': ranks would wait for each other"):
        simulate(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), Costs.even(2))


def test_the_picture_shows_each_action_where_it_runs():
    text = run("zbv", 2, 3).text(38)
    assert text.splitlines() == [
        "rank 0 |F0F1F2f0i0w0f1i1w1B0--f2i2w2B1--B2--..|",
        "rank 1 |..F0f0F1f1i0w0F2I0W0f2i1w1I1i2I2W1w2W2|",
    ]


def test_every_picture_has_lines_of_one_length():
    for name in NAMES:
        assert {len(x) for x in run(name, 3, 12, 1, 1.4, 0.8, 0.05).text(77).splitlines()} == {77 + 9}

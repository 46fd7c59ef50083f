"""What benchmarks/wire computes from what it has measured."""

import pytest

from benchmarks.wire import network, quality


def rounds(ms, sent=100.0, counted=100.0):
    return [{"ms": x, "sent": sent, "counted": counted} for x in ms]


def cells(**int8):
    links = {"100 Mbit/s": rounds([40.0, 41.0], **int8), "10 Gbit/s": rounds([10.0, 10.0])}
    plain = {"100 Mbit/s": rounds([100.0, 100.0]), "10 Gbit/s": rounds([10.0, 10.0])}
    return {"2": {"planned": {"ZeroFn 3, int8": 100}, "rows": {"DDP": plain, "ZeroFn 3, int8": links}}}


def held(found):
    return {x.what: x.kept for x in network.checks(found) if x.measured is not None}


def test_times_are_those_of_one_round_and_bytes_are_exact():
    found = held(cells())
    assert found["2 ranks, 100 Mbit/s: ZeroFn 3, int8 / DDP, ms/step"] and all(found.values())
    assert sum("bytes planned" in what for what in found) == 2


@pytest.mark.parametrize("wrong", [{"counted": 101.0}, {"sent": 103.0}, {"sent": 97.0}])
def test_a_byte_too_many_and_an_interface_that_counts_others_are_missed(wrong):
    assert sum(not kept for kept in held(cells(**wrong)).values()) == 1


def test_the_time_to_a_loss_lies_between_two_validations():
    curve = [(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)]
    assert quality.minutes_to(curve, 3.5) == 2.5 and quality.minutes_to(curve, 3.0) == 3.0


def test_steps_that_powersgd_leaves_alone_take_as_long_as_ddp():
    row = quality.POWER_SGD
    times = {"DDP": [600.0], row: [60.0]}
    run = {"steps": 100, "ms at 100 Mbit/s": times, "trained": {row: [{"validation": [[5, 4.0], [20, 3.0]]}]}}
    assert quality.over_time(run, row) == [(5 * 0.01, 4.0), pytest.approx((10 * 0.01 + 10 * 0.001, 3.0))]

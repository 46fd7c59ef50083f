"""DeepSpeed's schedules beside its formulas, step by step, as its scheduler is driven: once after each update."""

import math

import pytest

from zerofn.interop.deepspeed_file import Section
from zerofn.interop.deepspeed_schedules import schedule_of


def of(kind, lr=0.5, **params):
    return schedule_of(Section({"type": kind, "params": params}, "scheduler"), lr)


def cosine(i, total, low, steps, end, kind):
    if i < 0:
        return 0.0
    width = max(2, steps)
    if i < width:
        return low + (1 - low) * (math.log(i + 1) / math.log(width) if kind == "log" else i / width)
    progress = min(1.0, (i - width + 1) / max(1, total - width))
    return max(0.0, end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("total, steps", [(20, 5), (20, 1), (4, 8)])
def test_warmup_cosine(kind, total, steps):
    names = {"warmup_min_ratio": 0.1, "warmup_num_steps": steps, "cos_min_ratio": 0.01, "warmup_type": kind}
    found = of("WarmupCosineLR", total_num_steps=total, **names)
    for count in range(30):
        assert found(count) == pytest.approx(0.5 * cosine(count - 1, total, 0.1, steps, 0.01, kind), abs=1e-12), count


def one_cycle(i, low, high, first, second, stairs, rate, size):
    total = first + second
    if i >= total:
        return low / (1 + rate * (i - total + 1) / size) if rate and size else low
    at = (i + 1) % total
    if at <= first:
        height, n = at / first, stairs[0]
    else:
        height, n = (total - at) / second, stairs[1]
    return low + (high - low) * (math.floor(height * n) / n if n else height)


@pytest.mark.parametrize("stairs", [(0, 0), (2, 4)])
@pytest.mark.parametrize("decay", [{}, {"decay_lr_rate": 0.3, "decay_step_size": 4}])
def test_one_cycle(stairs, decay):
    found = of(
        "OneCycle",
        cycle_min_lr=0.1,
        cycle_max_lr=1.0,
        cycle_first_step_size=8,
        cycle_second_step_size=16,
        cycle_first_stair_count=stairs[0],
        cycle_second_stair_count=stairs[1],
        cycle_momentum=False,
        **decay,
    )
    rate, size = decay.get("decay_lr_rate", 0), decay.get("decay_step_size", 0)
    for count in range(40):
        expected = one_cycle(count - 1, 0.1, 1.0, 8, 16, stairs, rate, size)
        assert found(count) == pytest.approx(expected, abs=1e-12), count


@pytest.mark.parametrize("stairs", [False, True])
def test_range_test(stairs):
    names = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0}
    found = of("LRRangeTest", lr_range_test_staircase=stairs, **names)
    for count in range(20):
        interval = count // 5 if stairs else count / 5
        assert found(count) == pytest.approx(0.01 * (1 + 2 * interval))


def test_without_a_schedule_the_rate_is_the_optimizers():
    assert schedule_of(Section({}, "scheduler"), 0.5) == 0.5
    assert of("WarmupLR", warmup_num_steps=10)(100) == 0.5


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Warmup", {}, "scheduler.type: expected one of WarmupLR, .*got 'Warmup'"),
        (
            "WarmupLR",
            {"warmup_steps": 3},
            "'?scheduler.params.warmup_steps is not known; did you mean 'warmup_num_steps'",
        ),
        ("WarmupLR", {"warmup_num_steps": 0}, "expected a whole number of 1 or more, got 0"),
        ("WarmupLR", {"warmup_type": "cosine"}, "expected one of log, linear, got 'cosine'"),
        ("WarmupLR", {"last_batch_iteration": 7}, "counts the updates of the state. Load a checkpoint"),
        ("WarmupDecayLR", {}, "total_num_steps is missing"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}, 'says "cycle_momentum": false'),
        ("OneCycle", {"cycle_momentum": False, "cycle_max_lr": 1.0}, "cycle_min_lr is missing"),
    ],
)
def test_what_cannot_be_is_a_sentence(kind, params, message):
    with pytest.raises(ValueError, match=message):
        of(kind, **params)

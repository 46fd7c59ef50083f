"""The demo GPT's validation loss over minutes at 100 Mbit/s, made of a run's losses and step times (`quality.py`)."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

PLAIN = "DDP"  # what all ratios are to
SIGNS = "ZeroFn 0, 1-bit Adam"
SIGNS_AFTER_INT8 = "ZeroFn 1, int8, 1-bit Adam"
RANK_OF_MATRICES = 4  # PowerSGD's authors take 1 to 4 for language models
POWER_SGD = f"DDP, PowerSGD {RANK_OF_MATRICES}"
BESIDE = [PLAIN, POWER_SGD]
UNCODED, INT8, ONE_INT8 = "ZeroFn 3", "ZeroFn 3, int8", "ZeroFn 1, int8"
APART = "ZeroFn, DiLoCo 10"
# How much worse the final validation loss may be than without them: nats per token
WORSE = {"ZeroFn 3, fp8": 0.02, INT8: 0.02, "ZeroFn 3, int4 / int8": 0.02}
WORSE |= dict.fromkeys((SIGNS, SIGNS_AFTER_INT8, APART), 0.05)
TRAINED = [POWER_SGD, UNCODED, *WORSE]
ROWS = [*BESIDE, UNCODED, *WORSE]
BEFORE = {SIGNS_AFTER_INT8: ONE_INT8}  # whose steps a row's are before `first_compressed`; else DDP's
TIMED = [*ROWS, *BEFORE.values()]
LIKE = {PLAIN: UNCODED}  # what is not trained here, and what has its losses: network.py compares both with one process
Curve = list[tuple[float, float]]


def first_compressed(row: str, num_steps: int) -> int:
    """The step from which on a row sends less: PowerSGD's documentation advises to leave 10 % as they are. 1-bit Adam's
    paper takes 15 to 25 %, of which the warm-up of the learning rate is a part, and DiLoCo's 24,000 of 88,000 steps.
    """
    if row == POWER_SGD:
        return max(2, num_steps // 10)
    return max(2, num_steps // 4) if row in (SIGNS, SIGNS_AFTER_INT8, APART) else 0


def losses(run: dict[str, Any], row: str) -> list[tuple[int, float]]:
    """(step, validation loss), the mean over seeds."""
    columns = zip(*(x["validation"] for x in run["trained"][LIKE.get(row, row)]), strict=True)
    return [(column[0][0], statistics.fmean(loss for _, loss in column)) for column in columns]


def over_time(run: dict[str, Any], row: str) -> Curve:
    """(minutes at 100 Mbit/s, validation loss)."""
    ms = {name: statistics.median(found) for name, found in run["ms at 100 Mbit/s"].items()}
    whole, before = first_compressed(row, run["steps"]), BEFORE.get(row, PLAIN)
    return [
        ((min(step, whole) * ms[before] + max(0, step - whole) * ms[row]) / 60_000, loss)
        for step, loss in losses(run, row)
    ]


def minutes_to(curve: Curve, loss: float) -> float:
    """When a curve has come down to a loss, on the straight lines between its points."""
    for (before, above), (after, below) in itertools.pairwise(curve):
        if below <= loss <= above:
            return before + (after - before) * (above - loss) / (above - below)
    return curve[0][0]


def reached_by_all(run: dict[str, Any]) -> float:
    """The lowest loss that every row reaches."""
    return max(min(loss for _, loss in losses(run, row)) for row in ROWS)

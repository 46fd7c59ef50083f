"""Medians of per-round ratios and how far they can be trusted."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence

NUM_RESAMPLES = 4000


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of per-round ratios, with the bootstrap's 95 % interval of that median."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """`over[i] / under[i]` of each round i, summed up. Both were measured in the same round."""
    rounds = [a / b for a, b in zip(over, under, strict=True)]
    return interval(rounds)


def interval(values: Sequence[float]) -> Ratio:
    """Percentile bootstrap of the median (Efron and Tibshirani 1993, section 13.3)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    low, high = medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]
    return Ratio(statistics.median(values), low, high)

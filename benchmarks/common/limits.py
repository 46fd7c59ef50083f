"""What must hold of a finished run, each as one line: what, measured, limit, kept or missed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common.check import Check
from benchmarks.common.statistic import interval, ratio
from benchmarks.common.zerofn_rows import ACCUMULATING, NUM_MICROBATCHES

BYTES = 4  # everything is fp32
STATE_SLACK = 1.01  # padding
# TCP headers (0.1 %) and segments sent again when a busy receiver reads late (up to 2 % was seen);
# the counts that the formulas tell apart lie a third and more from each other.
WIRE_SLACK = 1.03

# (row, relative to, at most), milliseconds a step
TIME = [
    ("ZeroFn 3", "FSDP2", 0.80),
    ("ZeroFn 3", "DeepSpeed 3", 0.70),
    ("ZeroFn 1", "DDP", 1.00),
    ("ZeroFn 2", "DDP", 1.00),
    ("ZeroFn 1", "DeepSpeed 2", 0.75),
    ("ZeroFn 2", "DeepSpeed 2", 0.75),
]
# (row, peers of its stage): peak memory beyond the imports must be below theirs
MEMORY = [
    ("ZeroFn 1", ("ZeroRedundancyOptimizer", "DeepSpeed 1")),
    ("ZeroFn 2", ("FairScale", "DeepSpeed 2")),
    ("ZeroFn 3", ("FSDP2", "DeepSpeed 3")),
]
ONE_RANK = {"small": 1.02, "tiny": 0.95}


def state_bytes_per_parameter(stage: int, world: int) -> float:
    """fp32 AdamW: parameter and two moments, 12 bytes; sharded from stage 1, parameter from 3."""
    parameter = BYTES / world if stage == 3 else BYTES
    moments = 2 * BYTES / world if stage else 2 * BYTES
    return parameter + moments


def wire_elements_per_parameter(stage: int, world: int, num_microbatches: int = 1) -> float:
    """Sent by a rank a step, in passes over the parameters: gathers and reductions, by stage."""
    n = num_microbatches
    passes = {0: 2, 1: 2, 2: 1 + n, 3: 3 * n}[stage]
    return passes * (world - 1) / world


def checks(run: dict[str, Any]) -> list[Check]:
    return [*_times(run), *_one_rank(run), *_peaks(run), *_exact(run)]


def _ratio_check(run: dict, what: str, field: str, row: str, peer: str, limit: float, **kw) -> Check:
    rows = run["rows"]
    if row not in rows or peer not in rows:
        return Check(what, "not measured", None, limit, **kw)
    value = ratio(rows[row][field], rows[peer][field])
    return Check(what, str(value), value.median, limit, **kw)


def _times(run: dict) -> Iterator[Check]:
    for row, peer, limit in TIME:
        yield _ratio_check(run, f"{row} / {peer}, ms/step", "ms", row, peer, limit)


def _peaks(run: dict) -> Iterator[Check]:
    for row, peers in MEMORY:
        for peer in peers:
            what = f"{row} / {peer}, peak RSS beyond imports"
            yield _ratio_check(run, what, "beyond", row, peer, 1.0, strict=True)


def _one_rank(run: dict) -> Iterator[Check]:
    for workload, limit in ONE_RANK.items():
        loops = run["one_rank"].get(workload, {})
        for stage in range(4):
            what = f"one rank, {workload} model, ZeroFn {stage} / hand-written, ms/step"
            if f"ZeroFn {stage}" not in loops:
                yield Check(what, "not measured", None, limit)
                continue
            value = interval(loops[f"ZeroFn {stage}"]["ratios"])
            yield Check(what, str(value), value.median, limit)


def _exact(run: dict) -> Iterator[Check]:
    world, rows, accumulating = run["world"], run["rows"], run["accumulating"]
    state, sent = "state, bytes per parameter and rank", "sent, elements per parameter and rank"
    for stage in range(4):
        limit = STATE_SLACK * state_bytes_per_parameter(stage, world)
        row = f"ZeroFn {stage}"
        yield _exact_check(run, f"{row}, {state}", rows.get(row, {}).get("state"), 1, limit)
    for stage in range(4):
        limit = WIRE_SLACK * wire_elements_per_parameter(stage, world)
        row = f"ZeroFn {stage}"
        yield _exact_check(run, f"{row}, {sent}", rows.get(row, {}).get("wire"), BYTES, limit)
    for row in ACCUMULATING:
        stage = int(row.split()[1])
        limit = WIRE_SLACK * wire_elements_per_parameter(stage, world, NUM_MICROBATCHES)
        found = [accumulating[row]] if row in accumulating else None
        yield _exact_check(run, f"{row}, {sent}", found, BYTES, limit)


def _exact_check(run: dict, what: str, measured: list[float] | None, unit: int, limit: float) -> Check:
    """`measured`: bytes a rank, one figure a round; None where the row was left out."""
    if measured is None:
        return Check(what, "not measured", None, limit)
    value = statistics.median(measured) / unit / run["parameters"]
    return Check(what, f"{value:.3f}", value, limit)

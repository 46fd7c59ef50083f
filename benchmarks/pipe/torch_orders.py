"""The orders of torch.distributed.pipelining's schedules, made without processes or modules."""

from __future__ import annotations

from types import SimpleNamespace

from torch.distributed import pipelining

from zerofn.schedules import Schedule

CLASSES = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zb": pipelining.schedules.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


def make(name: str, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Torch's schedule of this name. Raises `ValueError` where torch has none for so many microbatches."""
    made = build(name, ranks, microbatches, chunks)
    rows = (made.pipeline_order[rank] for rank in range(ranks))
    text = "\n".join(",".join("" if x is None else str(x) for x in row) for row in rows)
    return Schedule.from_csv(text, f"torch's {name}")


def build(name: str, ranks: int, microbatches: int, chunks: int = 2) -> pipelining.schedules.PipelineScheduleMulti:
    """Torch's own object, of stages that are not there. A schedule asks them where they lie, and nothing else."""
    about = {"group_size": ranks, "group_rank": 0, "num_stages": ranks * chunks, "submod": None}
    return CLASSES[name]([SimpleNamespace(**about) for _ in range(chunks)], microbatches)

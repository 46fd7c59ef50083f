"""Peak memory of a training step by the events of torch's allocator, in the same way for every system."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common import measure

MARK = "the step that is measured"


def peaks_of(step: Callable[[], Any], own: Sequence[torch.Tensor]) -> dict[str, int]:
    """Bytes of tensors while a step runs, by two steps of a loop that is under way; `own`, tensors of the benchmark
    itself, do not count:

    - `resident`: what tensors hold after a step, by a walk over the garbage collector's objects to their storages, of
      which the pages count that were ever touched (`allocated`: all of them). DeepSpeed's buffer for gradients takes
      2 GB and is used for what the model's take: here that costs nothing, and on an accelerator all of it.
    - `peak`: the most at any moment of the second step. The profiler has an event for each allocation and release of
      torch's host allocator, whoever asked; they are counted back from the end, where `resident` is known. The first
      step is there because memory that was taken before profiling began has no event when it is released.
    - `between`: the same at the moments when no operation runs. What an operation takes and gives back meanwhile is
      its own, which a budget does not count. It means nothing where hooks put ranges of their own around operations,
      as FSDP2's and DeepSpeed's do.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
        with record_function(MARK):
            step()
        gc.collect()
    not_theirs = measure.storages(own)
    there = [x for x in measure.live_tensors() if measure.storages([x]).keys().isdisjoint(not_theirs)]
    resident, allocated = measure.touched_bytes(there), measure.storage_bytes(there)
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live = most = between = end = 0
    for event in events:
        if event.name() == MARK:
            most = between = live
            continue
        if event.start_ns() > end:
            between = max(between, live)
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
        else:
            end = max(end, event.start_ns() + event.duration_ns())
        if event.start_ns() > end:
            between = max(between, live)
    return {
        "resident": resident,
        "allocated": allocated,
        "peak": resident + most - live,
        "between": resident + between - live,
    }

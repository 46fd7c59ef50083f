"""The data of both frameworks."""

from __future__ import annotations

import torch

from benchmarks.common.workload import Workload


def rows(work: Workload, count: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, work.vocab, (count, work.seq), generator=draw)
    return [{"input_ids": x, "labels": x} for x in tokens]

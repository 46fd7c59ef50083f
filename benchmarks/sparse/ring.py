"""python -m benchmarks.sparse.ring: what a ring of two ranks sends and needs, with a layout and without, as planned.

A step at stage 3 on a row of 4,096 tokens: two layers of attention with 4 heads of 16, in float32. Tests compare such
plans with real ranks (`tests/parallel/test_sparse_context.py`). Writes JSON beside the table.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zerofn
from benchmarks.common import report
from benchmarks.common.options import add_end
from zerofn import optim, sparse
from zerofn.parallel import Chunks, attention

RANKS, TOKENS, LAYERS, HEADS, WIDTH = 2, 4096, 2, 4, 16
HERE = zerofn.Machine("here", "cpu", RANKS, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e8, host_memory=32e9)
MB = 1e6


class Case(NamedTuple):
    """A row of the table."""

    name: str
    layout: sparse.Pattern | None
    chunks: Chunks


CASES = [
    Case("window of 256", sparse.sliding_window(256), Chunks.in_order(RANKS)),
    Case("everything", sparse.everything, Chunks.early_and_late(RANKS)),
    Case("no layout", None, Chunks.early_and_late(RANKS)),
]


def init_state() -> zerofn.TrainState:
    size = HEADS * WIDTH
    params = {f"{k}.{name}": torch.randn(size, size) / 8 for k in range(LAYERS) for name in ("q", "k", "v", "out")}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))


def planned(case: Case) -> dict[str, float]:
    """Bytes that a rank sends in a step, and its peak."""
    mesh = zerofn.Mesh.planned({"context": RANKS})
    attend = partial(attention, axis=mesh.axis("context"), method="ring", layout=case.layout, chunks=case.chunks)

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for k in range(LAYERS):
            q, keys, v = ((x @ params[f"{k}.{name}"]).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for name in "qkv")
            x = x + attend(q, keys, v).transpose(1, 2).flatten(2) @ params[f"{k}.out"]
        return x.square().mean()

    def train_step(state: zerofn.TrainState, x: Tensor) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads), loss

    rows = torch.empty(1, TOKENS // RANKS, HEADS * WIDTH)
    asked = {"stage": 3, "precision": None, "offload": None, "remat": None}
    (row,) = zerofn.plan(train_step, init_state, rows, mesh=mesh, machine=HERE, **asked)
    assert row.plan is not None
    return {"sent": row.plan.sent_along["context"], "peak": row.plan.memory().total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_end(parser, "sparse_ring.json")
    args = parser.parse_args()
    rows = {case.name: planned(case) for case in CASES}
    out = Table("in a ring", "MB sent", "MB at the peak")
    for name, row in rows.items():
        out.add_row(name, f"{row['sent'] / MB:.2f}", f"{row['peak'] / MB:.1f}")
    Console().print(out)
    return report.conclude(args.out, {"surroundings": report.surroundings(), "rows": rows}, [], args.check)


if __name__ == "__main__":
    sys.exit(main())

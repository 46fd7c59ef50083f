"""Models, meshes and stages beside plain torch on the global batch: five steps in float64, all differences told."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zerofn
from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.mesh.float64_models import CONFIGS
from benchmarks.mesh.training import plain, trained

LIMIT = 1e-12  # of the model's largest entry, and of the loss
Expected = tuple[list[float], dict[str, torch.Tensor]]  # losses, and parameters after all steps
MESHES: list[tuple[dict[str, int], str]] = [
    ({"tensor": 2}, "ulysses"),
    ({"tensor": 3}, "ulysses"),
    ({"context": 2}, "ulysses"),
    ({"context": 3}, "ulysses"),
    ({"context": 3}, "ring"),
    ({"replicate": 2, "data": 2}, "ulysses"),
    ({"data": 2, "tensor": 2}, "ulysses"),
    ({"expert": 2}, "ulysses"),
    ({"expert": 3}, "ulysses"),
    ({"data": 2, "expert": 2}, "ulysses"),
    ({"expert": 2, "tensor": 2}, "ulysses"),
    ({"expert": 2, "context": 2}, "ulysses"),
    ({"data": 2, "tensor": 2, "context": 2}, "ring"),
]


def difference(
    name: str,
    sizes: dict[str, int],
    method: str,
    expected: Expected,
    stages: Iterable[int] = range(4),
    device: str = "cpu",
) -> list[float]:
    """For each stage the greatest difference from plain torch, of losses and of parameters, relative to the largest.

    Every rank calls it, and returns its own.
    """
    losses, params = expected
    largest = max(float(x.abs().max()) for x in params.values())
    found = []
    for stage in stages:
        mine, ours, _ = trained(name, sizes, stage, True, method, device=device)
        of_losses = max(abs(a - b) / abs(b) for a, b in zip(mine, losses, strict=True))
        of_params = max(float((ours[k] - x).abs().max()) for k, x in params.items()) / largest
        found.append(max(of_losses, of_params))
    return found


def row(sizes: dict[str, int], method: str, expected: dict[str, Expected]) -> dict[str, dict[str, Any]]:
    """All models on one mesh: differences by stage, the greatest of all ranks, or the sentence that refuses the model.

    Every rank calls it. Ranks that refuse a model say the same, before they send anything; others end the benchmark.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in CONFIGS:
        try:
            told: dict[str, Any] = {"difference_by_stage": difference(name, sizes, method, expected[name])}
        except (ValueError, TypeError, NotImplementedError) as error:
            told = {"refused": str(error).splitlines()[0]}
        everyone = _of_all(told)
        refusals = {one.get("refused") for one in everyone}
        if len(refusals) > 1:
            raise RuntimeError(f"{words(sizes, method)}: {name}: ranks differ: {everyone}")
        if "refused" not in told:
            by_stage = zip(*(one["difference_by_stage"] for one in everyone), strict=True)
            told = {"difference_by_stage": [max(one) for one in by_stage]}
        found[name] = told
        if zerofn.rank() == 0:
            print(f"{words(sizes, method)}: {name}: {cell(told)}", flush=True)
    return found


def _of_all(told: dict[str, Any]) -> list[dict[str, Any]]:
    everyone: list[Any] = [None] * zerofn.world_size()
    dist.all_gather_object(everyone, told)
    return everyone


def cell(told: dict[str, Any]) -> str:
    return "refused" if "refused" in told else f"{max(told['difference_by_stage']):.1e}"


def words(sizes: dict[str, int], method: str) -> str:
    """A mesh's name in the table."""
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{mesh}, {method}" if "context" in sizes else mesh


def main(path: Path, console: Console) -> int:
    """Print and write the table; the exit status."""
    rows: dict[str, dict[str, Any]] = {}
    table = Table("mesh", *CONFIGS, title="Greatest difference over stages 0 to 3")
    expected = {name: plain(name) for name in CONFIGS}
    for sizes, method in MESHES:
        found = zerofn.run(row, sizes, method, expected, ranks=math.prod(sizes.values()))
        rows |= {f"{words(sizes, method)}: {name}": told for name, told in found.items()}
        table.add_row(words(sizes, method), *map(cell, found.values()))
    console.print(table)
    kept = {key: max(told["difference_by_stage"]) for key, told in rows.items() if "refused" not in told}
    refused = [f"{key}: {told['refused']}" for key, told in rows.items() if "refused" in told]
    held = [Check(key, f"{value:.1e}", value, LIMIT) for key, value in kept.items()]
    for line in refused:
        console.print(line, highlight=False)
    missed = [x.what for x in held if not x.kept]
    console.print(f"{len(held)} kept, {len(refused)} refused, missed: {', '.join(missed) or 'none'}")
    return report.conclude(path, {"surroundings": report.surroundings(), "rows": rows}, held, True)

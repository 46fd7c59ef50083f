"""Models, meshes and stages beside plain torch on the global batch: five steps in float64, all differences told."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import zerofn
from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.mesh.float64_models import CONFIGS
from benchmarks.mesh.training import plain, trained

LIMIT = 1e-12  # of the model's largest entry, and of the loss
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


@functools.cache
def _plain(name: str) -> tuple[list[float], dict[str, Any]]:
    return plain(name)


def differences(name: str, sizes: dict[str, int], method: str) -> list[float]:
    """For each stage the greatest difference from plain torch, of losses and of parameters, relative to the largest.

    Every rank calls it.
    """
    losses, params = _plain(name)
    largest = max(float(x.abs().max()) for x in params.values())
    found = []
    for stage in range(4):
        mine, ours, _ = trained(name, sizes, stage, True, method)
        of_losses = max(abs(a - b) / abs(b) for a, b in zip(mine, losses, strict=True))
        of_params = max(float((ours[k] - x).abs().max()) for k, x in params.items()) / largest
        found.append(max(of_losses, of_params))
    return found


def words(sizes: dict[str, int], method: str) -> str:
    """A mesh's name in the table."""
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{mesh}, {method}" if "context" in sizes else mesh


def main(path: Path, console: Console) -> int:
    """Print and write the table; the exit status."""
    rows: dict[str, dict[str, Any]] = {}
    table = Table("mesh", *CONFIGS, title="Greatest difference over stages 0 to 3")
    held, refused = [], []
    for sizes, method in MESHES:
        cells = []
        for name in CONFIGS:
            key = f"{words(sizes, method)}: {name}"
            try:
                found = zerofn.run(differences, name, sizes, method, ranks=math.prod(sizes.values()))
            except (ValueError, TypeError, RuntimeError) as error:
                rows[key] = {"refused": str(error).splitlines()[0]}
                refused.append(f"{key}: {rows[key]['refused']}")
                cells.append("refused")
                continue
            rows[key] = {"difference_by_stage": found}
            held.append(Check(key, f"{max(found):.1e}", max(found), LIMIT))
            cells.append(f"{max(found):.1e}")
            console.print(f"{key}: {max(found):.1e}", highlight=False)
        table.add_row(words(sizes, method), *cells)
    console.print(table)
    for line in refused:
        console.print(line, highlight=False)
    missed = [x.what for x in held if not x.kept]
    console.print(f"{len(held)} kept, {len(refused)} refused, missed: {', '.join(missed) or 'none'}")
    return report.conclude(path, {"surroundings": report.surroundings(), "rows": rows}, held, True)

"""The folder of a run: one checkpoint a step, `step-00000400`. The newest is the highest number; no pointer can lie."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..util.errors import CheckpointError
from . import folder
from .manifest import read_manifest
from .places import remove_folder

_STEP = re.compile(r"step-(\d{8,})")


def path_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    >>> path_of(Path("run"), 400).name
    'step-00000400'
    """
    return run / f"step-{step:08d}"


def complete_steps(run: Path) -> list[int]:
    """Return the steps that have a checkpoint whose save came to its end, in ascending order."""
    there = run.iterdir() if run.is_dir() else ()
    named = [(p, _STEP.fullmatch(p.name)) for p in there]
    return sorted(int(match[1]) for p, match in named if match is not None and folder.is_complete(p))


def saved_by(run: Path, step: int) -> dict[str, Any]:
    """Return which save and job wrote a checkpoint; nothing if that cannot be read."""
    try:
        return read_manifest(path_of(run, step)).saved
    except CheckpointError:
        return {}


def metric_of(run: Path, step: int, name: str) -> float | None:
    """Return a metric that was saved with a checkpoint; None if it was not, or is no number."""
    try:
        value = read_manifest(path_of(run, step)).notes.get("metrics", {}).get(name)
    except CheckpointError:
        return None
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def best_step(run: Path, steps: Collection[int], name: str, mode: str) -> int | None:
    """Return which of these steps has the lowest (mode "min") or highest ("max") metric; the later of two equal."""
    found = [(metric, step) for step in steps if (metric := metric_of(run, step, name)) is not None]
    sign = 1 if mode == "max" else -1
    return max(found, key=lambda pair: (sign * pair[0], pair[1]))[1] if found else None


def remove(path: Path) -> None:
    """Remove a checkpoint: its manifest first, so that it is none any more, then what saves have written."""
    ours = [p for p in path.iterdir() if p.name != folder.MANIFEST and folder.is_ours(p)]
    (path / folder.MANIFEST).unlink(missing_ok=True)
    folder.flush(path)
    for file in ours:
        file.unlink(missing_ok=True)
    remove_folder(path)

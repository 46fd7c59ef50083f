"""The folder of a run: one checkpoint a step, `step-00000400`. The newest is the highest number; no pointer can lie."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ..util.errors import CheckpointError
from . import folder, owner
from .locations import is_link, remove_folder
from .manifest import read_manifest

_STEP = re.compile(r"step-(\d{8,})")


def path_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    >>> path_of(Path("run"), 400).name
    'step-00000400'
    """
    return run / f"step-{step:08d}"


def complete_steps(run: Path) -> list[int]:
    """Return the steps that have a checkpoint whose save came to its end, in ascending order."""
    return sorted(step for step, path in folders(run).items() if folder.is_complete(path))


def folders(run: Path) -> dict[int, Path]:
    """Return what has the name that `path_of` gives a step, by step, complete or not."""
    there = run.iterdir() if run.is_dir() else ()
    found = {int(match[1]): p for p in there if (match := _STEP.fullmatch(p.name)) is not None}
    return {step: path for step, path in found.items() if path.name == path_of(run, step).name}


def saved_by(run: Path, step: int) -> dict[str, Any]:
    """Return which save and job wrote a checkpoint; nothing if that cannot be read."""
    try:
        return read_manifest(path_of(run, step)).saved
    except CheckpointError:
        return {}


def metric_of(run: Path, step: int, name: str) -> float | None:
    """Return a metric that was saved with a checkpoint; None if it was not, or is not a number."""
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
    """Remove a checkpoint: its manifest first, so that it is none any more, then what saves have written. Of a link,
    which leads to another run's, the link alone.

    Raises `OSError` if something cannot be removed; it is whole then, or what is left of it is for `clear`.
    """
    if is_link(path):
        path.unlink()
        return
    ours = [p for p in path.iterdir() if p.name != folder.MANIFEST and folder.is_ours(p)]
    (path / folder.MANIFEST).unlink(missing_ok=True)
    folder.flush(path)
    _unlink(ours)
    remove_folder(path)


def clear(path: Path, now: float) -> None:
    """Remove what killed processes have left in the folder of a step: files of no checkpoint, and the sign that
    somebody saves there. `now`: the time by the clock of the file system.

    Raises `OSError` if something cannot be removed.
    """
    if is_link(path) or not path.is_dir():
        return
    # The list comes first: what is in it is older than a save that begins now.
    there = [p for p in path.iterdir() if folder.has_our_name(p) and p.name != folder.MANIFEST]
    complete = folder.is_complete(path)
    if (complete and all(map(folder.is_data, there))) or owner.is_saving(path, now):
        return
    try:
        named: Collection[str] = read_manifest(path).files if complete else ()
    except CheckpointError:  # any file may be one of its own
        named = [p.name for p in there if folder.is_data(p)]
    _unlink(p for p in there if p.name not in named and folder.is_ours(p))
    if not complete:
        remove_folder(path)


def _unlink(files: Iterable[Path]) -> None:
    """Remove those files that can be. Raises `OSError` if one of them cannot."""
    failed: OSError | None = None
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed

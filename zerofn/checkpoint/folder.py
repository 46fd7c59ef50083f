"""The folder of a checkpoint: complete or absent, whenever a process is killed.

[Note: replacing] A save fills `NAME.saving`; the manifest is written last, when every other file is on the disk. Then
`NAME` is renamed to `NAME.old`, `NAME.saving` to `NAME`, and `NAME.old` is removed. Between the two renames there is no
`NAME`, but a complete `NAME.saving` and `NAME.old`: loading finds the first, the next save renames it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from ..util.errors import CheckpointError

log = logging.getLogger("zerofn")

MANIFEST = "manifest.json"


def file_of(rank: int, num_ranks: int) -> str:
    """The name of the file that a rank writes.

    >>> file_of(3, 8)
    'rank-00003-of-00008.safetensors'
    """
    return f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors"


def _is_ours(name: str) -> bool:
    return name == MANIFEST or re.fullmatch(r"rank-\d{5,}-of-\d{5,}\.safetensors", name) is not None


def saving(path: Path) -> Path:
    """Return the folder that holds a checkpoint until it is complete."""
    return path.with_name(path.name + ".saving")


def old(path: Path) -> Path:
    """Return the folder that holds the replaced checkpoint."""
    return path.with_name(path.name + ".old")


def is_complete(folder: Path) -> bool:
    """Return whether a folder has a manifest."""
    return (folder / MANIFEST).is_file()


def start(path: Path) -> None:
    """Finish what an interrupted save left, and make the empty folder of the next one.

    Raises `CheckpointError` if `path` is neither a checkpoint nor an empty folder.
    """
    if path.exists() and not is_complete(path) and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"save: {path} is there and is no checkpoint; choose another path, or move it away.")
    if not path.exists():
        left = next((p for p in (saving(path), old(path)) if is_complete(p)), None)
        if left is not None:
            left.rename(path)
    clean_up(path)
    shutil.rmtree(saving(path), ignore_errors=True)
    saving(path).mkdir(parents=True)


def put_in_place(path: Path) -> None:
    """Rename the complete `saving(path)` to `path`. [Note: replacing]"""
    flush(saving(path))
    if path.exists():
        _remove(old(path))
        os.replace(path, old(path))
    os.replace(saving(path), path)
    flush(path.parent)


def give_up(path: Path) -> None:
    """Remove the unfinished folder of a save that failed."""
    if path.exists() or not is_complete(saving(path)):
        shutil.rmtree(saving(path), ignore_errors=True)


def clean_up(path: Path) -> None:
    """Remove `old(path)`; files of others in it move to `path`."""
    try:
        if not old(path).exists() or not path.exists():
            return
        for item in old(path).iterdir():
            if not _is_ours(item.name) and not (path / item.name).exists():
                os.replace(item, path / item.name)
        _remove(old(path))
    except OSError as error:
        log.warning("save: %s is complete, but %s could not be removed (%s).", path, old(path), error)


def find(path: Path) -> Path:
    """Return the complete checkpoint that `path` stands for. [Note: replacing]

    Raises `CheckpointError`, which says what is there, if there is none.
    """
    for folder in (path,) if path.exists() else (saving(path), old(path)):
        if is_complete(folder):
            if folder != path:
                log.warning("load: a save to %s was interrupted just before its end; using %s.", path, folder)
            return folder
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder with a {MANIFEST}. Weights in a "
            ".safetensors file are read with zerofn.load_safetensors(path, like=params)."
        )
    if path.is_dir():
        raise CheckpointError(
            f"{path} has no {MANIFEST}, so it is no complete checkpoint; give the folder "
            "that zerofn.save(path, state) was given."
        )
    if saving(path).exists():
        raise CheckpointError(
            f"{path} is not there: the save that was to make it was interrupted and left "
            f"only an unfinished {saving(path).name}. Load an earlier checkpoint; save "
            "may be called again."
        )
    raise CheckpointError(
        f"{path} is not there; give the path of a checkpoint made by zerofn.save.{_those_in(path.parent)}"
    )


def _those_in(folder: Path) -> str:
    found = sorted(p.name for p in folder.iterdir() if is_complete(p)) if folder.is_dir() else []
    return f" The checkpoints in {folder} are {found[:8]}." if found else ""


def flush(folder: Path) -> None:
    """Flush a folder's own entries to the disk, if the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)

"""The folder of a checkpoint: it holds a complete one, or none, whenever a process is killed.

[Note: replacing] Every save has a number of its own, at random, in the names of its files and in their first bytes. It
writes them beside those of the checkpoint that is there. When all are on the disk, the new manifest takes the place of
the old one, which is one rename of a file; then the files that only the old one names are removed. So there is no
moment without a checkpoint, no folder is renamed, and what others have put there stays. What a killed save has left,
the next one removes: files with such names and such first bytes that no manifest names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

from ..util.errors import CheckpointError
from .locations import fetch, is_link, is_remote, put, text_of
from .tensor_file import mark_of

MANIFEST = "manifest.json"
SAVING = "zerofn-saving.json"  # who is saving now
_DATA = re.compile(r"rank-\d{5,}-of-\d{5,}\.([0-9a-f]{12})\.safetensors")
_HALF = re.compile(r"(?:manifest|zerofn-saving)\.json\.([0-9a-f]{12})")  # of a file that was to be renamed


def new_save() -> str:
    """Return a number for a save, which no other one has."""
    return secrets.token_hex(6)


def file_of(rank: int, num_ranks: int, save: str) -> str:
    """The name of the file that a rank writes.

    >>> file_of(3, 8, "0123456789ab")
    'rank-00003-of-00008.0123456789ab.safetensors'
    """
    return f"rank-{rank:05d}-of-{num_ranks:05d}.{save}.safetensors"


def is_complete(folder: Path) -> bool:
    """Return whether a folder has a manifest."""
    return (folder / MANIFEST).is_file()


def is_data(file: Path) -> bool:
    """Whether a file has a name such as ranks give theirs."""
    return _DATA.fullmatch(file.name) is not None


def has_our_name(file: Path) -> bool:
    """Whether a file has a name such as saves give theirs."""
    return is_data(file) or file.name in (MANIFEST, SAVING) or _HALF.fullmatch(file.name) is not None


def is_ours(file: Path) -> bool:
    """Whether a save has made this file: by its name, and by what it begins with unless nothing was written yet."""
    if not has_our_name(file):
        return False
    data = _DATA.fullmatch(file.name)
    try:
        if file.stat().st_size == 0:
            return file.name not in (MANIFEST, SAVING)
        if data is not None:  # zeros are what a loss of power has left of it
            return mark_of(file) == data[1] or not any(fetch(file, 0, 256))
        return b'"format": "zerofn-' in fetch(file, 0, 64)
    except FileNotFoundError:  # another save has just removed its own
        return not is_link(file)
    except CheckpointError:  # it is a folder, or a pipe
        return False


def check_usable(path: Path) -> None:
    """Raise `CheckpointError` if `path` is there and is neither a checkpoint, nor empty, nor what a save has left."""
    if not path.exists():
        return
    there = list(path.iterdir()) if path.is_dir() else [path]
    strange = [p for p in there if p.name in (MANIFEST, SAVING) and not is_ours(p)]
    if not is_complete(path):
        strange += [p for p in there if not is_ours(p)]
    if strange:
        raise CheckpointError(
            f"save: {path} exists and is not a checkpoint: {strange[0].name} was not written by ZeroFn. Choose another "
            "path, or move the folder."
        )


def left_behind(folder: Path, named: Collection[str] | None) -> list[Path]:
    """Return the files of saves that `named`, the files of a manifest, does not hold. None: they are not known."""
    if named is None:
        return []
    return [p for p in folder.iterdir() if p.name not in (MANIFEST, SAVING, *named) and is_ours(p)]


def files_of(folder: Path, save: str) -> list[Path]:
    """Return the files that a save has made."""
    found = [(p, _DATA.fullmatch(p.name) or _HALF.fullmatch(p.name)) for p in folder.iterdir()]
    return [p for p, match in found if match is not None and match[1] == save]


def replace_text(file: Path, text: str, save: str) -> None:
    """Give a file new contents at once: whoever reads it finds the old ones or the new ones."""
    if is_remote(file):
        put(file, text)
        return
    with _half(file, text, save) as half:
        os.replace(half, file)
    flush(file.parent)


def new_text(file: Path, text: str, save: str) -> bool:
    """Make a file with its contents at once, and return True; False if it is there, or was a moment ago."""
    if is_remote(file):  # of two that do so at one moment, the later has it
        if file.exists():
            return False
        put(file, text)
        return text_of(file) == text
    with _half(file, text, save) as half:
        try:
            os.link(half, file)
        except (FileExistsError, FileNotFoundError):  # another save, as it ends, removes what has such a name
            return False
        except OSError:  # a file system without links
            if file.exists():
                return False
            os.replace(half, file)
    return True


@contextlib.contextmanager
def _half(file: Path, text: str, save: str) -> Iterator[Path]:
    half = file.with_name(f"{file.name}.{save}")
    try:
        with open(half, "w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        yield half
    finally:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)


def find(path: Path) -> Path:
    """Return the folder of the checkpoint at `path`. Raises `CheckpointError`, which says what is there, else."""
    if is_complete(path):
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, but a checkpoint is a folder with a {MANIFEST}. To read weights from a .safetensors "
            "file, write zerofn.load_safetensors(path, like=params)."
        )
    if path.is_dir() and any(_DATA.fullmatch(p.name) for p in path.iterdir()):
        raise CheckpointError(
            f"{path} has no {MANIFEST}, because the save was interrupted. Load an earlier checkpoint. A new save may "
            "use this path."
        )
    if path.is_dir():
        raise CheckpointError(
            f"{path} has no {MANIFEST}, so it is not a complete checkpoint. Pass the folder that you passed to "
            "zerofn.save(path, state)."
        )
    raise CheckpointError(
        f"{path} does not exist. Pass the path of a checkpoint that zerofn.save wrote.{_those_in(path.parent)}"
    )


def _those_in(folder: Path) -> str:
    found = sorted(p.name for p in folder.iterdir() if is_complete(p)) if folder.is_dir() else []
    return f" The checkpoints in {folder} are {found[:8]}." if found else ""


def flush(folder: Path) -> None:
    """Flush a folder's own entries to the disk, if the system can."""
    if is_remote(folder):  # what was put there is there
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

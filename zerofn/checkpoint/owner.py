"""Who is saving to a folder: one job at a time, and a job whose checkpoint another one has replaced is told.

The file `saving.json` names the process that saves, which touches it every other second. A process that does not is
taken for dead, at once if it ran here and is gone. Files of two saves never have one name, so what two jobs do at the
same moment by mistake costs one of the two checkpoints, and never both.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..util.errors import CheckpointError
from ..util.other_processes import gone, this_process
from ..util.process import the
from .folder import SAVING, new_text, replace_text
from .locations import is_remote, put, text_of

log = logging.getLogger("zerofn")

BEAT = 2.0  # seconds between signs of life
SILENCE = 20.0  # seconds without one until a process of another machine, or a frozen one, is taken for dead
PATIENCE = 120.0  # seconds to wait for another job's save
_FIRST_WORD = 5.0


class ThisProcess:
    """This process as others know it. `saved`: its newest save, by folder, in the order of these saves."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(6)
        self.saved: dict[Path, str] = {}

    def forked(self) -> None:
        """A forked process is another one."""
        self.__init__()  # type: ignore[misc]

    def described(self) -> dict[str, Any]:
        """What another process needs to tell whether this one is alive."""
        return {"job": self.name, **this_process()}


def note_save(path: Path, save: str) -> None:
    """Remember that this process has saved to `path`, and what."""
    saved = the(ThisProcess).saved
    saved.pop(path, None)
    saved[path] = save


def saved_paths() -> list[Path]:
    """Return the paths that this process has saved to, the newest last. Only rank 0, which completes every save, has
    any.

    >>> import tempfile, torch, zerofn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     saved_paths()[-1].name
    'step-1'
    """
    return list(the(ThisProcess).saved)


def check_not_replaced(path: Path, found: dict[str, Any]) -> None:
    """Raise `CheckpointError` if another job has saved to `path` after this one did. `found`: what saved there last."""
    mine = the(ThisProcess).saved.get(path)
    if mine is not None and found and found.get("save") != mine and found.get("job") != the(ThisProcess).name:
        raise CheckpointError(
            f"save: {path} was this job's checkpoint, but {_told(found)} has saved there since. Two jobs that save to "
            "one path overwrite each other's checkpoints. Use a different path for this job."
        )


@contextlib.contextmanager
def saving(path: Path, save: str) -> Iterator[None]:
    """Inside, this process alone saves to the folder `path`.

    Waits while another one does. Raises `CheckpointError` if that one takes longer than `PATIENCE` seconds.
    """
    file = path / SAVING
    text = json.dumps({"format": "zerofn-save", "save": save, **the(ThisProcess).described()}) + "\n"
    while not new_text(file, text, save):
        if _wait(path):
            with contextlib.suppress(FileNotFoundError):  # another job was first, and has removed what this one wrote
                replace_text(file, text, save)
                break
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(file, save, over), name="zerofn-saving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        try:
            if _read(file).get("save") == save:
                file.unlink(missing_ok=True)
        except Exception as error:  # the save has ended as it has; a network's errors are of many kinds
            log.warning("save: %s could not be removed (%s).", file, error)


def is_saving(path: Path, now: float) -> bool:
    """Whether a process that lives saves to `path`. `now`: the time by the clock of the file system."""
    found = _read(path / SAVING)
    return bool(found) and not gone(found) and now - touched(path / SAVING)[0] < SILENCE


def check_still(path: Path, save: str) -> None:
    """Raise `CheckpointError` if another job took this one for dead, and saves now."""
    now = _read(path / SAVING)
    if now.get("save") != save:
        raise CheckpointError(
            f"save: {_told(now) if now else 'another job'} now saves to {path}, because this job gave no sign of life "
            f"for {SILENCE:g} s. This save stopped, and the existing checkpoint remains. Use a different path for each "
            "job."
        )


def _wait(path: Path) -> bool:
    """Wait until nobody saves; True if somebody does who is dead."""
    start, word = time.monotonic(), _FIRST_WORD
    seen, since = None, start
    while (now := _read(path / SAVING)) or (path / SAVING).exists():  # it may be damaged, and then nobody's
        if gone(now):
            return True
        beat = (now.get("save"), *touched(path / SAVING))
        if beat != seen:
            seen, since = beat, time.monotonic()
        waited = time.monotonic() - start
        if time.monotonic() - since > SILENCE:
            return True
        if waited > PATIENCE:
            raise CheckpointError(
                f"save: {_told(now)} has been saving to {path} for {waited:.0f} s. Use a different path for each job."
            )
        if waited > word:
            log.warning("save: waiting for %s, which is saving to %s.", _told(now), path)
            word *= 2
        time.sleep(0.05)
    return False


def _beat(file: Path, save: str, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(Exception):  # a network's errors are of many kinds, and the next beat may come through
            if _read(file).get("save") != save:
                continue
            if is_remote(file):
                put(file, text_of(file).rstrip("\n") + " \n")
            else:
                os.utime(file)


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        found = json.loads(text_of(file))
        if isinstance(found, dict) and found.get("format") == "zerofn-save":
            return found
    return {}


def touched(file: Path) -> tuple[float, int]:
    """Return when a file was written or touched, and its bytes; zeros if it is not there."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime, file.stat().st_size
    return 0.0, 0


def _told(owner: dict[str, Any]) -> str:
    return f"another job (process {owner.get('pid')} on {str(owner.get('host')).partition(' ')[0]})"

"""Where a loader stands: each rank's `state_dict()`, saved along with a state and read again.

It may be large (a permutation of all rows), so it lies as a tensor of bytes in the rank's file, and ranks tell each
other its digest alone. What a rank has as rank 0 does is in rank 0's file only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ..job.agreement import rank_and_size
from ..util.errors import CheckpointError
from . import as_json
from .manifest import Manifest, read_manifest
from .tensor_file import MALFORMED, TensorFile, TensorToWrite

log = logging.getLogger("zerofn")

WHAT = "zerofn.Checkpoints"
IN_FILE = "zerofn/loader"  # what it is called in a file, where no leaf is


class HasState(Protocol):
    """What can be saved along with a state, as a data loader that knows where it stands."""

    def state_dict(self) -> Any:
        """Return where it stands."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from there."""


def text_of(loader: HasState | None) -> str:
    """Return where a loader stands, as a text; "" without a loader. Raises `TypeError` for what no text can hold."""
    return "" if loader is None else as_json.dumps(loader.state_dict(), "loader.state_dict()")


def digest(text: str) -> str:
    """Return what ranks tell each other of a text; "" for none."""
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def entries(text: str, tensor: str, rank: int, digests: Sequence[str]) -> list[TensorToWrite]:
    """Return what a rank writes to its file. `digests`: of every rank's text; `tensor`: the name."""
    if not text or (rank > 0 and digests[rank] == digests[0]):
        return []
    return [TensorToWrite.of(tensor, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def noted(tensor: str, digests: Sequence[str], file_of: Callable[[int], str]) -> dict[str, Any]:
    """Return what the manifest says of it: where each rank's is. `file_of`: a rank's file."""
    if not any(digests):
        return {}
    owners = [0 if text == digests[0] else rank for rank, text in enumerate(digests)]
    return {"ranks": [{"file": file_of(r), "tensor": tensor, "sha256": digests[r]} for r in owners]}


def read(loader: HasState | None, path: Path) -> Any:
    """Return where this rank's loader stood when the checkpoint at `path` was saved; None without a loader.

    Raises `CheckpointError` if that was not saved or is damaged, or each of another number of ranks stood elsewhere.
    """
    manifest = read_manifest(path)
    found: list[Any] = manifest.notes.get("ranks", [])
    if loader is None:
        if found:
            log.warning(
                "%s: %s contains the position of a data loader, but restore_or was called without a loader.", WHAT, path
            )
        return None
    rank, size = rank_and_size()
    if not found:
        raise CheckpointError(
            f"{WHAT}: {path} does not contain the position of the data loader, since it was saved without a loader. "
            "Pass loader=None, and set the position yourself."
        )
    if len(found) != size and any(x != found[0] for x in found):
        raise CheckpointError(
            f"{WHAT}: {path} has a different loader position for each of {len(found)} ranks, but this job has {size} "
            "ranks. Use a loader whose state is the same on all ranks (such as the number of samples that all ranks "
            f"have seen), continue with {len(found)} ranks, or pass loader=None and set the position yourself."
        )
    return as_json.loads(_read(path, manifest, found[min(rank, len(found) - 1)]), "the loader's state")


def go_on(loader: HasState | None, state: Any) -> None:
    """Let a loader continue from where it stopped."""
    if loader is None:
        return
    loader.load_state_dict(state)
    if _is_at_end(loader, state):
        log.warning(
            "%s: the loader's position is the end of an epoch, so the first loop over it yields no batch. If your "
            "program counts epochs, it loses one: count steps instead.", WHAT,
        )  # fmt: skip


def _read(path: Path, manifest: Manifest, place: Any) -> str:
    if isinstance(place, str):  # as long as it was in the manifest
        return place
    try:
        file = TensorFile(path / place["file"], manifest.files[place["file"]])
        data = torch.empty(file.shape(place["tensor"]), dtype=torch.uint8)
        file.read(place["tensor"], 0, data)
        file.close()
        return data.numpy().tobytes().decode()
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} is damaged: the position of its data loader cannot be read: {error!r}."
        ) from error


def _is_at_end(loader: Any, state: Any) -> bool:
    """Whether this is the state of torchdata's `StatefulDataLoader` after the last batch, before it was asked for one
    more. It then gives none, and begins the next epoch in the loop after that.
    """
    try:
        if state["_iterator_finished"] is not False:
            return False
        if "_snapshot" in state:  # with workers
            return bool(state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"] == len(loader))
        return bool(state["_num_yielded"] == len(loader))
    except (TypeError, KeyError):  # another loader's, or one without a length
        return False

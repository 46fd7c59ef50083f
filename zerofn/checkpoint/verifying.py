"""`verify`: read every byte of a checkpoint, and say which of them are not those that were written."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..job.agreement import rank_and_size, with_texts
from ..memory.turns import refuse_while_capturing
from ..util.arguments import checked
from ..util.errors import CheckpointError
from .file_sources import Checkpoint
from .folder import MANIFEST
from .locations import check_answers, located

WHAT = "zerofn.verify"


@checked()
def verify(path: str | os.PathLike[str]) -> list[str]:
    """Return a list of defects of the checkpoint at `path`, one sentence each; an empty list if every bit is as saved.

    Several ranks divide the files among them; every rank must call it, and all get the same list. Raises
    `CheckpointError`, on every rank, if the network or memory fails.

    >>> import tempfile, torch, zerofn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     verify(f"{folder}/step-1")  # nothing is damaged
    []
    """
    refuse_while_capturing(WHAT)
    texts = with_texts(WHAT, lambda: (None, json.dumps(_faults(located(path), *rank_and_size()))))[1]
    found = [fault for text in texts for fault in json.loads(text)]
    return list(dict.fromkeys(found))  # what all of them see is said once


def _faults(path: Path, rank: int, size: int) -> list[str]:
    """What is wrong with the manifest, and with each `size`-th file."""
    try:
        check_answers(path / MANIFEST)
        checkpoint = Checkpoint(path)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    found = []
    for name in sorted(checkpoint.manifest.files)[rank::size]:
        try:
            checkpoint.read_all(name)
        except (CheckpointError, OSError) as error:
            found.append(str(error))
    checkpoint.close()
    return found

"""Checksums beside a file of plain weights, which has no place for them that other libraries would keep."""

from __future__ import annotations

import json
from pathlib import Path

from ..util.errors import CheckpointError
from .locations import text_of
from .tensor_file import MALFORMED, FileIdentity

FORMAT = "zerofn-crc32"
SUFFIX = ".crc32.json"


def checksums_of(path: Path) -> Path:
    """The file with the checksums of another file.

    >>> checksums_of(Path("out/model.safetensors")).name
    'model.safetensors.crc32.json'
    """
    return path.with_name(path.name + SUFFIX)


def checksums_text(written: FileIdentity, blocks: dict[str, str]) -> str:
    """The contents of that file: `blocks` has the CRC-32 of every MiB of every tensor."""
    data = {"format": FORMAT, "nbytes": written.nbytes, "header": written.header, "blocks": blocks}
    return json.dumps(data, indent=1) + "\n"


def read_checksums(path: Path, fix: str) -> tuple[FileIdentity | None, str, dict[str, str] | None]:
    """Return (what identifies the file, `fix`, the CRC-32s of its blocks); None where nothing lies beside it."""
    beside = checksums_of(path)
    if not beside.is_file():
        return None, fix, None
    try:
        data = json.loads(text_of(beside))
        if data["format"] != FORMAT or not all(isinstance(x, str) for x in data["blocks"].values()):
            raise ValueError(data["format"])
        return FileIdentity(int(data["nbytes"]), str(data["header"])), fix, dict(data["blocks"])
    except MALFORMED as error:
        raise CheckpointError(f"{beside} is damaged: it has no valid checksums of {path.name}. {fix}") from error

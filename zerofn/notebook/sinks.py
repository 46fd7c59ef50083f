"""Where `zerofn.progress` writes its records besides the screen."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_KNOWN = "a path that ends in .jsonl, 'tensorboard:FOLDER', 'wandb', 'trackio', or an object with write() and close()"


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Sink(Protocol):
    """A place for records."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record: plain numbers by name, of which "step" is one."""

    def close(self) -> None:
        """There is no more."""


class JsonLines:
    """A file with one JSON object a line; what is there stays.

    JSON has no NaN and no infinities: they are the texts "NaN", "Infinity" and "-Infinity", as in protobuf's JSON.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a")

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line, at once."""
        plain = {name: _NAMES.get(str(x), x) if isinstance(x, float) else x for name, x in record.items()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars in a folder of event files."""

    def __init__(self, folder: str) -> None:
        self._writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a scalar for each number."""
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Logged:
    """A library with wandb's `log`, into the run that was started there."""

    def __init__(self, name: str) -> None:
        self._library = _library(name, name)

    def write(self, record: Mapping[str, Any]) -> None:
        """Log the numbers at their step."""
        self._library.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        """Do nothing: the run is yours, and goes on."""


def _library(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"progress: {name} is not installed: pip install {name}.") from error


def sinks_of(places: str | Sink | Path | Sequence[str | Sink | Path]) -> list[Sink]:
    """Return a sink for each place. Raises `ValueError` for an unknown one."""
    several = list(places) if isinstance(places, list | tuple) else [places]
    return [_sink(x) for x in several]


def _sink(place: Any) -> Sink:
    if isinstance(place, str | Path):
        text = str(place)
        if text.endswith(".jsonl"):
            return JsonLines(Path(text))
        if text.startswith("tensorboard:"):
            return TensorBoard(text.partition(":")[2])
        if text in ("wandb", "trackio"):
            return Logged(text)
    elif hasattr(place, "write") and hasattr(place, "close"):
        return place
    raise ValueError(f"progress: to={place!r} is not known; expected {_KNOWN}.")

"""Read a DeepSpeed configuration: a file, JSON text or a mapping; `"auto"` is filled in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .deepspeed_keys import blocks, flat, nearest, row_of, unknown

AUTO = "auto"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
WHERE = "from_deepspeed"
_LARGEST = 2.0**63  # larger numbers are a mistake, and torch's counts do not hold them


def read(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as a dict. Raises `ValueError` for a text that is not JSON, has a key twice or is not an
    object, and `FileNotFoundError`.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"{WHERE}: expected the path of a JSON file or a dict, got {type(config).__name__}.")
    path = Path(config)
    if not path.is_file():
        raise FileNotFoundError(f"{WHERE}: the file {os.fspath(config)!r} does not exist.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
        if twice is not None:
            raise ValueError(f"{WHERE}: {path}: the key {twice!r} occurs twice in one block. Delete one of them.")
        return dict(pairs)

    try:
        found = json.loads(path.read_text(), object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{WHERE}: {path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{WHERE}: {path}: expected a JSON object, {{...}}, got a {type(found).__name__}.")
    return found


def filled(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose `"auto"` values are those in `given`, by dotted key or by its last word.

    A value in `given` that meets another value in the file is an error: one of them would be ignored. So is `"auto"`
    that nobody fills, unless the key has no effect here or is a batch size, which follows from the others. Raises
    `ValueError`.
    """
    keys = dict(flat(config))
    used: dict[str, Any] = {}
    for name, value in given.items():
        meant = [key for key in keys if name in (key, key.rpartition(".")[2])]
        if not meant:
            raise ValueError(
                f"{WHERE}: auto={{{name!r}: ...}} has no effect: the configuration has no key of that name. Write "
                f'"{name}": "auto" there.'
            )
        for key in meant:
            if not _is_auto(keys[key]) and keys[key] != value:
                raise ValueError(
                    f"{WHERE}: {key} is {keys[key]!r} in the configuration, but {value!r} in auto=. Write "
                    f'"{key.rpartition(".")[2]}": "auto" in the configuration, or leave it out of auto=.'
                )
            used[key] = value
    left = [key for key, value in keys.items() if _is_auto(value) and key not in used and _has_effect(key)]
    if left:
        words = ", ".join(f'"{key}": ...' for key in left)
        raise ValueError(
            f'{WHERE}: the configuration has "auto" values. Pass the values that they stand for: auto={{{words}}}.'
        )
    return _replaced(config, used, "")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def _has_effect(key: str) -> bool:
    row = row_of(key)
    return row is not None and row.fate == "mapped" and key not in BATCH


def _replaced(block: Mapping[str, Any], used: Mapping[str, Any], above: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in block.items():
        key = f"{above}{name}"
        if key in used:
            out[name] = used[key]
        elif isinstance(value, Mapping):
            out[name] = _replaced(value, used, f"{key}.")
        elif not _is_auto(value):
            out[name] = value
    return out


def is_number(value: Any) -> bool:
    """Whether this is a number that a double holds: JSON as Python reads it has infinities, NaN, and any whole number.

    >>> is_number(3), is_number(True), is_number(float("inf")), is_number(10**400)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _LARGEST


def shown(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    is_long = isinstance(value, int) and abs(value) >= 10**80
    text = f"a number of {value.bit_length():,} bits" if is_long else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Section:
    """A part of a configuration, read by name: what is there has a type, and DeepSpeed's default where it is not."""

    def __init__(self, values: Any, name: str) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{WHERE}: {name}: expected a JSON object, {{...}}, got {values!r}.")
        self.values, self.name = values, name

    def __call__(self, name: str) -> Section:
        """A block inside this one; empty if it is not there."""
        value = self.values.get(name)
        return Section({} if value is None else value, f"{self.name}.{name}" if self.name else name)

    def number(self, name: str, default: Any, least: float | None = None, whole: bool = False) -> Any:
        """A number. Raises `ValueError` for anything else, and for one below `least`."""
        value = self.values.get(name)
        if value is None:
            return default
        wanted = "a whole number" if whole else "a number"
        if not is_number(value) or whole and value % 1 != 0:
            raise ValueError(f"{WHERE}: {self._of(name)}: expected {wanted}, got {shown(value)}.")
        if not (least is None or value >= least):
            raise ValueError(f"{WHERE}: {self._of(name)}: expected {wanted} of {least:g} or more, got {shown(value)}.")
        return int(value) if whole else float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false. Raises `ValueError` for anything else."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{WHERE}: {self._of(name)}: expected true or false, got {shown(value)}.")
        return value

    def word(self, name: str, known: Mapping[str, Any] | tuple[str, ...], default: Any = None) -> Any:
        """One of the known words; what it stands for, if `known` says so."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{WHERE}: {self._of(name)}: expected one of {', '.join(known)}, got {shown(value)}.")
        return known[value] if isinstance(known, Mapping) else value

    def text(self, name: str) -> str | None:
        """A text, or None where it is not there. Raises `ValueError` for anything else."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{WHERE}: {self._of(name)}: expected a string, got {shown(value)}.")
        return value

    def of_kind(self, name: str, kind: str, default: Any) -> None:
        """Raise `ValueError` unless a value is of its key's kind; see `Key.kind`. Numbers are at least 0, unless the
        `default` is negative.
        """
        if kind in ("whole", "number"):
            self.number(name, None, min(0, default or 0), kind == "whole")
        elif kind == "flag":
            self.flag(name)
        elif kind == "text":
            self.text(name)
        elif kind == "list" and not isinstance(self.values[name], list | tuple):
            raise ValueError(f"{WHERE}: {self._of(name)}: expected a list, got {shown(self.values[name])}.")

    def only(self, *names: str) -> None:
        """Raise `ValueError` for a name that is none of these."""
        for name in self.values:
            if name not in names:
                near = nearest(name, names)
                meant = f"; did you mean {near[0]!r}?" if near else f"; the known keys are {', '.join(names)}."
                raise ValueError(f"{WHERE}: {self._of(name)} is not known{meant}")

    def _of(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


def check_keys(config: Mapping[str, Any], above: str = "") -> None:
    """Raise `ValueError` for a key that DeepSpeed does not have, which it may ignore itself, and for a value that is
    not of its key's kind. null stands for the default of any key.
    """
    block = Section(config, above)
    for name, value in config.items():
        key = f"{above}.{name}" if above else str(name)
        row = row_of(key)
        if key in blocks() and not (row is not None and isinstance(value, bool)):  # some may be switched on and off
            check_keys(block(name).values, key)
        elif row is None and isinstance(value, Mapping) and value:  # keys of any depth, or unknown ones
            check_keys(value, key)
        elif row is None:
            raise ValueError(f"{WHERE}: {unknown(key)}")
        elif value is not None and not _is_auto(value):
            block.of_kind(name, row.kind, row.default)

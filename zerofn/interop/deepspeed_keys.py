"""Every key of a DeepSpeed configuration, and what becomes of it: the table in deepspeed_keys.json.

A row's `fate`: "mapped" (an argument here), "decided" (there is no knob here; the row says what decides), "none" (it
has no meaning here) or "refused" (an error, unless its value is one that turns it off). A key that ends in `.*` stands
for the keys of a block, and one in `.**` for all below it.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_UNLESS_ENABLED = "unless enabled"  # a block that does nothing without `"enabled": true`

_KINDS = {bool: "flag", int: "whole", float: "number", str: "text"}
_OLD, _NEW = "bfloat16.", "bf16."  # one block, by its old name


@dataclass(frozen=True)
class Key:
    """A row of the table. `default`: DeepSpeed's. `off`: values with which a refused key asks for nothing. `until`: the
    last version of DeepSpeed that has it. `takes`: the kind of its values, where the default does not say; see `kind`.
    """

    key: str
    fate: str
    what: str
    default: Any = None
    off: Any = None
    until: str | None = None
    takes: str | None = None

    @property
    def kind(self) -> str:
        """What its values are: "flag", "whole", "number", "text", "list" or "anything"."""
        return self.takes or _KINDS.get(type(self.default), "anything")


@functools.cache
def known() -> dict[str, Key]:
    """Return all rows, by key."""
    text = files("zerofn.interop").joinpath("deepspeed_keys.json").read_text()
    return {row["key"]: Key(**row) for row in json.loads(text)}


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that a configuration says."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


@functools.cache
def blocks() -> frozenset[str]:
    """Return the keys of the blocks that a configuration may have, dotted."""
    parts = [key.split(".") for key in known()]
    return frozenset(".".join(x[:n]) for x in parts for n in range(1, len(x))) | {_OLD[:-1]}


def row_of(key: str) -> Key | None:
    """Return the row that stands for a key; None for one that DeepSpeed does not have."""
    table = known()
    if key.startswith(_OLD):
        return table.get(_NEW + key.removeprefix(_OLD))
    if key in table:
        return table[key]
    parts = key.split(".")
    if len(parts) > 1 and (row := table.get(".".join([*parts[:-1], "*"]))) is not None:
        return row
    above = (".".join([*parts[:n], "**"]) for n in range(len(parts), 0, -1))
    return next((table[name] for name in above if name in table), None)


def unknown(key: str) -> str:
    """Return the sentence about a key that DeepSpeed does not have, with the nearest that it has."""
    rows = [x.removesuffix(".**").removesuffix(".*").split(".") for x in known()]
    names = list(dict.fromkeys(".".join(parts[: n + 1]) for parts in rows for n in range(len(parts))))
    block = key.rpartition(".")[0]
    inside = [x for x in names if x.rpartition(".")[0] == block]
    found = nearest(key, inside) or nearest(key, names)
    if not found:  # the right name in another block
        found = [x for x in names if x.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    meant = f"; did you mean {found[0]!r}?" if found else ". See `zerofn config` for all keys."
    return f"{key!r} is not a key of DeepSpeed's configuration{meant}"


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Return the name that a word may have meant, or nothing."""
    return difflib.get_close_matches(word, list(names), 1, 0.6)


def turned_off(row: Key, key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a refused key asks for nothing."""
    if row.off == _UNLESS_ENABLED:
        block = config.get(key.split(".")[0])
        return block in (False, None) or isinstance(block, Mapping) and not _enabled(block)
    return value is None or row.off is not None and value in row.off


def _enabled(block: Mapping[str, Any]) -> bool:
    """Whether a block says `"enabled": true`, at any depth."""
    inner = any(_enabled(x) for x in block.values() if isinstance(x, Mapping))
    return block.get("enabled") is True or inner

"""`TrainingArguments(wire="gather=int8,reduce=int4,feedback=true")`: in which form units travel."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import zerofn


def wire_as_written(text: str | None) -> Any:
    """Return what `zerofn.shard(wire=)` takes: a form, a `zerofn.Wire`, or None.

    Raises `ValueError` for names and values that `zerofn.Wire` does not have.

    >>> wire_as_written("gather=int8,reduce=int4,feedback=true")
    zerofn.Wire(gather='int8', reduce='int4', feedback=True)
    >>> wire_as_written("int8")
    'int8'
    """
    if not text or "=" not in text:
        return text or None
    given: dict[str, Any] = {}
    known = [x.name for x in dataclasses.fields(zerofn.Wire)]
    for part in text.split(","):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in known:
            raise ValueError(
                f"TrainingArguments: wire={text!r} has {part!r}, where one of {', '.join(known)} was expected, such as "
                "wire='gather=int8,reduce=fp8'."
            )
        given[name] = _value(value)
    try:
        return zerofn.Wire(**given)
    except TypeError as error:
        raise ValueError(f"TrainingArguments: wire={text!r}: {error}") from None


def _value(text: str) -> Any:
    """Return a number or a flag; what is neither is a word."""
    try:
        return json.loads(text.lower())
    except json.JSONDecodeError:
        return text

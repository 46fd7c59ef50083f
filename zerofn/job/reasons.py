"""Why this rank does what all ranks must do: told to all when others do something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..util.arguments import checked
from ..util.process import the
from ..util.user_line import at_line, user_line


class Reasons(threading.local):
    """Of each thread, from the outermost call to the innermost."""

    def __init__(self) -> None:
        self.texts: list[str] = []


@checked()
def because(text: str) -> contextlib.AbstractContextManager[None]:
    """Return a context: if not all ranks make the calls inside it, the error contains `text` and this line of code.

    For libraries whose functions make calls that all ranks must make together, which their users cannot see. The text
    is in the errors of all ranks. If contexts are nested, the innermost one counts.

    >>> import torch, zerofn
    >>> state = zerofn.shard({"params": {"w": torch.ones(2)}})
    >>> with zerofn.because("The report reads the weights: write it on every rank."):
    ...     zerofn.unshard(state)
    {'params': {'w': tensor([1., 1.])}}
    """
    line = user_line()
    return _inside(f"A{at_line(line.file, line.number)[2:]}: {text}" if line else text)


@contextlib.contextmanager
def _inside(text: str) -> Iterator[None]:
    texts = the(Reasons).texts
    texts.append(text)
    try:
        yield
    finally:
        texts.pop()


def reason() -> str:
    """Return the text of `because` that this thread is in, with its line; "" without one."""
    return next(reversed(the(Reasons).texts), "")

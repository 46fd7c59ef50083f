"""What a cell on several ranks shows: one rank's output as it comes, the others' on demand, an error once."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import Pretty, display

_ECHO = "stopped, because another rank"  # how the errors begin that follow from another rank's
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"-{20,}")


class CellFailed(RuntimeError):
    """A cell has failed on some ranks. IPython shows it as the rank's own traceback."""

    def __init__(self, said: str, traceback: Sequence[str] = ()) -> None:
        super().__init__(said)
        self.traceback = list(traceback)

    def _render_traceback_(self) -> list[str]:
        return self.traceback or [str(self)]


class Interrupted(KeyboardInterrupt):
    """A cell was interrupted. IPython shows the sentence alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


@contextlib.contextmanager
def counted_interrupts() -> Iterator[list[int]]:
    """Collect interrupts in a list. As exceptions, those that come between two looks at the ranks would leave them."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


class Status:
    """A line of a cell that says what is being done, and for how long; the last line stays."""

    def __init__(self) -> None:
        self._start, self._handle, self._shown = time.monotonic(), None, ""
        shell = get_ipython()
        self._notebook = shell is not None and hasattr(shell, "kernel")

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def tell(self, text: str) -> None:
        """Show a line in the place of the last one, if a notebook or a terminal can do so."""
        line = f"{text}, {self.seconds:.0f} s"
        if line != self._shown and (self._notebook or sys.stdout.isatty()):
            self._show(line, "\r" + line.ljust(len(self._shown)))
            self._shown = line

    def end(self, text: str) -> None:
        """Show the last line."""
        if self._handle is None and not self._shown:
            print(text)
        else:
            self._show(text, "\r" + text.ljust(len(self._shown)) + "\n")

    def _show(self, line: str, over: str) -> None:
        if not self._notebook:
            sys.stdout.write(over)
            sys.stdout.flush()
        elif self._handle is None:
            self._handle = display(Pretty(line), display_id=True)
        else:
            self._handle.update(Pretty(line))


class Shown:
    """The outputs of one cell. `results`: of each rank. `rank`: whose are shown."""

    def __init__(self, results: Sequence[Any], rank: int) -> None:
        self._results, self._rank = results, rank
        self._written = {"stdout": "", "stderr": ""}
        self._outputs = 0
        self._handles: dict[str, Any] = {}

    def show(self) -> None:
        """Show what has come since."""
        result = self._results[self._rank]
        for name in self._written:
            self._write(name, getattr(result, name) or "")
        outputs = result.outputs
        for content in outputs[self._outputs :]:
            self._display(content)
        self._outputs = len(outputs)

    def end(self) -> None:
        """Show what has come after the ranks were done, the cell's value, and what others have said."""
        for x in self._results:
            if x.done():
                x.wait_for_output(2.0)
        self.show()
        last = self._results[self._rank].execute_result
        if last:
            display(last["data"], metadata=last.get("metadata"), raw=True)
        for rank, x in enumerate(self._results):
            lines = len(f"{x.stdout or ''}{x.stderr or ''}".splitlines())
            if rank != self._rank and (lines or x.outputs):
                more = " and displays" if x.outputs else ""
                count = "1 line" if lines == 1 else f"{lines} lines"
                print(f"[rank {rank}: {count}{more}; %ranks output {rank} shows {'it' if lines == 1 else 'them'}]")

    def _write(self, name: str, text: str) -> None:
        before, stream = self._written[name], getattr(sys, name)
        if text == before:
            return
        if text.startswith(before):
            stream.write(text[len(before) :])
        else:  # the last line was written over
            stream.write("\r" + text[text.rfind("\n", 0, len(text) - 1) + 1 :])
        stream.flush()
        self._written[name] = text

    def _display(self, content: dict[str, Any]) -> None:
        name = (content.get("transient") or {}).get("display_id")
        data, metadata = content["data"], content.get("metadata")
        if name in self._handles:
            self._handles[name].update(data, metadata=metadata, raw=True)
        elif name is not None:
            self._handles[name] = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            display(data, metadata=metadata, raw=True)


def first_error(results: Sequence[Any]) -> CellFailed | None:
    """Return the error of the ranks that have failed by themselves, and which they are; None if there is none."""
    errors = {rank: _error(x) for rank, x in enumerate(results) if x.done() and not x.successful()}
    if not errors:
        return None
    told = {rank: (getattr(x, "ename", type(x).__name__), getattr(x, "evalue", str(x))) for rank, x in errors.items()}
    own = {rank: x for rank, x in told.items() if not x[1].startswith(_ECHO)} or told
    first = own[min(own)]
    ranks = [rank for rank, x in own.items() if x == first]
    text = f"{first[0]}: {first[1]}"
    who = "" if len(ranks) == len(results) else f"On {ranks_in_words(ranks)} of {len(results)}: "
    trace = (getattr(errors[ranks[0]], "traceback", None) or text).splitlines()
    others = [f"On {ranks_in_words([rank])}: {x[0]}: {x[1]}" for rank, x in own.items() if x != first]
    return CellFailed(who + text, [*([who.rstrip()] if who else []), *_trimmed(trace), *others, *_is_here(text)])


def _is_here(text: str) -> list[str]:
    """Say where a name is that a cell on the ranks has not found."""
    found = re.fullmatch(r"NameError: name '(\w+)' is not defined.*", text, re.DOTALL)
    shell = get_ipython()
    if found is None or shell is None or found[1] not in shell.user_ns:
        return []
    return [
        f"{found[1]!r} was defined in a cell that ran in the notebook's own process, not on the ranks. Write %%ranks "
        "as the first line of that cell and run it again. After %autoranks, every cell runs on the ranks."
    ]


def _error(result: Any) -> BaseException:
    try:
        result.get()
    except Exception as error:
        return error.elist[0].error if hasattr(error, "elist") and hasattr(error.elist[0], "error") else error
    raise AssertionError


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Name ranks.

    >>> ranks_in_words([1]), ranks_in_words([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _trimmed(trace: Sequence[str]) -> list[str]:
    """Leave out IPython's rule."""
    return [x for x in trace if not _RULE.fullmatch(_COLOURS.sub("", x).strip())]

"""Backends, which run scheduled graphs: the protocol, and the one that is built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.fx import Node

from ..graph.program import Program
from .executor import Executor


@runtime_checkable
class Runner(Protocol):
    """One scheduled graph, ready to run.

    It may have `wrote`, a bool: whether its last run reached a write to the graph's inputs. If a run fails before
    that, its state can still be used. Without `wrote`, the state counts as lost.
    """

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the graph once, and return the values that its output node lists, in order.

        `inputs`: a tensor for each placeholder of `program.gm`, in order; the runner may empty the list, to
        free each value at its last use. Writes to inputs must be done when this returns, or be queued on the
        same CUDA stream.
        """

    def close(self) -> None:
        """Free what `bind` made; nothing runs afterwards.

        It is called once: when the compiled step is collected, at the end of the process, or before the step is
        captured again after a drive failed.
        """


@runtime_checkable
class Backend(Protocol):
    """Makes runners. `zerofn.compile(backend=)` takes one, or a name."""

    def bind(self, program: Program) -> Runner:
        """Return a runner of `program.gm`, whose memory is allocated.

        It is called on every rank before the first run of each captured signature. It must not change the
        graph, which plans and errors read. Operations of `torch.ops.zerofn` have kernels like any others; those
        that communicate must run in the graph's order.
        """


class Eager:
    """`backend="eager"`: run operation by operation, from one generated Python function."""

    def bind(self, program: Program, tick: Callable[[Node | None], None] | None = None) -> Executor:
        """`tick`: see `Executor`."""
        return Executor(program.gm, tick)


_NAMED: dict[str, Callable[[], Backend]] = {"eager": Eager}


def backend_of(backend: str | Backend) -> Backend:
    """Return a backend by name, or the given one. Raises `ValueError` for an unknown name, `TypeError` for an object
    without `bind`.
    """
    if isinstance(backend, str):
        if backend not in _NAMED:
            known = ", ".join(map(repr, _NAMED))
            raise ValueError(f"compile: backend={backend!r} is not known; there is {known}, or pass a Backend.")
        return _NAMED[backend]()
    if isinstance(backend, type) or not isinstance(backend, Backend):
        raise TypeError(
            f"compile: backend={backend!r} is no backend; pass 'eager', or an instance with bind(program) -> Runner."
        )
    return backend


def eager_of(backend: Any, what: str) -> Eager:
    """Return the eager backend. Raises `ValueError` if another one is asked for `what`, which observes single
    operations.
    """
    if not isinstance(backend, Eager):
        raise ValueError(
            f"{what} times every operation as the eager backend runs it; this step runs on "
            f"{type(backend).__name__}. Compile it with backend='eager' for that."
        )
    return backend

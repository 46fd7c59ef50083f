"""What runs a scheduled graph: the protocol of backends, and the one that is built in."""

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

    It may also have `wrote`, a bool: whether its last run came to where the graph writes to its inputs. Where a run
    fails before that, the state that was given to it can be used again; without `wrote` it is taken to be lost.
    """

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the graph once. `inputs`: a tensor for each placeholder of `program.gm`, in order; the runner may empty
        the list, to free each value at its last use. -> the values that the graph's output node lists, in order. What
        the graph writes to its inputs must be written when this returns, or by operations in the same CUDA stream."""

    def close(self) -> None:
        """Free what `bind` made; nothing is run afterwards. It is called once: when the compiled step is collected, at
        the end of the process, or when the step captures anew after a drive failed."""


@runtime_checkable
class Backend(Protocol):
    """Makes runners: what `zerofn.compile(backend=)` takes beside names."""

    def bind(self, program: Program) -> Runner:
        """A runner of `program.gm`, whose memory is allocated. It is called on every rank before the first run of each
        captured signature. The graph must not be changed: plans and errors read it. Operations `torch.ops.zerofn` have
        kernels like any other; those that send must run in the graph's order."""


class Eager:
    """Operation by operation, from one generated Python function: `backend="eager"`."""

    def bind(self, program: Program, tick: Callable[[Node | None], None] | None = None) -> Executor:
        """`tick`: see `Executor`."""
        return Executor(program.gm, tick)


_NAMED: dict[str, Callable[[], Backend]] = {"eager": Eager}


def backend_of(backend: str | Backend) -> Backend:
    """A backend by name, or the one given. Raises `ValueError` for a name that is not known, `TypeError` for another
    object without `bind`."""
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
    """The eager backend. Raises `ValueError` where `what`, which follows single operations, is asked of another."""
    if not isinstance(backend, Eager):
        raise ValueError(
            f"{what} times every operation as the eager backend runs it; this step runs on "
            f"{type(backend).__name__}. Compile it with backend='eager' for that."
        )
    return backend

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

    It may have an attribute `wrote`, a bool: whether its last run came to a write to the graph's inputs. If a run
    fails before that, the caller can still use the state; without `wrote`, the state counts as lost.

    It may have `left_out`, a set of names, and `leave_out(names)`, which is called before the first run with what is
    left out on any rank. So ranks compute alike where one of them cannot compile a part.
    """

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the graph once, and return the values that its output node lists, in order.

        `inputs`: a tensor for each placeholder of `program.gm`, in order. The runner may empty this list, to free
        each tensor at its last use. When `run` returns, writes to inputs must be done, or queued on the current CUDA
        stream.
        """

    def close(self) -> None:
        """Free what `bind` allocated.

        It is called once, after the last run: when the compiled step is garbage-collected, at the end of the process,
        or before the step is captured again because a drive failed.
        """


@runtime_checkable
class Backend(Protocol):
    """Makes runners. `zerofn.compile(backend=)` takes an instance, or the name of a built-in backend.

    It may have a method `passes(ours) -> list[Pass]`, which returns the passes to run, as a function for
    `compile(passes=)` does, and is called before that one. So a backend prepares the graph that it will run.
    """

    def bind(self, program: Program) -> Runner:
        """Return a runner of `program.gm`.

        Every rank calls it once for each captured signature: after static buffers are allocated, before the first run.
        It must not change the graph, which plans and errors read. Operations of `torch.ops.zerofn` have kernels like
        any other. Those that communicate must run in the graph's order, which is the same on all ranks.
        """


class Eager:
    """`backend="eager"`: one generated Python function, which runs operation by operation."""

    def bind(self, program: Program, tick: Callable[[Node | None], None] | None = None) -> Executor:
        """Return an executor of the graph. `tick`: see `Executor`."""
        return Executor(program.gm, tick)


def eager_of(backend: Any, what: str) -> Eager:
    """Return `backend` if it is the eager one, or runs regions beside single operations.

    `what`: a feature that observes single operations. Raises `ValueError`, which names it, for another backend.
    """
    if not isinstance(backend, Eager):
        raise ValueError(
            f"{what} times every operation of the eager backend, but this step runs on {type(backend).__name__}. "
            "Compile the step with backend='eager'."
        )
    return backend

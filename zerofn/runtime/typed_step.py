"""The call of a compiled step, as type checkers and editors see it: it takes and returns what its function does."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from .errors import users_frames

S = TypeVar("S")  # a state
B = TypeVar("B")  # a batch
R = TypeVar("R")  # what the step returns
A = TypeVar("A")  # what it returns beside the state
T = TypeVar("T")


class _Unknown:
    """A type that only `Any` fits, which type checkers put where a function has no annotation."""


class TypedStep(Generic[S, B, R]):
    """A callable `(state, batch) -> result` with the types of a step's function.

    If the function has no annotations, and its result begins with a state, the new state has the type of the old one.
    If a type checker knows nothing of the result (mypy infers no results), it is `Any`.
    """

    state: S | None = None

    @overload
    def __call__(self: TypedStep[S, B, _Unknown], state: S, batch: B) -> Any: ...
    @overload
    def __call__(self: TypedStep[S, B, tuple[S, A]], state: T, batch: B) -> tuple[T, A]: ...  # T, as S may be Any
    @overload
    def __call__(self, state: S, batch: B) -> R: ...
    @users_frames("_entry_for")
    def __call__(self, state: Any, batch: Any) -> Any:
        """Run one step. Inside another step it is the function that was compiled."""
        return self.called(state, batch)

    def called(self, state: Any, batch: Any) -> Any:
        """Run one step, whatever its types."""
        raise NotImplementedError

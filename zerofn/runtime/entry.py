"""One capture of a step: its program and, from the first run on, its memory and its runner."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from ..comm.agreement import agree_on
from ..graph.program import Program
from .backend import Backend, Runner
from .buffers import Buffers


class Entry:
    """A scheduled program. Nothing is allocated until `bind`.

    `constants`: the tensors that the step closes over. `agreed`: the description that all ranks agreed on.
    """

    buffers: Buffers
    runner: Runner

    def __init__(
        self, program: Program, donating: bool, constants: Sequence[Tensor], backend: Backend, agreed: str
    ) -> None:
        self.program, self.donating, self.backend, self._agreed = program, donating, backend, agreed
        self._versions = [(x, x._version) for x in constants]
        self._bound = False

    def bind(self) -> None:
        """Allocate its buffers and let the backend make its runner, once. All ranks must call it.

        If one rank fails, the others raise its message, and the next call tries again.
        """
        if not self._bound:
            agree_on(f"zerofn.compile({self.program.name})", self._bind)
            self._bound = True

    def _bind(self) -> tuple[None, str]:
        if not hasattr(self, "buffers"):
            buffers = Buffers(self.program)
            buffers.bind(self.program.gm)
            self.buffers = buffers
        if not hasattr(self, "runner"):
            self.runner = self.backend.bind(self.program)
            self._closing = weakref.finalize(self, self.runner.close)
        return None, self._agreed  # again, because a rank that waits in vain later reports what the others had last

    def close(self) -> None:
        """Close the runner now, rather than when the entry is collected. Calling it again is harmless."""
        if hasattr(self, "_closing"):
            self._closing()

    def check_constants(self) -> None:
        """Raise if a tensor that the step closes over was changed: its values are part of the graph."""
        for constant, version in self._versions:
            if constant._version != version:
                raise RuntimeError(
                    f"{self.program.name}: a tensor of shape {tuple(constant.shape)} that the step closes "
                    "over was changed since capture; pass it in the state or the batch."
                )

    @property
    def wrote(self) -> bool:
        """Whether the last run may have written to its inputs."""
        return getattr(self.runner, "wrote", True)

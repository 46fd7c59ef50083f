"""One capture of a step: its program and, from its first run on, its memory and what runs it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from ..comm.agreement import agree_on
from ..graph.program import Program
from .backend import Backend, Runner
from .buffers import Buffers


class Entry:
    """A scheduled program. `constants`: the tensors that it closes over; `agreed`: what all ranks said of it at its
    capture. Until `bind` nothing is allocated for it."""

    buffers: Buffers
    runner: Runner

    def __init__(
        self, program: Program, donating: bool, constants: Sequence[Tensor], backend: Backend, agreed: str
    ) -> None:
        self.program, self.donating, self.backend, self._agreed = program, donating, backend, agreed
        self._versions = [(x, x._version) for x in constants]
        self._bound = False

    def bind(self) -> None:
        """Allocate its buffers and let the backend make its runner, once: all ranks must call it. One that fails makes
        the others raise its message, and the next call tries again."""
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
        return None, self._agreed  # again: a rank that waits in vain later tells what the others had last

    def close(self) -> None:
        """Have the runner closed now, rather than when the entry is collected. Again is fine."""
        if hasattr(self, "_closing"):
            self._closing()

    def check_constants(self) -> None:
        """Raise where a tensor that the step closes over was changed: its values are part of the graph."""
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

"""A step between its capture and its schedule."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..capture.between_ranks import NumberedStep
from ..graph.program import Program
from ._pipeline import Pipeline


class Captured(NamedTuple):
    """A step captured on this rank and not scheduled yet. `numbered`, `inputs`: what ranks compare of it."""

    program: Program
    constants: list[Tensor]
    numbered: NumberedStep
    inputs: str
    pipeline: Pipeline
    began: float

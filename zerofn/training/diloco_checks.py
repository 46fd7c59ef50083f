"""What `diloco` does not take."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..optim.base import GradientTransformation
from ..optim.torch_optimizers import advice, is_torchs
from ..sharding.wire import STOCHASTIC, Wire
from ..util.arguments import told
from ..util.by_identity import ByIdentity


def check_arguments(outer: Any, every: int, after: int, fragments: int, tau: int, mix: Any) -> None:
    """Raise `TypeError` or `ValueError` for what `diloco` does not take."""
    if is_torchs(outer):
        raise TypeError(f"diloco: outer must be a zerofn.optim.GradientTransformation, got {advice(outer)}")
    if outer is not None and not isinstance(outer, GradientTransformation):
        raise TypeError(
            f"diloco: outer must be a zerofn.optim.GradientTransformation such as optim.sgd(0.7, momentum=0.9, "
            f"nesterov=True), got {told(outer)}."
        )
    if outer is not None and outer.about.phase is not None:
        raise ValueError(
            f"diloco: outer={outer!r} averages gradients over ranks itself, but the outer gradient is already a mean "
            "over replicas. Write outer=optim.sgd(0.7, momentum=0.9, nesterov=True), and diloco(wire=...) to send "
            "fewer bytes."
        )
    if every < 1:
        raise ValueError(f"diloco: every={every} must be 1 or more inner steps. Write every=100, for example.")
    if every == 1 and tau:
        raise ValueError(
            "diloco: with every=1 replicas average after each step, so there is no further step during which a "
            f"transfer could run, but tau={tau} asks for one. Write tau=0, or every=100, for example."
        )
    if after < 0:
        raise ValueError(
            f"diloco: after={after} must be 0 or more: the number of steps at the start of the run in "
            "which all ranks average gradients."
        )
    if not 1 <= fragments <= every:
        raise ValueError(
            f"diloco: fragments={fragments} is impossible with every={every}, because each fragment is sent after a "
            f"different inner step. Write a number from 1 to {every}."
        )
    if not 0 <= tau < every:
        raise ValueError(
            f"diloco: tau={tau} is impossible with every={every}: a fragment that was sent must arrive before it is "
            f"sent again, {every} steps later. Write a number from 0 to {every - 1}, or a larger every."
        )
    if mix is not None and not (isinstance(mix, int | float) and 0 <= mix < 1):
        raise ValueError(
            f"diloco: mix={told(mix)} must be at least 0 and less than 1: the weight of a replica's own "
            "parameters in the mix."
        )
    if mix and not tau:
        raise ValueError(
            f"diloco: mix={mix} has no effect with tau=0, where all replicas wait for the average. Leave mix out."
        )


def check_form(form: Wire | None) -> None:
    """Raise `ValueError` for a form in which differences cannot be sent."""
    if form is not None and form.feedback:
        raise ValueError(
            "diloco: feedback=True works for gradients, but replicas send differences of parameters. Leave feedback "
            "out of diloco(wire=...)."
        )
    if form is not None and form.rounding == STOCHASTIC:
        raise ValueError(
            "diloco: rounding='stochastic' needs the random key of a step, but differences of parameters are sent "
            "between steps. Leave rounding out of diloco(wire=...)."
        )


def check_outer(who: str, outer: GradientTransformation, opt_state: Any) -> None:
    """Raise `ValueError` unless an outer optimizer has made a fragment's state, as far as its type says."""
    made = _kinds_of(ByIdentity(outer))
    if made is not None and _kinds(opt_state) != made:
        raise ValueError(
            f"{who}: the state has {_kinds(opt_state)}, from another outer optimizer; outer={outer!r} needs {made}. "
            "Use the outer optimizer that the run began with, or start a new run from its parameters: "
            "step.init(zerofn.shard(...))."
        )


@functools.lru_cache(maxsize=64)
def _kinds_of(outer: ByIdentity) -> str | None:
    """Name the types of the states that an optimizer makes; None for one that takes known leaves alone."""
    try:
        return _kinds(outer.value.init({"w": torch.zeros(1)}))
    except Exception:  # a user's function of leaves, such as labels by name
        return None


def _kinds(state: Any) -> str:
    """Name the types of an optimizer's state, or of its parts in a chain."""
    return ", ".join(map(_kinds, state)) if type(state) is tuple else type(state).__name__

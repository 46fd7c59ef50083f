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
            f"diloco: outer={outer!r} adds gradients over ranks itself, and the mean of differences is one gradient of "
            "all; write outer=optim.sgd(0.7, momentum=0.9, nesterov=True), and wire= for codes."
        )
    if every < 1:
        raise ValueError(f"diloco: every={every} inner steps are none; write every=100, for example.")
    if every == 1 and tau:
        raise ValueError(
            f"diloco: every=1 meets behind each step, which leaves no step for tau={tau} to hide a transfer behind; "
            "write tau=0 with it, or every=100, for example."
        )
    if after < 0:
        raise ValueError(f"diloco: after={after} must be the number of first steps that all ranks take together, or 0.")
    if not 1 <= fragments <= every:
        raise ValueError(
            f"diloco: fragments={fragments}: each is sent behind a step of its own, of which there are every={every}; "
            f"write a number from 1 to {every}."
        )
    if not 0 <= tau < every:
        raise ValueError(
            f"diloco: tau={tau}: what is sent must be used before it is sent again, every={every} steps later; write a "
            f"number from 0 to {every - 1}, or a larger every."
        )
    if mix is not None and not (isinstance(mix, int | float) and 0 <= mix < 1):
        raise ValueError(f"diloco: mix={told(mix)} must be a number from 0 to less than 1: a part of a replica's own.")
    if mix and not tau:
        raise ValueError(f"diloco: mix={mix} has no effect with tau=0, where all replicas wait; leave mix out.")


def check_form(form: Wire | None) -> None:
    """Raise `ValueError` for a form in which differences cannot be sent."""
    if form is not None and form.feedback:
        raise ValueError(
            "diloco: feedback=True is about gradients, and replicas send differences of parameters; leave feedback out "
            "of its wire."
        )
    if form is not None and form.rounding == STOCHASTIC:
        raise ValueError(
            "diloco: rounding='stochastic' needs the key of a step, and between steps, where differences are sent, "
            "there is none; leave rounding out of its wire."
        )


def check_outer(who: str, outer: GradientTransformation, opt_state: Any) -> None:
    """Raise `ValueError` unless an outer optimizer has made a fragment's state, as far as its type says."""
    made = _kinds_of(ByIdentity(outer))
    if made is not None and _kinds(opt_state) != made:
        raise ValueError(
            f"{who}: the state has {_kinds(opt_state)} of another outer optimizer, and outer={outer!r} keeps {made}; "
            "write the outer that the run began with, or begin anew from its parameters: step.init(zerofn.shard(...))."
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

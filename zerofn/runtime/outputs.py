"""What a compiled step returns: the values of its graph, as the step's own structure."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import tree
from ..graph.program import Program
from ..memory import donation
from ..offload.host_worker import worker
from ..sharding.sharded import is_sharded
from .inputs import Inputs


def returned(
    name: str, program: Program, donating: bool, outputs: list[Tensor], inputs: Inputs, state_leaves: list[Any]
) -> Any:
    """`(new state, aux)`, or what an evaluation step returns, of a graph's `outputs`.

    With `donating` the new state lies in the tensors of `inputs`, but for what `program.kept` names, and whoever uses
    the old one from here on, by a tensor or by a `Sharded` of `state_leaves`, is told why that cannot be.
    """
    if program.new_state is None:
        return program.aux.spread(outputs)
    if not donating:
        new, aux = outputs[: program.num_new], outputs[program.num_new :]
        return program.new_state.spread(new), program.aux.spread(aux)
    why = (
        f"This state was given to {name} and its memory belongs to the state it returned; use that "
        "one, or compile(..., donate=False)."
    )
    fresh = iter(outputs)
    kept = set(program.kept)
    new = [next(fresh) if j in kept else _taken_over(t, why) for j, t in enumerate(inputs.state)]
    full = {k: inputs.copies[a:b] for k, (a, b) in program.full.items()}
    state = program.new_state.spread(new, full, pending=True)
    worker().owe(lambda: filter(is_sharded, tree.leaves(state, is_leaf=is_sharded)))
    for x in state_leaves:
        if is_sharded(x):
            x.donate(why)
    return state, program.aux.spread(fresh)


def _taken_over(x: Tensor, why: str) -> Tensor:
    """Another tensor in the same memory; `x` itself is known by identity, so that others who hold it hear of it."""
    donation.give(x, why)
    return x.detach()

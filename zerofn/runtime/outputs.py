"""Turn the values of a step's graph into what the step returns."""

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
    """Return `(new state, aux)`, or the result of an evaluation step, from a graph's `outputs`.

    With `donating`, the new state takes over the memory of the tensors in `inputs`, except those that `program.kept`
    lists. Using the old state then raises an error, for its tensors and for the `Sharded` nodes in `state_leaves`.
    """
    if program.new_state is None:
        return program.aux.spread(outputs)
    if not donating:
        new, aux = outputs[: program.num_new], outputs[program.num_new :]
        return program.new_state.spread(new), program.aux.spread(aux)
    why = (
        f"This state was donated to {name}, and its memory belongs to the state that {name} returned. Use the returned "
        "state, which the compiled step also has as `.state`. To call the step twice with one state, as in a cell that "
        "is run again, pass zerofn.copy(state), or write compile(..., donate=False)."
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
    """Return a new tensor on the memory of `x`, and mark `x` as donated, with the reason `why`."""
    donation.give(x, why)
    return x.detach()

"""Mixture-of-experts layers with static shapes: functions for models of your own, and experts of transformers' models.

    def expert(p, rows):  # the parameters of one expert, and its rows
        return torch.relu(rows @ p["up"]) @ p["down"]

    y, aux = zerofn.moe.layer(params, x, torch.vmap(expert), k=2, capacity=1.25, axis="expert")
    loss = loss + 0.01 * aux.balance

`layer` is made of the other functions, each of which can be used by itself. `experts` is for models of transformers.

Words:

- *routing*: which experts get a token, with which weights (`routing.py`).
- *dispatch*, *combine*: send tokens to the ranks of their experts, and the outputs back (`exchange.py`).
- *capacity*: with 1.25, an expert accepts 1.25 times its fair share of a rank's tokens; further choices are dropped.

Along `expert` a rank has rows of its own and experts of its own. With a capacity, dispatch and combine are one
all-to-all each, of a fixed size; unused rows are zeros. Without one, routing must be ready for every token to choose
the same expert. So for unmodified models (`experts.py`) each rank all-gathers the tokens of all ranks, computes what
its experts add to them, and reduce-scatters the results. The buffers have tokens x ranks rows; an all-to-all with
padding would need tokens x experts.

Invariant: shapes do not depend on where tokens go, so the host never waits for a number.

Start reading: `layer.py`, then `exchange.py`.
"""

from typing import TYPE_CHECKING

from ..util.names import of_package
from .cuts import cuts
from .draws import gumbel, jitter
from .exchange import combine, dispatch, own
from .experts import dropped, experts
from .layer import Aux, layer, residual
from .losses import load_balance_loss, z_loss
from .routing import Routing, route

__all__ = [
    "Aux",
    "Routing",
    "combine",
    "cuts",
    "dispatch",
    "dropped",
    "experts",
    "gumbel",
    "jitter",
    "layer",
    "load_balance_loss",
    "own",
    "residual",
    "route",
    "z_loss",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)

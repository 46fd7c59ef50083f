"""Mixture-of-experts layers with static shapes: for models of your own, pure functions of tensors and trees; and
unmodified models of transformers, whose experts ranks share.

    def expert(p, rows):  # the parameters of one expert, and its rows
        return torch.relu(rows @ p["up"]) @ p["down"]

    y, aux = zerofn.moe.layer(params, x, torch.vmap(expert), k=2, capacity=1.25, axis="expert")
    loss = loss + 0.01 * aux.balance

`layer` is made of the other functions, each of which can be used by itself. `experts` is for models of transformers.
"""

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


def __dir__() -> list[str]:
    return list(__all__)

"""A torch optimizer that a user makes, as one transformation whose learning rates are set at every step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

import zerofn
from zerofn import optim

from .torch_optimizers import translated

ScalarOrSchedule = float | optim.Schedule  # `inject_hyperparams` looks for this name


class Groups:
    """The groups of a torch optimizer, which keeps its learning rates and schedulers, and nothing else.

    `source`: the method that made it, for errors. `tx`: their transformation. `learns(name)`: whether the optimizer
    has a parameter. Groups that differ in weight decay alone, which some have and the others have not, share their
    moments.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, source: str, clip: Any = None) -> None:
        self._optimizer, self._source = optimizer, source
        if not optimizer.param_groups:
            raise ValueError(f"{source} returned no optimizer, so nothing would be trained.")
        names = {id(p): name for name, p in module.named_parameters()}
        self._of: dict[str, int] = {}
        for k, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise ValueError(
                        f"{source}: group {k} has a tensor of shape {tuple(p.shape)} that is no parameter "
                        "of the module; make it an nn.Parameter of the module."
                    )
                self._of[names[id(p)]] = k
        self._options = [self._of_group(group) for group in optimizer.param_groups]
        self._shared = self._can_share()
        self._said: list[float] = []
        name = type(optimizer).__name__
        if self._shared:
            decay = next((x["weight_decay"] for x in self._options if x.get("weight_decay")), None)
            options = {**self._options[0], **({} if decay is None else {"weight_decay": decay})}
            tx = self._one(name, options, self._rates()[0], self._decays)
        else:
            each: dict[Hashable, Any] = {
                k: self._one(name, x, self._rates()[k], None) for k, x in enumerate(self._options)
            }
            tx = optim.multi_transform(each, lambda leaf: self._of.get(leaf.name, 0))
        self.tx = tx if clip is None else optim.chain(clip, tx)

    def learns(self, name: str) -> bool:
        """Whether the optimizer has the parameter of this name."""
        return name in self._of

    def _of_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {k: group[k] for k in self._optimizer.defaults if k != "lr"}

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _can_share(self) -> bool:
        decays = {x.get("weight_decay", 0.0) for x in self._options} - {0.0}
        others = [{k: v for k, v in x.items() if k != "weight_decay"} for x in self._options]
        return len(decays) <= 1 and all(x == others[0] for x in others) and len(set(self._rates())) == 1

    def _decays(self, leaf: optim.LeafInfo) -> bool:
        return bool(self._options[self._of.get(leaf.name, 0)].get("weight_decay"))

    @staticmethod
    def _one(name: str, options: Mapping[str, Any], rate: float, mask: Any) -> Any:
        def make(learning_rate: ScalarOrSchedule) -> Any:
            return translated(name, options, learning_rate, mask)

        return optim.inject_hyperparams(make)(rate)

    def with_rates(self, opt_state: Any) -> Any:
        """Return the transformation's state with the learning rates that the optimizer has now."""
        for k, (group, before) in enumerate(zip(self._optimizer.param_groups, self._options, strict=True)):
            changed = [key for key, value in self._of_group(group).items() if value != before[key]]
            if changed:
                raise ValueError(
                    f"optimizer {type(self._optimizer).__name__}: {changed[0]} of group {k} has changed from "
                    f"{before[changed[0]]} to {group[changed[0]]}; only learning rates may change while it trains. For "
                    "OneCycleLR and CyclicLR write cycle_momentum=False."
                )
        rates = self._rates()
        if rates == self._said:
            return opt_state
        if self._shared and len(set(rates)) > 1:
            raise ValueError(
                f"{self._source}: the groups began with one learning rate, so they share their moments, and now "
                f"have {rates}. Give them rates that differ a little from the start."
            )
        self._said = rates
        fresh = iter(rates)

        def one(x: Any) -> Any:
            return x.with_hyperparams(learning_rate=next(fresh)) if _is_injected(x) else x

        return zerofn.tree_map(one, opt_state, is_leaf=_is_injected)


def _is_injected(x: Any) -> bool:
    return isinstance(x, optim.InjectHyperparamsState)


def let_go(optimizer: torch.optim.Optimizer, placeholders: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in an optimizer's groups, by the ids of those that are there."""
    for group in optimizer.param_groups:
        group["params"] = [placeholders[id(p)] for p in group["params"]]

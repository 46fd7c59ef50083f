"""A torch optimizer that a user makes, as one transformation whose hyperparameters are set at every step."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

import zerofn
from zerofn import optim

from .carried_state import carried
from .changing_hyperparameters import can_change, changing, values_of
from .torch_optimizers import translated

ScalarOrSchedule = float | optim.Schedule  # `inject_hyperparams` looks for this name


class ParamGroups:
    """The groups of a torch optimizer, which keeps its hyperparameters and schedulers, and nothing else.

    `source`: the method that made it, for errors. `tx`: their transformation. `learns(name)`: whether the optimizer
    has a parameter. Groups that differ in weight decay alone, which some have and the others have not, share their
    moments. `others_too`: gradients of parameters that the optimizer does not have count in `clip`'s norm.

    `renewed(opt_state)` are the groups as the optimizer has them now. There a parameter that starts to be trained has
    moments and a count of its own, as in torch; so parameters of one group are apart if their counts differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        source: str,
        clip: Any = None,
        others_too: bool = False,
        before: ParamGroups | None = None,
    ) -> None:
        self._optimizer, self._source = optimizer, source
        if not isinstance(optimizer.state, NoMoments):
            _take_moments(optimizer, source)
        self._made_of = (module, source, clip, others_too)
        self._moments: dict[str, Any] = {}  # of parameters that were trained before: the state that has them
        self._changing: set[str] = set()  # options that have changed
        self._apart = False  # whether groups have changed that shared their moments
        if before is not None:
            self._moments, self._changing, self._apart = dict(before._moments), set(before._changing), before._apart
        if not optimizer.param_groups:
            raise ValueError(f"{source} returned no optimizer, so nothing would be trained.")
        names = {id(p): name for name, p in module.named_parameters()}
        self._of: dict[str, int] = {}
        for k, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise ValueError(
                        f"{source}: the optimizer's parameter group {k} has a tensor of shape {tuple(p.shape)} that is "
                        "not a parameter of the module. Make this tensor an nn.Parameter of the module."
                    )
                self._of[names[id(p)]] = k
        self._trained = [name for name, p in module.named_parameters() if p.requires_grad and name in self._of]
        self._seen = self._parameters()
        self._options = [self._of_group(group) for group in optimizer.param_groups]
        self._shared = self._can_share()
        self._labels: dict[str, Hashable] = {name: self._label(name) for name in self._trained}
        self._said: Any = None
        kind = type(optimizer)
        if self._shared:
            decay = next((x["weight_decay"] for x in self._options if x.get("weight_decay")), None)
            options = {**self._options[0], **({} if decay is None else {"weight_decay": decay})}
            tx = self._one(kind, options, self._values(0), self._decays)
        else:
            each = {x: self._one(kind, self._options[x[0]], self._values(x[0]), None) for x in self._used()}
            first = next(iter(each))
            tx = optim.multi_transform(each, lambda leaf: self._labels.get(leaf.name, first))
        if others_too and any(p.requires_grad and not self.learns(name) for name, p in module.named_parameters()):
            tx = optim.multi_transform({True: tx, False: optim.set_to_zero()}, lambda leaf: self.learns(leaf.name))
        self.tx = tx if clip is None else optim.chain(clip, tx)

    def check_of(self, optimizer: Any) -> None:
        """Raise `ValueError` if these are not the groups of an optimizer."""
        if optimizer is not self._optimizer:
            raise ValueError(
                f"the trainer's optimizer is not the one that {self._source} made. Change the groups of that "
                "optimizer, or start a new run."
            )

    def learns(self, name: str) -> bool:
        """Whether the optimizer has the parameter of this name."""
        return name in self._of

    def _label(self, name: str) -> Hashable:
        """Return a label for parameters of one group with one count of updates; None if all share their moments."""
        origins = list(dict.fromkeys(id(self._moments.get(x)) for x in self._trained))
        return None if self._shared else (self._of[name], origins.index(id(self._moments.get(name))))

    def _used(self) -> list[Any]:
        if not self._labels:
            raise ValueError(f"{self._source}: no parameter of the optimizer requires a gradient.")
        return sorted(set(self._labels.values()))

    def _parameters(self) -> list[tuple[list[nn.Parameter], list[bool]]]:
        """Return the parameters of each group, and which of them are trained."""
        return [(list(g["params"]), [p.requires_grad for p in g["params"]]) for g in self._optimizer.param_groups]

    def _are_seen(self) -> bool:
        """Whether groups have the parameters that they had, and the same are trained. Asked at every step."""
        groups = self._optimizer.param_groups
        return len(groups) == len(self._seen) and all(
            len(group["params"]) == len(params)
            and all(map(operator.is_, group["params"], params))
            and [p.requires_grad for p in params] == flags
            for group, (params, flags) in zip(groups, self._seen, strict=True)
        )

    def _of_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {k: group[k] for k in self._optimizer.defaults if k != "lr"}

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _values(self, k: int) -> dict[str, float]:
        """Return the hyperparameters of a group, those that may change."""
        group = self._optimizer.param_groups[k]
        return values_of(group) if self._changing else {"learning_rate": float(group["lr"])}

    def _can_share(self) -> bool:
        decays = {x.get("weight_decay", 0.0) for x in self._options} - {0.0}
        others = [{k: v for k, v in x.items() if k != "weight_decay"} for x in self._options]
        alike = len(decays) <= 1 and all(x == others[0] for x in others) and len(set(self._rates())) == 1
        origins = {id(self._moments.get(name)) for name in self._trained}
        return alike and len(origins) == 1 and not self._changing and not self._apart

    def _decays(self, leaf: optim.LeafInfo) -> bool:
        return bool(self._options[self._of.get(leaf.name, 0)].get("weight_decay"))

    def _one(self, kind: type, options: Mapping[str, Any], values: Mapping[str, float], mask: Any) -> Any:
        if self._changing:
            return optim.inject_hyperparams(changing(kind.__name__, options))(**values)

        def make(learning_rate: ScalarOrSchedule) -> Any:
            return translated(kind, options, learning_rate, mask)

        return optim.inject_hyperparams(make)(**values)

    # ---- what changes while it trains

    def has_changed(self) -> bool:
        """Whether `renewed` is due: the optimizer has other parameters, others are trained, or options have changed
        that were constants.
        """
        if not self._are_seen() or self._changed():
            return True
        return self._shared and len(set(self._rates())) > 1

    def _changed(self) -> set[str]:
        found: set[str] = set()
        for k, (group, before) in enumerate(zip(self._optimizer.param_groups, self._options, strict=True)):
            for key, value in self._of_group(group).items():
                if value == before[key] or key in self._changing:
                    continue
                if not can_change(type(self._optimizer).__name__, key):
                    raise ValueError(
                        f"optimizer {type(self._optimizer).__name__}: {key} of group {k} has changed from "
                        f"{before[key]} to {value}, but during training only learning rates, betas, momentum and "
                        "weight decay may change."
                    )
                found.add(key)
        return found

    def renewed(self, opt_state: Any) -> ParamGroups:
        """Return the groups as the optimizer has them now. `with_moments` of them takes the moments of this state."""
        found = self._by_label(opt_state)
        self._moments |= {name: found[self._labels[name]].inner_state for name in self._trained}
        same = len(self._seen) == len(self._optimizer.param_groups)
        self._changing |= self._changed() if same else set()
        self._apart |= len(set(self._rates())) > 1
        module, source, clip, others_too = self._made_of
        return ParamGroups(self._optimizer, module, source, clip, others_too, self)

    def with_moments(self, opt_state: Any) -> Any:
        """Return a state of `tx` with the moments of parameters that were trained before. All ranks must call it."""
        names: dict[Any, list[str]] = {}
        for name, label in self._labels.items():
            names.setdefault(label, []).append(name)

        def one(label: Any, x: Any) -> Any:
            return x._replace(inner_state=carried(x.inner_state, names[label], self._moments.get))

        new = self._map_labels(one, opt_state)
        self._moments = {name: x for name, x in self._moments.items() if name not in self._labels}
        return new

    def with_rates(self, opt_state: Any) -> Any:
        """Return the transformation's state with the hyperparameters that the optimizer has now."""
        said = [self._values(k) for k in range(len(self._optimizer.param_groups))]
        if said == self._said:
            return opt_state
        self._said = said
        return self._map_labels(lambda x, state: state.with_hyperparams(**said[0 if x is None else x[0]]), opt_state)

    def _by_label(self, opt_state: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        self._map_labels(lambda label, x: found.setdefault(label, x), opt_state)
        return found

    def _map_labels(self, function: Callable[[Any, Any], Any], opt_state: Any) -> Any:
        """Apply `function(label, its state)` to the states of all labels."""

        def is_mine(x: Any) -> bool:
            return isinstance(x, optim.InjectHyperparamsState) or (
                isinstance(x, optim.MultiTransformState) and not {True, False}.issuperset(x.inner_states)
            )

        def one(x: Any) -> Any:
            if isinstance(x, optim.InjectHyperparamsState):
                return function(None, x)
            if isinstance(x, optim.MultiTransformState):
                return optim.MultiTransformState({label: function(label, y) for label, y in x.inner_states.items()})
            return x

        return zerofn.tree_map(one, opt_state, is_leaf=is_mine)


class NoMoments(defaultdict[Any, Any]):
    """`optimizer.state` of an optimizer whose moments are in a state's shards: empty, and it takes none."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "optimizer.state is empty, because the moments are sharded. They are in the opt_state of trainer.sharded, "
            "or of trainer.strategy.state under Lightning. To reset them, start a new run."
        )

    __getitem__ = __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


def _take_moments(optimizer: torch.optim.Optimizer, source: str) -> None:
    """Leave an optimizer no state. Raises `ValueError` if it has already been used."""
    used = [x for x in optimizer.state.values() if float(x.get("step", 0)) > 0]
    if used:
        raise ValueError(
            f"{source}: the optimizer already has state for {len(used)} parameters, which would be lost. Pass a new "
            "optimizer. To continue with saved moments, resume from a checkpoint of the trainer."
        )
    optimizer.state = NoMoments()  # Adagrad's began with tensors of every parameter's size

    def before(_: Any, given: Mapping[str, Any]) -> None:
        if given["state"]:
            NoMoments._refuse(optimizer.state)  # type: ignore[arg-type]

    def after(_: Any) -> None:
        optimizer.state = NoMoments()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def let_go(optimizer: torch.optim.Optimizer, placeholders: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in an optimizer's groups, by the ids of those that are there."""
    for group in optimizer.param_groups:
        group["params"] = [placeholders[id(p)] for p in group["params"]]

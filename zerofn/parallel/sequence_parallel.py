"""Sequence parallelism: norms, residual additions and dropout compute on a rank's part of the tokens (Korthikanti et
al., "Reducing activation recomputation in large transformer models", arXiv:2205.05198).

Between sliced layers, a rank has a part of each sequence. An all-gather brings all tokens to a module with
column-sliced layers (attention, an MLP). A reduce-scatter leaves each rank its part after a row-sliced layer. The two
are transposes of each other, and together send as many bytes as one all-reduce. The backward pass gathers the tokens a
second time, so no rank stores all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..collectives.maps import AllGather, Concat, Linear, ReduceScatter, Take, Vary
from ..comm.mesh import Axis
from ..random.mode import draw_by_place, places_kept
from .cut_experts import CutExperts
from .heads import size_of_head
from .shared_inputs import with_varied_parameters

_TOKENS = -2  # the dim of tokens, of what layers hand on
_OUTPUTS = ("output_hidden_states", "output_router_logits", "output_attentions")


def refuse_outputs_of_layers(key: str, model: nn.Module) -> None:
    """Let a model raise `ValueError` if the caller asks for outputs of layers, since it has only parts of them. Raise
    it now if the model's config asks for them.
    """
    config, forward = getattr(model, "config", None), model.forward

    def check(asked: Mapping[str, Any]) -> None:
        for what in _OUTPUTS:
            if asked.get(what) or getattr(config, what, False):
                raise ValueError(
                    f"plan[{key!r}]='sequence_parallel': {what} is True, but each rank has only a part of the tokens "
                    f"between layers. Set {what} to False."
                )

    @functools.wraps(forward)
    def run(*args: Any, **inputs: Any) -> Any:
        check(inputs)
        return forward(*args, **inputs)

    check({})
    model.forward = run


class TokenRegion:
    """Consecutive layers, each of which passes its part of the tokens to the next."""

    def __init__(self, key: str, layers: Mapping[str, nn.Module], axis: Axis) -> None:
        self._key, self._layers, self._axis = key, layers, axis
        self._owners: dict[str, nn.Module] = {}
        self._free: set[str] = set()  # modules whose parameters need no map
        self._whole = 0  # how many tokens a sequence has, in the call that is running

    def has(self, name: str) -> bool:
        """Return whether a module is inside."""
        return any(name.startswith(f"{layer}.") for layer in self._layers)

    def linear(
        self, name: str, owner: nn.Module, forward: Callable[..., Any], how: Any, bias: Any
    ) -> Callable[..., Any]:
        """Return the forward of a sliced linear layer. `bias`: returns the bias that is added after it, if any."""
        self._free.add(name)
        if (how.input, how.output) == ("equal", "cut"):
            self._owners[name.rpartition(".")[0]] = owner
            return forward
        if (how.input, how.output) != ("cut", "sum"):
            raise ValueError(
                f"plan[{self._key!r}]='sequence_parallel': the linear layer {name} inside must be 'colwise', or be "
                "'rowwise' and follow a 'colwise' layer. Write one of these words for it."
            )

        def run(x: Tensor) -> Tensor:
            y = self._part_of_sum(forward(x), name)
            return y if bias is None else y + Linear.apply(Vary(self._axis), bias())[0]

        return run

    def _part_of_sum(self, y: Tensor, name: str) -> Tensor:
        if y.shape[_TOKENS] != self._whole:
            raise ValueError(
                f"{name}: with plan[{self._key!r}]='sequence_parallel', the layer's output must have all {self._whole} "
                f"tokens in dim {_TOKENS}, got {list(y.shape)}."
            )
        return Linear.apply(ReduceScatter(self._axis, dim=_TOKENS), y)[0]

    def close(self, cut: set[str], varied: set[str]) -> None:
        """Give all modules inside their maps. `cut`: parameters; `varied`: modules whose parameters vary already."""
        self._check_whole_parameters(cut, varied)
        for name, part in self._inside():
            below_owner = any(name == owner or name.startswith(f"{owner}.") for owner in self._owners)
            free = name in self._free or isinstance(part.forward, CutExperts)
            if not below_owner and not free and any(x is not None for x in part._parameters.values()):
                part.forward = with_varied_parameters(part, part.forward, self._axis)
        for owner in self._owners.values():
            owner.forward = self._of_whole(owner.forward)
        layers = list(self._layers.values())
        for layer in layers:
            layer.forward = self._of_parts(layer.forward, layer is layers[0], layer is layers[-1])

    def _inside(self) -> Iterator[tuple[str, nn.Module]]:
        for layer, module in self._layers.items():
            for below, part in module.named_modules():
                yield f"{layer}.{below}" if below else layer, part

    def _check_whole_parameters(self, cut: set[str], varied: set[str]) -> None:
        where = f"plan[{self._key!r}]='sequence_parallel'"
        if not self._owners and any(next(x.children(), None) is not None for x in self._layers.values()):
            raise ValueError(
                f"{where}: the layers contain no 'colwise' layer, before which tokens would be gathered. Add 'colwise' "
                "and 'rowwise' entries for their linear layers."
            )
        for name in self._owners.keys() & self._layers.keys():
            raise ValueError(
                f"{where}: {name} has 'colwise' layers as direct children, so {name} itself would get all tokens "
                "instead of a part. Move these layers into a submodule, such as an MLP."
            )
        for name, part in self._inside():
            owned = [x for x in self._owners if name == x or name.startswith(f"{x}.") or x.startswith(f"{name}.")]
            mixes = isinstance(part, nn.MultiheadAttention | nn.RNNBase | nn.Conv1d)
            if mixes or not owned and (hasattr(part, "is_causal") or size_of_head(part) > 1):
                raise ValueError(
                    f"{where}: {name} combines several tokens, but would get only a part of them. Add 'colwise' and "
                    "'rowwise' entries for its linear layers."
                )
            if not any(name == x or name.startswith(f"{x}.") for x in self._owners) or name in varied | self._free:
                continue
            for last in part._parameters:
                if f"{name}.{last}" not in cut:
                    raise ValueError(
                        f"{where}: {name}.{last} is not sliced, but other layers of its module are, so its gradient "
                        "would be counted once for each rank. Slice it, or write 'replicated_with_grad_allreduce' for "
                        f"{name}."
                    )

    def _of_whole(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a module with column-cut layers: it gets all tokens, which are not kept."""
        return _with_first(forward, lambda x: Linear.apply(AllGather(self._axis, dim=_TOKENS, kept=False), x)[0])

    def _of_parts(self, forward: Callable[..., Any], first: bool, last: bool) -> Callable[..., Any]:
        """Return the forward of a layer: the first one takes a part of the tokens, and the last one returns all."""

        def own(x: Tensor) -> Tensor:
            num, size = x.shape[_TOKENS], self._axis.size
            if first:
                if num % size:
                    raise ValueError(
                        f"plan[{self._key!r}]='sequence_parallel': {size} ranks along {self._axis.name!r} cannot "
                        f"divide sequences of {num} tokens equally. Pad them to {num + -num % size}, or shorten them."
                    )
                self._whole = num
                return _moved(Take(self._axis, (num // size,) * size), x)
            if num * size != self._whole:
                raise ValueError(
                    f"plan[{self._key!r}]='sequence_parallel': a layer got {num} tokens, but the layer before it "
                    f"returned {self._whole // size}. The layers must be called one after the other, each with the "
                    "output of the one before."
                )
            return x

        run = _with_own_draws(_with_first(forward, own), self._axis)
        if not last:
            return run

        @functools.wraps(forward)
        def with_all(*args: Any, **kwargs: Any) -> Any:
            out, size = run(*args, **kwargs), self._axis.size
            concat = Concat(self._axis, (self._whole // size,) * size)
            return (_moved(concat, out[0]), *out[1:]) if isinstance(out, tuple) else _moved(concat, out)

        return with_all


def _with_own_draws(forward: Callable[..., Any], axis: Axis) -> Callable[..., Any]:
    """Return a forward in which random draws differ between ranks, as each has a part of the tokens or a slice."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with places_kept():
            draw_by_place((axis.rank, axis.name))
            return forward(*args, **kwargs)

    return run


def _moved(op: Take | Concat, x: Tensor) -> Tensor:
    return Linear.apply(op, x.movedim(_TOKENS, -1))[0].movedim(-1, _TOKENS)


def _with_first(forward: Callable[..., Any], change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a forward whose first tensor is changed before."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return forward(change(args[0]), *args[1:], **kwargs)
        name = next((name for name, x in kwargs.items() if isinstance(x, Tensor)), None)
        name = "hidden_states" if "hidden_states" in kwargs else name
        if name is None:
            raise TypeError(
                "a layer for which the plan says 'sequence_parallel' was called without a tensor. Pass its input as an "
                "argument."
            )
        return forward(*args, **kwargs | {name: change(kwargs[name])})

    return run

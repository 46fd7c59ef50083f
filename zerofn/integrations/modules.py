"""Modules whose parameters are elsewhere: in shards, until a step or an evaluation needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from .deferred_values import writes


def is_shape_only(module: nn.Module) -> bool:
    """Whether any parameter has no value."""
    return any(p.is_meta for p in module.parameters())


def buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, whose parameters may have no values."""
    for part in module.modules():
        for name, x in list(part.named_buffers(recurse=False)):
            part._buffers[name] = x.to(device)


def places_of(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return parameter name -> [(module, attribute)]: all places of a tied one."""
    names = {id(p): name for name, p in module.named_parameters()}
    found: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for part in module.modules():
        for last, p in part._parameters.items():
            if p is not None:
                found[names[id(p)]].append((part, last))
    return found


def check_same_model(module: nn.Module, params: Any) -> None:
    """Raise `ValueError` if a state's parameters are not those of the module that is to get their values."""
    wanted = {name: tuple(p.shape) for name, p in module.named_parameters()}
    leaves = [leaf for unit in params.layout.units for leaf in unit.leaves]
    given = {leaf.name: leaf.whole for leaf in leaves}
    sliced = {leaf.name: leaf.shape for leaf in leaves}
    differing = [
        f"{name!r} is {wanted.get(name, 'not there')} in the first and {given.get(name, 'not there')} in the second"
        for name in (wanted | given)
        if wanted.get(name) not in (given.get(name), sliced.get(name))
    ]
    if differing:
        raise ValueError(
            f"{type(module).__name__}: the function that builds the model returned two different models: "
            f"{'; '.join(differing[:3])}{f'; and {len(differing) - 3} more' if len(differing) > 3 else ''}. It is "
            "called once for the shapes and once for the values, so it may not change its inputs, by popping an entry "
            "of a config for example. Start it with a copy: config = copy.deepcopy(config)."
        )


def check_memory(module: nn.Module) -> None:
    """Raise `ValueError` for parameters or buffers that share a part of their memory: each gets memory of its own.

    Note attributes that share a buffer's, of which `call_with` speaks if the step writes to the buffer.
    """
    spans: dict[int, list[tuple[int, int, str, Tensor]]] = {}  # by memory: (first element, last, name, tensor)
    named = [*module.named_parameters(), *((name, x) for name, x in module.named_buffers() if not x.is_sparse)]
    for name, x in named:
        if not x.is_meta and x.numel():
            first = int(x.storage_offset())
            last = first + sum((n - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
            spans.setdefault(x.untyped_storage()._cdata, []).append((first, last, name, x))
    for held in spans.values():
        held.sort(key=lambda span: span[:2])
        for (_, last, name, _), (first, _, other, _) in pairwise(held):
            if first <= last:
                raise ValueError(
                    f"{type(module).__name__}: {name!r} and {other!r} share memory, but are different tensors. Each "
                    "would get its own memory, and a write to one would not change the other. Make both names the same "
                    "tensor, or compute the second where it is used, such as self.q[0] in forward."
                )
    for prefix, part in module.named_modules():
        for attribute, x in vars(part).items():
            if isinstance(x, Tensor) and not x.is_meta and x.layout is torch.strided:
                for *_, owner in spans.get(x.untyped_storage()._cdata, ()):
                    owner._shared_with = _path(prefix, attribute)  # type: ignore[attr-defined]


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of the module has, such as batch norm's statistics, by name."""
    saved = module.state_dict(keep_vars=True).keys()
    return {name: x for name, x in module.named_buffers() if name in saved}


def keep_assigned(found: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Write to `buffers` what a call of a module has assigned to them: `found` are those that the module has after it.

    Raises `ValueError` for one of another shape.
    """
    for name in found.keys() & buffers.keys():
        x, before = found[name], buffers[name]
        if x is not before:
            if x.shape != before.shape:
                raise ValueError(
                    f"the step assigns a tensor of shape {tuple(x.shape)} to the buffer {name!r} of shape "
                    f"{tuple(before.shape)}, but a captured step cannot change shapes. Create the buffer with its "
                    "final shape."
                )
            before.copy_(x.detach())


def call_with(module: nn.Module, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """Return `module(*args, **kwargs)` with these parameters and buffers, by the names that it lists.

    As `functional_call`, which leaves the values in a module that is a part of another one under several names. Raises
    `ValueError` if a parameter is written to.
    """
    lent = {name: (values[name], _mark(values[name])) for name, _ in module.named_parameters() if name in values}
    made = {part: {last for last, x in _held(part) if x is not None} for part in module.modules()}
    buffers = [(n, values[n], _mark(values[n]), x) for n, x in module.named_buffers() if n in values]
    for x, _ in lent.values():
        x._is_param = True  # for `isinstance(x, nn.Parameter)`, and `get_parameter`, which asks it
    listed = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    named = {}
    for prefix, part in module.named_modules():  # each once
        for last, own in _held(part):
            if own is not None and listed[id(own)] in values:
                named[_path(prefix, last)] = values[listed[id(own)]]
    with _Unwritten({name: x for name, (x, _) in lent.items()}):
        try:
            found = functional_call(module, named, args, kwargs, tie_weights=False)
        finally:
            new = _let_go(module, made)
    if new:
        raise ValueError(
            f"the step creates {new!r}, a buffer or parameter that did not exist, or was None, before the step. Create "
            f'it with its shape in __init__: self.register_buffer("{new.rpartition(".")[2]}", torch.zeros(...)).'
        )
    for name, (x, before) in lent.items():
        if _mark(x) != before:
            _refuse_write(name)
    for name, x, before, mine in buffers:
        if (other := getattr(mine, "_shared_with", "")) and _mark(x) != before:
            raise ValueError(
                f"the step writes to the buffer {_own(name)!r}, whose memory the attribute {other!r} shares. The step "
                f"writes to the state's copy of the buffer, so {other!r} would keep its old values. Compute it from "
                "the buffer where it is used, such as self.q[0] in forward."
            )
    return found


def _held(part: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*part._parameters.items(), *part._buffers.items()]


def _path(prefix: str, last: str) -> str:
    return f"{prefix}.{last}" if prefix else last


def _let_go(module: nn.Module, before: Mapping[nn.Module, set[str]]) -> str:
    """Take from a module the parameters and buffers that were not there `before`. Return the name of one, or ""."""
    found = ""
    for prefix, part in module.named_modules():
        for last, x in _held(part):
            if x is not None and last not in before.get(part, ()):
                found = _own(_path(prefix, last))
                (part._buffers if last in part._buffers else part._parameters)[last] = None
    return found


def _own(name: str) -> str:
    """Return a name as the user's model has it."""
    return name.removeprefix("module.").removeprefix("model.")


def _refuse_write(name: str) -> NoReturn:
    raise ValueError(
        f"the step writes to the parameter {_own(name)!r}, or sets its requires_grad. Inside the step, only the "
        "optimizer may change parameters. Move these lines to on_step_begin of a TrainerCallback (transformers), or to "
        "on_train_batch_start (Lightning), where they work unchanged. Or make it a buffer."
    )


class _Unwritten(TorchFunctionMode):
    """Inside, to write to lent tensors, by name, or to parts of them, is an error at the line that does."""

    def __init__(self, lent: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._places: dict[int, list[tuple[int, str]]] = {}  # by memory: the leaves of a unit lie in one
        for name, x in lent.items():
            self._places.setdefault(x.untyped_storage()._cdata, []).append((int(x.storage_offset()), name))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.data.__set__ or (writes(func, kwargs) and func is not Tensor.requires_grad_):  # type: ignore[attr-defined]
            first = args[0] if args else None
            for x in (*(first if isinstance(first, list | tuple) else [first]), kwargs.get("out")):
                found = self._places.get(x.untyped_storage()._cdata) if isinstance(x, Tensor) else None
                if found is not None:
                    _refuse_write(max(place for place in found if place[0] <= x.storage_offset())[1])
        return func(*args, **kwargs)


def _mark(x: Tensor) -> tuple[Any, ...]:
    """Return what differs once a tensor was written to, or given other memory."""
    return x._version, x.untyped_storage()._cdata, x.requires_grad

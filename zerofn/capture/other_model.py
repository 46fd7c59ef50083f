"""A skeleton that is called with the parameters of another model than it is the skeleton of.

The function that builds a model is called by `skeleton`, and again for the state. If it changes what it reads (pops an
entry, counts), it gives another model at its second call, which would be found out by an error far away, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from .._torch_compat import LEND_PARAMETERS
from ..util.patches import Patches

_MOST = 3  # names in a message


def same_model(is_cut: bool) -> Patches:
    """Return a context in which a skeleton that gets the parameters of another model raises `ValueError`. `is_cut`:
    whether parameters may be slices of the skeleton's.
    """

    def checked(lend: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        @wraps(lend)
        def lends(module: nn.Module, parameters: Mapping[str, Any], **options: Any) -> Iterator[None]:
            own = dict(module.named_parameters(remove_duplicate=False))
            if not any(x.is_meta for x in own.values()):
                with lend(module, parameters, **options):
                    yield
                return
            others = list(_others(module, own, parameters, is_cut))
            if others:
                raise ValueError(_message(module, others))
            try:
                with lend(module, parameters, **options):
                    yield
            except RuntimeError as error:
                lacking = _lacking(own, parameters)
                if not lacking or "meta" not in str(error):
                    raise
                raise ValueError(_message(module, [f"the call does not pass {_some(lacking)}"])) from error

        return lends

    return Patches(lambda: [(*LEND_PARAMETERS, checked)])


def _others(module: nn.Module, own: Mapping[str, Tensor], given: Mapping[str, Any], is_cut: bool) -> Iterator[str]:
    known = own.keys() | {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if unknown := {name: x for name, x in given.items() if name not in known}:
        yield f"the call passes {_some(unknown)}, which it does not have"
    for name, x in given.items() if not is_cut else ():
        if name in own and own[name].is_meta and own[name].shape != x.shape:
            yield f"{name!r} is {tuple(own[name].shape)} in the skeleton and {tuple(x.shape)} in the call"


def _lacking(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Tensor]:
    tied = {id(own[name]) for name in given if name in own}  # of these, one name is enough
    return {name: x for name, x in own.items() if x.is_meta and id(x) not in tied}


def _some(named: Mapping[str, Tensor]) -> str:
    names = [f"{name!r} {tuple(x.shape)}" for name, x in named.items()]
    return f"{', '.join(names[:_MOST])}{f' and {len(names) - _MOST} more' if len(names) > _MOST else ''}"


def _message(module: nn.Module, others: list[str]) -> str:
    return (
        f"{type(module).__name__} is a skeleton, but was called with the parameters of a different model: "
        f"{'; '.join(others[:_MOST])}. The function that builds the model runs more than once, in "
        "zerofn.skeleton(build) and for the state, and must return the same model each time. So it may not change its "
        "inputs, by popping an entry of a config for example. Start it with a copy: config = copy.deepcopy(config)."
    )

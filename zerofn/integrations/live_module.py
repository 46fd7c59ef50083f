"""A module whose values are a state's: between steps its parameters and buffers are read and written as its own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import zerofn

from .modules import check_memory, check_same_model, places_of

log = logging.getLogger("zerofn")


class Live:
    """Gives a module the parameters and buffers of a `TrainState`.

        live = Live(module, lambda: self.state, self._take)
        live.settle()                    # before a step: the state has what was written to the module
        with live.in_step(): ...         # reading a parameter raises: the step is given them
        live.renew()                     # after it: the module has what the state has now

    `read() -> state`: `state.params` has the parameters by the module's names, and `state.extra` the buffers, if any.
    `take(state)`: takes a state that has what was written; its parameters are in the memory of those before, which
    raise from then on.

    Every parameter keeps its identity, so optimizers, lists and other modules that have it see the same. Shape, dtype,
    device and `requires_grad` need no communication. Any other use gathers the parameter's unit, on all ranks, and
    holds it until `settle`. All ranks must use the same parameters. A parameter that was replaced by another tensor
    gives its value to the state. Buffers share the state's memory.
    """

    def __init__(self, module: nn.Module, read: Callable[[], Any], take: Callable[[Any], None]) -> None:
        self.module, self._read, self._take = module, read, take
        self._values: dict[str, Tensor] = {}
        self._in_step = self._is_whole = self._told = False
        params = read().params
        check_same_model(module, params)
        check_memory(module)
        self.device = params.device
        dtypes = {leaf.name: unit.dtype for unit in params.layout.units for leaf in unit.leaves}
        given = dict(module.named_parameters())
        self._kinds = {name: (p.shape, dtypes[name]) for name, p in given.items()}
        self._places = places_of(module)
        self._buffers = {name: module.get_buffer(name) for name in read().extra or {}}
        self._owners = {name: _owner_of(module, name) for name in self._buffers}
        self.parameters = {name: _live(p, self, name) for name, p in given.items()}
        self._put(self.parameters)
        self.renew()

    def kind_of(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return a parameter's (shape, dtype)."""
        return self._kinds[name]

    def lost(self) -> None:
        """Look at the module: some of its parameters are live no longer, or another's."""
        self._in_place = False

    # ---- what the parameters ask for

    def value_of(self, name: str) -> Tensor:
        """Return a parameter's value, which is the same tensor until `settle`. All ranks must call it."""
        if self._in_step:
            raise RuntimeError(
                f"{type(self.module).__name__}: the step reads the parameter {name!r} from somewhere other than "
                "its module, such as a list that was made before. Read it as an attribute of its module."
            )
        if name not in self._values:
            with torch.no_grad(), torch.inference_mode(False), zerofn.because(self._alone(name)):
                found = zerofn.unshard(self._read().params, only=name.__eq__)
            self._values.update((k, x) for k, x in found.items() if x is not None and k not in self._values)
            self._tell(name, [x for x in found.values() if x is not None])
        return self._values[name]

    def _alone(self, name: str) -> str:
        return (
            f"the parameter {name!r} of {type(self.module).__name__} is read or written outside the step, which all "
            "ranks must do together. To read or save it on one rank, write `if trainer.is_global_zero:` inside of "
            "`with trainer.strategy.whole_model():`, which every rank enters; in transformers' Trainer, `if "
            "trainer.is_world_process_zero():` inside of `with trainer.whole_model():`. Write to it on every rank."
        )

    def _tell(self, name: str, unit: list[Tensor]) -> None:
        if self._told or zerofn.world_size() == 1:
            return
        self._told = True
        here, whole = (sum(x.numel() * x.element_size() for x in xs) for xs in (unit, self.parameters.values()))
        log.warning(
            "%s: %r was used outside the step. Its unit, %s of the module's %s, is gathered on every rank and stays in "
            "memory until the next step.", type(self.module).__name__, name, _bytes(here), _bytes(whole),
        )  # fmt: skip

    # ---- what its owner does

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside, a step runs."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def settle(self) -> None:
        """Give the state what was written to the module, and let go of what was gathered. All ranks must call it."""
        written = self._values
        replaced: dict[str, Any] = {}
        if self._is_whole:
            written = {name: self._checked(name, self._found(name)) for name in self._places}
        elif not (self._in_place and all(owner.get(last) is p for owner, last, p in self._seats)):
            replaced = {name: x for name in self._places if not self._is_mine(x := self._found(name))}
            written = {**written, **{name: self._checked(name, x) for name, x in replaced.items()}}
        if written:
            state = self._read()
            with zerofn.because(self._alone(next(iter(replaced or written)))):
                params = zerofn.load_state_dict(written, like=state.params, strict=False, donate=True)
            self._take(dataclasses.replace(state, params=params))
            self._values = written if self._is_whole else {}
        if replaced:
            self.parameters.update((name, _live(x, self, name)) for name, x in replaced.items())
        if replaced or not self._in_place:
            self._put(self.parameters)
        if assigned := self._assigned():
            state = self._read()
            self._take(dataclasses.replace(state, extra={**state.extra, **assigned}))
            self.renew()

    def _assigned(self) -> dict[str, Tensor]:
        """Return the buffers in whose place there is another tensor now."""
        extra, found = self._read().extra or {}, {}
        for name, mine in self._buffers.items():
            buffers, last = self._owners[name]
            new = buffers.get(last)
            if new is None:
                raise ValueError(
                    f"{type(self.module).__name__}: the buffer {name!r} was deleted. Write new values to it instead."
                )
            if new is not mine or new.data_ptr() != extra[name].data_ptr():
                found[name] = new.detach().to(extra[name].device, copy=True)
                self._buffers[name] = new
        return found

    def renew(self) -> None:
        """Let go of what was gathered, and give the module the state's buffers: the state has other values now."""
        self._values.clear()
        extra = self._read().extra or {}
        for name, x in self._buffers.items():
            x.data = extra[name]

    def part(self) -> None:
        """Keep the values of now: the owner turns to another module."""
        self.settle()
        state = self._read()
        self._read = lambda: state

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the module has plain parameters, on every rank; what is written to them goes to the state. All ranks
        must enter it. It takes the memory of the whole module, in the dtype of the master.
        """
        self.settle()
        with torch.no_grad(), torch.inference_mode(False):
            self._values = dict(zerofn.unshard(self._read().params))
        flags = {name: p.requires_grad for name, p in self.parameters.items()}
        self._put({name: nn.Parameter(x, requires_grad=flags[name]) for name, x in self._values.items()})
        self._is_whole = True
        try:
            yield
            self.settle()
            self._values = {}
        finally:
            self._is_whole = False
            self._put(self.parameters)

    def _is_mine(self, p: Any) -> bool:
        return isinstance(p, LiveParameter) and p._zerofn[0] is self

    def _found(self, name: str) -> Any:
        """Return what is in a parameter's place now."""
        (owner, last), *tied = self._places[name]
        found = owner._parameters.get(last)
        if any(other._parameters.get(x) is not found for other, x in tied):
            raise ValueError(
                f"{type(self.module).__name__}: {name!r} is one parameter with several names, and was replaced under "
                "one of them. Write new values to it instead, or replace it under all of its names."
            )
        return found

    def _checked(self, name: str, new: Tensor | None) -> Tensor:
        """Return the value of what has been put in a parameter's place."""
        mine = self._kinds[name]
        if new is None or (new.shape, new.dtype) != mine:
            what = "nothing" if new is None else f"{new.dtype} of shape {tuple(new.shape)}"
            raise ValueError(
                f"{type(self.module).__name__}: the parameter {name!r} is {mine[1]} of shape {tuple(mine[0])} in the "
                f"state, but was replaced by {what}. Shapes and dtypes of a state cannot change. For another model, "
                "make another trainer."
            )
        return new.detach()

    def _put(self, parameters: dict[str, nn.Parameter]) -> None:
        # A list that is compared in microseconds before every step.
        self._seats = [
            (owner._parameters, last, parameters[name])
            for name, places in self._places.items()
            for owner, last in places
        ]
        for owner, last, p in self._seats:
            owner[last] = p
        self._in_place = True


class LiveParameter(nn.Parameter):
    """A parameter whose value is in a state's shards."""

    _zerofn: tuple[Live, str]

    @staticmethod
    def __new__(cls, like: Tensor, live: Live, name: str) -> LiveParameter:
        """Return one with the shape, dtype and device of another parameter."""
        shape, dtype = live.kind_of(name)
        # What torch's pages on extending it give for tensors that wrap others; not private in spite of its name.
        made: LiveParameter = cls._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=live.device, requires_grad=like.requires_grad
        )
        made._zerofn = live, name
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def name(self) -> str:
        """Its name in the module."""
        return self._zerofn[1]

    @property
    def value(self) -> Tensor:
        """The tensor with its value."""
        live, name = self._zerofn
        return live.value_of(name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the values. What it writes in place stays the parameter."""
        lent: dict[int, Tensor] = {}

        def value(x: Any) -> Any:
            if not isinstance(x, LiveParameter):
                return x
            lent[id(x.value)] = x
            return x.value

        args, kwargs = zerofn.tree_map(value, (args, kwargs or {}))
        return zerofn.tree_map(lambda x: lent.get(id(x), x), func(*args, **kwargs))

    @property
    def data(self) -> Tensor:
        """The value, without a gradient."""
        return self.value.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if new is self:
            return
        if (new.shape, new.dtype, new.device) == (self.shape, self.dtype, self.device):
            self.value.copy_(new)
        else:  # as `module.half()` and `module.to(...)` do: a module of its own from now on
            plain = nn.Parameter(new.detach(), requires_grad=self.requires_grad)
            plain.grad = None if self.grad is None else self.grad.to(new)
            self._zerofn[0].lost()
            torch.utils.swap_tensors(self, plain)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.value.clone(), requires_grad=self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def register_hook(self, hook: Any) -> Any:
        """Refuse: no gradient of a parameter is outside of the step."""
        _refuse_hook(*self._zerofn)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Refuse: no gradient of a parameter is outside of the step."""
        _refuse_hook(*self._zerofn)

    def plain(self) -> nn.Parameter:
        """Return a plain parameter in the memory of its value."""
        return nn.Parameter(self.value, requires_grad=self.requires_grad)


def _live(p: nn.Parameter, live: Live, name: str) -> nn.Parameter:
    """Make a parameter live, if possible the same object, which optimizers and lists have."""
    p.grad = None
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        _refuse_hook(live, name)
    if isinstance(p, LiveParameter):
        p._zerofn[0].lost()
    made = LiveParameter(p, live, name)
    try:
        torch.utils.swap_tensors(p, made)
    except RuntimeError:  # something else holds its tensor: a graph, a weak reference
        return made
    return p


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name, those that are live as plain ones. All ranks must call it."""
    given = dict(module.named_parameters())
    return {name: p.plain() if isinstance(p, LiveParameter) else p for name, p in given.items()}


def _refuse_hook(live: Live, name: str) -> NoReturn:
    raise ValueError(
        f"{type(live.module).__name__}: the parameter {name!r} has a hook on its gradient, which would not be called, "
        "because gradients exist inside the compiled step only. To leave weights unchanged, write them back in a hook "
        "or a callback after the step."
    )


def is_live(module: nn.Module) -> bool:
    """Whether a module's parameters are in a state's shards."""
    return any(isinstance(p, LiveParameter) for p in module.parameters())


def _owner_of(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Return (the buffers among which one is, its name there)."""
    above, _, last = name.rpartition(".")
    return module.get_submodule(above)._buffers, last


def _bytes(n: int) -> str:
    return f"{n / 2**20:,.1f} MiB"


def _of_memory(name: str) -> Any:
    """Return a method that asks for a tensor's memory, which a parameter without values asks of its value."""

    def method(self: LiveParameter, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.data, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in ("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage"):
    setattr(LiveParameter, _name, _of_memory(_name))

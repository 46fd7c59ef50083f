"""Evaluate a module whose parameters are shards, as plain PyTorch: each block has its own while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zerofn

from ..live_module import Live
from ..modules import places_of

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Lender:
    """Lends a module its parameters, which are gathered, while a step of an evaluation runs.

    Units of blocks (what an `nn.ModuleList` holds, the outermost) are gathered when the block is called, and go after
    it. All else is gathered once, and held until `close`. All ranks must run the same blocks.

    A block that is called with gradients enabled has the module's own parameters, which are held until the next step:
    a graph has them, and `module.parameters()` lists them after the call, too.
    """

    def __init__(self, module: nn.Module, live: Live) -> None:
        self._module, self._live = module, live
        self._places = places_of(module)
        self._blocks = _blocks(module)
        self._params: Any = None  # those that were gathered
        self._held: dict[str, Tensor] = {}
        self._lent: dict[str, tuple[_Lent, int]] = {}  # name -> (what is lent, its version then)
        self._written: set[str] = set()  # in this step

    def close(self) -> None:
        """Let go of what is held."""
        self._params, self._held = None, {}

    @contextlib.contextmanager
    def lent(self, params: Any) -> Iterator[None]:
        """Inside, the module has these parameters."""
        by_block = self._names_by_block(params)
        self._written.clear()
        outside = by_block.pop("", set())
        if params is not self._params:
            self._params, self._held = params, self._gathered(params, outside)
        with contextlib.ExitStack() as stack:
            stack.callback(self._take_back, outside)
            self._put(self._held)
            for block, names in by_block.items():
                stack.enter_context(self._lent_when_called(block, params, names))
            yield

    def _names_by_block(self, params: Any) -> dict[str, set[str]]:
        alone = params.spec.is_whole or params.spec.stage < 3
        found: dict[str, set[str]] = {}
        for unit in params.layout.units:
            names = {leaf.name for leaf in unit.leaves}
            found.setdefault("" if alone else self._block_of(names), set()).update(names)
        return found

    def _block_of(self, names: set[str]) -> str:
        """Return the block that has all of these parameters, "" if none has."""
        owners = {path for name in names for path in self._blocks[name]}
        return owners.pop() if len(owners) == 1 else ""

    @staticmethod
    def _gathered(params: Any, names: set[str]) -> dict[str, Tensor]:
        if not names:
            return {}
        with torch.no_grad(), torch.inference_mode(False):
            found = zerofn.gather(params, only=names.__contains__)
        return {name: x for name, x in found.items() if x is not None}

    def _put(self, values: dict[str, Tensor]) -> None:
        with torch.inference_mode(False):
            for name, x in values.items():
                mine = self._live.parameters[name]
                lent = _Lent(x, requires_grad=mine.requires_grad)
                lent.grad = None if mine.grad is None else mine.grad.to(x.dtype)
                self._lent[name] = lent, lent._version
                for owner, last in self._places[name]:
                    owner._parameters[last] = lent

    def _take_back(self, names: set[str]) -> None:
        """Give the module its own parameters back, with what was written to the lent ones."""
        written = []
        for name in names & self._lent.keys():
            (lent, version), mine = self._lent.pop(name), self._live.parameters[name]
            for owner, last in self._places[name]:
                if owner._parameters.get(last) is lent:
                    owner._parameters[last] = mine
                else:  # a parameter of the step's own, which `Live` takes
                    self._written.add(name)
            if lent.requires_grad != mine.requires_grad:
                mine.requires_grad_(lent.requires_grad)
            mine.grad = None if lent.grad is None else lent.grad.to(mine.dtype)
            if lent._version != version:
                written.append((name, lent.detach(), mine))
        for name, value, mine in written:
            if mine.dtype != value.dtype:
                raise ValueError(
                    f"{type(self._module).__name__}: an evaluation step wrote to {name!r}, of which evaluation steps "
                    f"have a copy in {value.dtype}, but the module stores {name!r} in {mine.dtype}. Write to {name!r} "
                    "in a hook, such as on_validation_epoch_end."
                )
            mine.data.copy_(value)
            self._written.add(name)

    @contextlib.contextmanager
    def _lent_when_called(self, path: str, params: Any, names: set[str]) -> Iterator[None]:
        block = self._module.get_submodule(path)

        def before(*_: Any) -> None:
            if not torch.is_grad_enabled() and not names & self._written:
                self._put(self._gathered(params, names))

        def after(*_: Any) -> None:
            self._take_back(names)

        first = block.register_forward_pre_hook(before, prepend=True)
        last = block.register_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            first.remove()
            last.remove()
            self._take_back(names)


class _Lent(nn.Parameter):
    """A parameter whose version counts what is written to its `data`, too."""

    @property
    def data(self) -> Tensor:
        """The value, without a gradient."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if (new.shape, new.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"an evaluation step assigns data of {new.dtype} and shape {tuple(new.shape)} to a parameter of "
                f"{self.dtype} and shape {tuple(self.shape)}. Shapes and dtypes of a state cannot change. Change a "
                "copy: copy.deepcopy(self.layer)."
            )
        with torch.no_grad():
            self.copy_(new)


def _blocks(module: nn.Module) -> dict[str, set[str]]:
    """Return parameter name -> the paths of the outermost blocks that have it, "" where one lies outside of them."""
    names = {id(p): name for name, p in module.named_parameters()}
    found: dict[str, set[str]] = {name: set() for name in names.values()}

    def visit(part: nn.Module, path: str, block: str) -> None:
        for p in part._parameters.values():
            if p is not None:
                found[names[id(p)]].add(block)
        for name, child in part.named_children():
            below = f"{path}.{name}" if path else name
            starts = not block and isinstance(part, _LISTS)
            visit(child, below, below if starts else block)

    visit(module, "", "")
    return found

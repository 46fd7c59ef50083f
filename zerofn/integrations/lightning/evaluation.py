"""Evaluate a module whose parameters are shards, as plain PyTorch: each block has its own while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zerofn

from ..modules import places_of

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Lender:
    """Lends a module its parameters, which are gathered.

    Units of blocks (what an `nn.ModuleList` holds, the outermost) are gathered when the block is called, and go after
    it. All else is there from `open` to `close`. All ranks must run the same blocks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = places_of(module)
        self._blocks = _blocks(module)
        self._shapes = {name: getattr(owner, last) for name, owners in self._places.items() for owner, last in owners}
        self._open = contextlib.ExitStack()

    def open(self, params: Any, extra: dict[str, Tensor] | None) -> None:
        """Lend from these parameters, until `close`. `extra`: the module's buffers, which it has from now on."""
        self.close()
        for name, x in (extra or {}).items():
            above, _, last = name.rpartition(".")
            self._module.get_submodule(above)._buffers[last] = x
        alone = params.spec.is_whole or params.spec.stage < 3
        by_block: dict[str, set[str]] = {}
        for unit in params.layout.units:
            names = {leaf.name for leaf in unit.leaves}
            block = "" if alone else self._block_of(names)
            by_block.setdefault(block, set()).update(names)
        for block, names in by_block.items():
            if block:
                self._open.enter_context(self._lent_when_called(block, params, names))
            else:
                self._open.callback(self._take_back, names)
                self._lend(params, names)

    def close(self) -> None:
        """Leave the module the shapes of its parameters."""
        self._open.close()

    def _block_of(self, names: set[str]) -> str:
        """Return the block that has all of these parameters, "" if none has."""
        owners = {path for name in names for path in self._blocks[name]}
        return owners.pop() if len(owners) == 1 else ""

    def _lend(self, params: Any, names: set[str]) -> None:
        with torch.no_grad(), torch.inference_mode(False):
            for name, x in zerofn.gather(params, only=names.__contains__).items():
                if x is not None:
                    self._put(name, nn.Parameter(x, requires_grad=False))

    def _take_back(self, names: set[str]) -> None:
        for name in names:
            self._put(name, self._shapes[name])

    def _put(self, name: str, value: nn.Parameter) -> None:
        for owner, last in self._places[name]:
            owner._parameters[last] = value

    @contextlib.contextmanager
    def _lent_when_called(self, path: str, params: Any, names: set[str]) -> Iterator[None]:
        block = self._module.get_submodule(path)

        def before(*_: Any) -> None:
            self._lend(params, names)

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

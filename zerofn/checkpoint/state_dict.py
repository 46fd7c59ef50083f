"""`load_state_dict`: named tensors, in memory or behind a reader, into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..geometry.overlaps import Region
from ..job.agreement import together
from ..memory.turns import outside_steps
from ..util.arguments import checked
from .named_leaves import NamedLeaf
from .pretrained import fill
from .tensor_source import Read, Source

WHAT = "zerofn.load_state_dict"


class Readable(Protocol):
    """A tensor that is elsewhere, and is read by intervals."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    def read(self, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with the raveled tensor's elements from `start` on, cast to its dtype."""


T = TypeVar("T")


@checked()
@outside_steps(WHAT)
def load_state_dict(
    state_dict: Mapping[str, Tensor | Readable] | Callable[[], Mapping[str, Tensor | Readable]],
    like: T,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    donate: bool = False,
) -> T:
    """Return the tensors of a state dict, with the layout and dtypes of the tree `like` (`Sharded` or plain).

        params = load_state_dict(module.state_dict(), like=state.params)

    Every rank must call it, with the same tensors, or with a function that returns them; an error of this function on
    one rank, such as a missing file, is raised on all ranks. Values are tensors, or objects with `shape`, `dtype` and
    `read(start, into)`, which fills a 1-d tensor with the elements from `start` on. From such objects a rank reads only
    the intervals that it needs, and a few elements to compare with other ranks. `strict`, `rename` and errors are as in
    `load_safetensors`.

    `like` is not changed, unless `donate` is true: then values are written into its memory, and using it afterwards
    raises.

    >>> load_state_dict({"w": torch.ones(2)}, like={"w": torch.zeros(2)})
    {'w': tensor([1., 1.])}
    """
    found = state_dict if isinstance(state_dict, Mapping) else together(WHAT, state_dict)
    names = "\n".join(sorted(found))
    words = f"a state dict of {len(found)} tensors{', donated' if donate else ''}\n{names}"
    return fill(WHAT, lambda: _Named(found, rename), words, like, strict, donate)


class _Named(Source):
    """A source."""

    def __init__(self, state_dict: Mapping[str, Tensor | Readable], rename: Callable[[str], str | None] | None) -> None:
        self._values: dict[str, Tensor | Readable] = {}
        for name, value in state_dict.items():
            if not (isinstance(value, Tensor) or hasattr(value, "read")):
                raise TypeError(f"{WHAT}: {name!r} is a {type(value).__name__}, not a tensor. Leave it out.")
            new = name if rename is None else rename(name)
            if new in self._values:
                raise ValueError(
                    f"{WHAT}: two tensors would get the name {new!r}. Let rename return None for one of them."
                )
            if new is not None:
                self._values[new] = value
        self.leaves = {name: NamedLeaf(name, tuple(x.shape), x.dtype) for name, x in self._values.items()}

    def places(self, name: str) -> Iterable[tuple[Region, Read]]:
        """Yield the slices in which a leaf lies, and what reads each of them."""
        value = self._values[name]
        if not isinstance(value, Tensor):
            return [((), value.read)]
        flat = value.detach().reshape(-1)
        return [((), lambda start, into: into.copy_(flat[start : start + into.numel()]))]

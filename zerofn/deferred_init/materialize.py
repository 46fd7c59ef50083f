"""Run an initialisation function leaf by leaf, so that the whole of what it makes never exists at
once.

`record` runs the function without data (see `recording`); `Replay.run` executes the logged calls in
an order that holds little, and hands out each leaf when it is finished. The values are those of a
plain call under the same generator state, bit for bit, and the generators end in the same state:
random calls keep their order, also those whose values are overwritten later. All others move to
where they cost least: what is made from nothing (zeros for moments, constants) to its first use,
what reads a tensor that exists (a copy, a cast) to right behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import tree
from .._torch_compat import FakeTensor
from .call_log import BufferView, LoggedCall, closure, known
from .record import Recorder, recording
from .recording_text import described

Flatten = Callable[[Any], tuple[list[Any], Any]]


def record(init: Callable[[], Any], flatten: Flatten = tree.flatten) -> Replay:
    """Log what `init()` does with tensors, without computing anything.

    `init`: makes a pytree of tensors (parameters, moments, buffers) and other values, in any way that does not need
    the value of a random tensor. `flatten`: pytree -> (leaves, treedef); `treedef.unflatten(leaves)` is its inverse.

    No memory for tensors is used, and no generator advances. Everything else that `init` does (reading a file, drawing
    from NumPy's generator) happens now, and tensors that come from there stay alive until `Replay.run` has used them.

    Raises `RuntimeError`, which names the line, if `init` branches on a random value, uses tensors that cannot be
    replayed (sparse ones, subclasses, `torch.load` under the function), or seeds while drawing on a GPU; `TypeError` if
    a leaf is a module.

    >>> replay = record(lambda: {"w": torch.randn(2, 3), "name": "x"})
    >>> replay.output["name"], replay.output["w"].shape
    ('x', torch.Size([2, 3]))
    >>> _ = torch.manual_seed(0)
    >>> (leaf,) = replay.run()
    >>> _ = torch.manual_seed(0)
    >>> leaf[0], bool((leaf[1] == torch.randn(2, 3)).all())
    (0, True)
    """
    with recording() as recorder:
        leaves, treedef = flatten(init())
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.nn.Module):
                raise TypeError(
                    f"the initialisation function returned a module ({type(leaf).__name__}) as "
                    f"leaf {number}; return its tensors: dict(model.named_parameters())."
                )
        leaves = [recorder.as_fake(leaf) for leaf in leaves]
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, FakeTensor)]
        regions = [recorder.region(t) for t in tensors]
    fakes = iter(tensors)
    output = treedef.unflatten([next(fakes) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves])
    return Replay(output, tensors, recorder, regions)


class Replay:
    """A recorded initialisation.

    Attributes:
        output: what the function returned, with fake tensors (shape, dtype, device, no data) for
            tensors.
        leaves: those fake tensors, in the order of the `flatten` given to `record`.
    """

    def __init__(self, output: Any, leaves: list[torch.Tensor], recorder: Recorder, regions: list[BufferView]) -> None:
        self.output = output
        self.leaves = leaves
        self._calls = recorder.calls
        self._versions = recorder.versions
        self._regions = regions
        self._was_run = False

    def lines(self, names: Sequence[str]) -> list[str]:
        """Return what it draws and computes, in words, before it runs. `names`: of `leaves`.

        Two recordings with equal lines give equal values, if torch's default generators are in equal states.
        """
        return described(self._calls, self._versions, list(zip(names, self._regions, strict=True)))

    def run(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Execute, and yield (index into `leaves`, its tensor) as soon as a leaf has its final
        value.

        The tensor is the caller's alone, except that leaves which share memory (tied weights) come one after the other
        and still share it: copy, do not write. Random draws between two yields would come between those of the
        initialisation. It can run once, because it frees constants on the way. Raises `RuntimeError` at a second run.
        """
        if self._was_run:
            raise RuntimeError("this initialisation was replayed before, which freed its constants; record it again.")
        self._was_run = True
        return self._run()

    def _run(self) -> Iterator[tuple[int, torch.Tensor]]:
        leaves_of: dict[int, list[int]] = {}
        for leaf, region in enumerate(self._regions):
            leaves_of.setdefault(region.version, []).append(leaf)
        last_writes = [self._versions[v].last_write for v in leaves_of]
        order = schedule(self._calls, [w for w in last_writes if w is not None])
        last_use = {v: position for position, i in enumerate(order) for v in self._calls[i].versions}
        buffers: dict[int, torch.UntypedStorage | None] = {}
        for position, i in enumerate(order):
            call = self._calls[i]
            call.run(buffers, self._versions)
            for version in sorted(v for v in call.versions if last_use[v] == position):
                yield from self._hand_out(leaves_of.get(version, []), buffers.pop(version))
        for version, leaves in leaves_of.items():
            if version not in last_use:  # constants, and memory that was never written
                yield from self._hand_out(leaves, self._versions[version].take())

    def _hand_out(self, leaves: list[int], storage: torch.UntypedStorage | None) -> Iterator[tuple[int, torch.Tensor]]:
        tensors = [(leaf, self._regions[leaf].on(known(storage))) for leaf in reversed(leaves)]
        del storage  # the caller's alone from here
        while tensors:
            yield tensors.pop()


def schedule(calls: list[LoggedCall], results: list[int]) -> list[int]:
    """The calls that random draws and `results` need, in an order that keeps few buffers alive.

    Random calls stay in program order. A call that reads what a random call made runs as soon as it
    can; one that depends on none, when something needs it, or when what it reads has just been
    made."""
    kept = closure(calls, [i for i, call in enumerate(calls) if call.is_random] + results)
    return _Scheduler(calls, sorted(kept)).run(results)


class _Scheduler:
    """List scheduling over the calls in `kept`, which are in program order."""

    def __init__(self, calls: list[LoggedCall], kept: list[int]) -> None:
        self.calls = calls
        self.kept = kept
        self.deps: dict[int, list[int]] = {}
        self.users: dict[int, list[int]] = {i: [] for i in kept}
        self.depends_on_draws: dict[int, bool] = {}
        self.waits_for: dict[int, int] = {}  # how many calls are left before it should run
        self.order: list[int] = []
        self.done: set[int] = set()
        for i in kept:
            self._connect(i)

    def _connect(self, i: int) -> None:
        call = self.calls[i]
        self.deps[i] = sorted(d for d in call.value_deps | call.order_deps if d in self.users)
        self.depends_on_draws[i] = call.is_random or any(self.depends_on_draws[d] for d in call.value_deps)
        # Deterministic inputs are made when the others are there.
        waits_for = [d for d in self.deps[i] if self.depends_on_draws[d] or not self.depends_on_draws[i]]
        self.waits_for[i] = len(waits_for)
        for d in waits_for:
            self.users[d].append(i)

    def run(self, results: list[int]) -> list[int]:
        for i in [i for i in self.kept if self.calls[i].is_random] + results:
            ready = self._emit(i)
            while ready:
                for user in self._emit(heapq.heappop(ready)):
                    heapq.heappush(ready, user)
        return self.order

    def _emit(self, i: int) -> list[int]:
        """Append `i` after all it needs; return the calls that should now run too, as a heap."""
        ready: list[int] = []
        stack = [i]
        while stack:
            top = stack[-1]
            missing = [d for d in self.deps[top] if d not in self.done]
            if missing and top not in self.done:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if top in self.done:
                continue
            self.done.add(top)
            self.order.append(top)
            for user in self.users[top]:
                self.waits_for[user] -= 1
                if self.waits_for[user] == 0 and not self.calls[user].is_random:
                    heapq.heappush(ready, user)
        return ready

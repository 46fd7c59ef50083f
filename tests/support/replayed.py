"""A stand-in for a CUDA graph: it repeats what a step has called, with the memory and the numbers of the first time.

A number of the host that is baked in, an address that has changed and a draw with an old key show as wrong values.

`ZEROFN_RUNTIME=replayed pytest tests/...` runs any test so: every step is recorded at its first call.
"""

import contextlib
import operator

import pytest
import torch
from torch import Tensor
from torch.fx.node import map_arg

from zerofn._torch_compat import tree_leaves
from zerofn.lowering import cuda_graphs, segments
from zerofn.random.draws import draws_with_generators
from zerofn.runtime.backend import Eager
from zerofn.runtime.executor import Executor, callable_of


def record(gm, run, values, allocate, draws):
    """A `Recorder` of the host. As on a device, what is recorded has not been computed yet."""
    inputs = allocate(values)
    for x, value in zip(inputs, values, strict=True):
        if x is not value:  # a write would be a reason to capture the step again
            cuda_graphs.once(x).copy_(cuda_graphs.once(value))
    before = [cuda_graphs.once(x).clone() for x in inputs]
    calls, known, given = [], {}, iter(inputs)
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "get_attr":
                known[node] = operator.attrgetter(node.target)(gm)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = callable_of(node.target)(*args, **kwargs)
                calls.append((callable_of(node.target), args, kwargs, known[node]))
            else:
                results = list(map_arg(node.args[0], known.__getitem__))
        for x, value in zip(inputs, before, strict=True):
            if not torch.equal(cuda_graphs.once(x), value):
                cuda_graphs.once(x).copy_(value)

    def replay():
        draws.begin()
        with torch.no_grad(), draws_with_generators(draws.lend):
            for function, args, kwargs, there in calls:
                for old, new in zip(_tensors(there), _tensors(function(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    return results, replay


def _tensors(value):
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


@contextlib.contextmanager
def replayed():
    """Inside, the eager backend replays."""

    def bind(self, program, tick=None):
        return (
            Executor(program.gm, tick) if tick else cuda_graphs.Replayed(program, Executor(program.gm), record, "cpu")
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eager, "bind", bind)
        patch.setattr(cuda_graphs, "WARM_UP", 0)
        patch.setattr(segments, "FEW", 1)
        yield

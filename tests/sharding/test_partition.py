"""What `Partition` says for every row of its table: over which ranks a unit is stored, and its copy refreshed."""

import ast

import pytest
import torch

from tests.support.library import FILES, parse, room
from zerofn import Wire
from zerofn.comm.mesh import Axis, Mesh
from zerofn.sharding.partition import Partition


def mesh(**sizes):
    return Mesh(tuple(Axis(name, size, 0, f"fake {name}") for name, size in sizes.items()))


def names(axis):
    return axis and axis.name


@pytest.mark.parametrize(
    ("sizes", "asked", "stored", "of_experts", "copied", "shared"),
    [
        ({"data": 4}, {"stage": 0}, None, None, None, None),
        ({"data": 4}, {"stage": 1}, "data", "data", "data", None),
        ({"data": 4}, {"stage": 2}, "data", "data", "data", None),
        ({"data": 4}, {"stage": 3}, "data", "data", None, None),
        ({"replicate": 2, "data": 4}, {"stage": 3}, "data", "data", None, "replicate"),
        ({"replicate": 2, "data": 4}, {"stage": 1}, "data", "data", "data", "replicate"),
        (
            {"replicate": 2, "data": 4},
            {"stage": 3, "hpz": True},
            "data x replicate",
            "data x replicate",
            "replicate",
            None,
        ),
        ({"data": 4, "expert": 2, "context": 2}, {"stage": 2}, "data x expert x context", "data x context", None, None),
        ({"data": 1}, {"stage": 1}, "data", "data", None, None),
    ],
    ids=str,
)
def test_constructors(sizes, asked, stored, of_experts, copied, shared):
    found = Partition.zero(mesh(**sizes), **asked)
    assert found.stage == asked["stage"] and found.late == (asked["stage"] <= 1)
    assert [names(found.over(x)) if found.shard_over else None for x in (False, True)] == [stored, of_experts]
    assert names(found.shared_over) == shared
    if "expert" in sizes:  # the copy is of what the unit is cut over
        assert [found.copied_over(x) for x in (False, True)] == [found.over(x) for x in (False, True)]
    else:
        assert names(found.copied_over(experts=False)) == copied
    assert found.beside().stage == found.stage and hash(found)


def test_wire_and_dtypes():
    found = Partition.zero(mesh(data=2), precision="bf16", wire="bf16").precision
    assert (found.compute, found.wire) == (torch.bfloat16, Wire("bf16", "bf16"))


def positional(function):
    """The names of a function's positional arguments, but for the object or the class."""
    names = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def test_functions_take_few_positional_arguments():
    """Nine arguments in a row say nothing where they are read: what belongs together has a name."""
    found = {
        f"{module}.{x.name}": positional(x)
        for module in FILES
        if room(module) == "sharding"
        for x in ast.walk(parse(module))
        if isinstance(x, ast.FunctionDef) and len(positional(x)) > 4
    }
    assert found == {}

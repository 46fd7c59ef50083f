"""The examples in the library's docstrings give what they say, and every public name has one."""

import doctest
import importlib
import inspect

import pytest

from docs.reference import MODULES
from tests.support.library import FILES

# Public names without an example that runs in one process, each with the reason.
WITHOUT = {
    "zerofn.load_deepspeed": "reads a checkpoint that DeepSpeed wrote",
    "zerofn.plan": "captures a step for each row, which takes seconds; docs/plans.md runs it",
    "zerofn.run": "starts processes, which takes seconds",
    "zerofn.this_machine": "measures the machine for some seconds",
    "zerofn.collectives.LinearMap": "a protocol: the example of Linear implements it",
    "zerofn.moe.experts": "needs a model of transformers",
    "zerofn.parallel.context": "needs a model of transformers",
    "zerofn.parallel.pipe": "needs several ranks and captures a model",
    "zerofn.parallel.tensor": "needs a model of transformers",
    "zerofn.parallel.tiled_loss": "needs a model of transformers",
    "zerofn.passes.Context": "ZeroFn makes it for passes of two arguments",
    "zerofn.schedules.Kind": "a type, which has no docstring",
    "zerofn.schedules.NAMES": "a dict, which has no docstring; make's example looks a name up",
}


@pytest.mark.parametrize("module", [name for name, path in FILES.items() if ">>>" in path.read_text()])
def test_examples(module):
    failed, tried = doctest.testmod(importlib.import_module(module))  # what differs is printed
    assert tried and not failed


def test_every_public_name_has_an_example():
    """Its own, or one of its methods'."""
    found = set()
    for module in ["zerofn", *(f"zerofn.{x}" for x in MODULES)]:
        package = importlib.import_module(module)
        public = {f"{module}.{x}": getattr(package, x) for x in package.__all__}
        found |= {name for name, value in public.items() if not inspect.ismodule(value) and not _has_example(value)}
    assert found == set(WITHOUT)


def _has_example(value):
    methods = [x for x in vars(value).values() if inspect.isfunction(x)] if inspect.isclass(value) else []
    return any(">>>" in (inspect.getdoc(x) or "") for x in [value, *methods])

"""A pass is one function, in a file, a test, and a place in the list, of one name."""

import ast
import importlib
import re

import pytest

from tests.support.library import LIBRARY, ROOT, parse

# What the search over budgets shares with a pass, so that it chooses by the numbers by which the pass then acts.
SHARED_WITH_THE_SEARCH = {
    "hoist_gathers": {"hoistable"},
    "offload_activations": {"Stay", "stays"},
    "prefetch": {"UnitSource", "sources_in", "Bound", "Run", "early", "few_alive"},
    "reshard": {"uses_of_gathers", "num_others"},
    "tile_logits": {"Head", "heads_of"},
}


def pass_files():
    folder = LIBRARY / "passes"
    return [p.stem for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")]


@pytest.mark.parametrize("name", pass_files())
def test_a_pass_is_one_function_of_its_files_name(name):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = {n.name for n in parse(f"zerofn.passes.{name}").body if isinstance(n, kinds) and n.name[0] != "_"}
    assert public == {name} | SHARED_WITH_THE_SEARCH.get(name, set())


@pytest.mark.parametrize("name", pass_files())
def test_a_pass_stands_in_the_list(name):
    assert getattr(importlib.import_module(f"zerofn.passes.{name}"), name) in listed_passes()


@pytest.mark.parametrize("name", pass_files())
def test_a_pass_has_a_test_of_its_name(name):
    tests = ROOT / "tests" / "passes"
    assert (tests / f"test_{name}.py").exists() or (tests / name).is_dir(), f"write tests/passes/test_{name}.py"


def listed_passes():
    """The functions of all passes that some step runs."""
    standard = importlib.import_module("zerofn.passes").standard
    return [each.fn for donating in (True, False) for each in standard(donating)]


def test_the_room_lists_the_passes_in_their_order():
    module = importlib.import_module("zerofn.passes")
    listed = re.findall(r"^    (\w+) {2,}\S", module.__doc__, re.M)
    names = [[each.name for each in module.standard(donating)] for donating in (True, False)]
    assert [[x for x in listed if x in each] for each in names] == names
    assert set(listed) == {x for each in names for x in each}

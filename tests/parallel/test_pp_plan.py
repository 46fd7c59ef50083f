"""A model's own `pp_plan`: which parts its pipeline has, where names would say others."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.parallel.test_pipe import cuts_of
from zerofn.comm.mesh import Mesh
from zerofn.parallel import pipe


class Reader(nn.Module):
    """Whose names say nothing about its parts: the numbers in them are of layers inside."""

    def __init__(self, **plan):
        super().__init__()
        vars(self).update(plan)
        self.read = nn.Linear(4, 4)
        self.think = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.say = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.think(self.read(x))
        for step in self.steps:
            x = x + step(x).tanh()
        return self.say(self.norm(x))


PLANS = {
    "of modules": ({"read": 0, "think": 0, "steps.1": 0, "say": 0}, ["read", "think", "steps.1", "say"]),
    "with a list": ({"steps": 0, "read": 0}, ["read", "steps.0", "steps.1", "steps.2", "norm"]),
    "with one of two lists": ({"think": 0, "steps": 0, "norm": 0}, ["read", "steps.0", "steps.1", "steps.2", "norm"]),
}
GUESSED = ["read", "think.0", "think.2", "steps.0", "steps.1", "steps.2", "norm"]


def parts_of(model):
    def loss_fn(params, batch):
        return functional_call(model, params, (batch,)).square().mean()

    cuts = pipe(model, Mesh.planned({"pipe": 2}), loss_fn, torch.zeros(2, 4), schedule="1f1b")
    return [part for row in cuts.stages for part in row.parts]


@pytest.mark.part(plan=["of modules"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_decides(plan):
    names, parts = PLANS[plan]
    assert parts_of(zerofn.skeleton(lambda: Reader(pp_plan=names))) == parts


def test_without_a_plan_names_decide():
    assert parts_of(Reader()) == parts_of(Reader(pp_plan=None)) == parts_of(Reader(_pp_plan={})) == GUESSED


class Wrapper(nn.Module):
    """Passes attributes on, as peft's do: the names of a plan are then not its own modules'."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        return self.inner(x)


def test_the_plan_of_a_module_inside_has_its_names():
    names, parts = PLANS["with a list"]
    assert parts_of(Wrapper(Reader(_pp_plan=names))) == [f"inner.{x}" for x in parts]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3"])
def test_plans_of_transformers_are_what_names_say(name):
    found = [part for row in cuts_of(name, 2, schedule="1f1b").stages for part in row.parts]
    assert found == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]


def test_a_name_of_no_module_is_refused():
    with pytest.raises(
        ValueError, match="the pp_plan of Reader names 'step', but the model has no such module; did you mean"
    ):
        parts_of(Reader(pp_plan={"read": 0, "step": 0}))

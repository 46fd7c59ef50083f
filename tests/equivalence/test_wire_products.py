"""Coded transfers with what else a step can have: all stages have the same bits, and what is cut those of the uncut."""

import functools

import pytest
import torch

import zerofn
from benchmarks.mesh.training import trained as trained_on
from tests.support import pipe_steps
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from tests.support.some import some_of
from zerofn import optim

WIRE = zerofn.Wire(gather="int4", reduce="int8", block=128, smallest=0)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
KINDS = {
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "frozen": {"frozen": lambda name: name.startswith("3.")},
    "clipped": {"tx": CLIPPED},
    "whole leaves": {"tx": optim.muon(1e-2)},
    "factored": {"tx": optim.adafactor(1e-2)},
    "8-bit moments": {"tx": optim.adamw(1e-2, moments="8bit")},
    "compiled": {"backend": "inductor"},
}


def trained(stage, module, *, num_microbatches=1, steps=3, compiles=None, spoiled=None, **options):
    """(losses, parameters) of some steps; `spoiled`: the step in which rank 0 has an inf among its rows."""
    step = zerofn.compile(train_step_of(module, num_microbatches), **(compiles or {}))
    state, losses = state_of(module, stage, **{"wire": WIRE, **options}), []
    for k in range(steps):
        batch = batch_of(10 * k + zerofn.rank())
        if k == spoiled and zerofn.rank() == 0:
            batch = {name: x.index_fill(0, torch.tensor([0]), torch.inf) for name, x in batch.items()}
        state, aux = step(state, batch)
        losses.append(aux)
    return losses, zerofn.unshard(state.params)


def every_stage(kind):
    options = dict(KINDS[kind])
    options["compiles"] = {"backend": options.pop("backend")} if "backend" in options else None
    module = build(4, dropout=0.1)
    want = trained(0, module, **options)
    for stage in some_of((1, 2, 3), 2):
        assert_same_trees(trained(stage, module, **options), want, f"stage {stage}")
    for remat in some_of(("full", "auto"), "full"):
        more = {**(options["compiles"] or {}), "remat": remat}
        assert_same_trees(trained(3, module, **{**options, "compiles": more}), want, f"remat={remat!r}")
    assert not same(want[1], trained(3, module, **{**options, "wire": None})[1])


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.part(kind=["fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_has_the_same_bits(ranks, kind):
    ranks(2, every_stage, kind)


def skipped(precision):
    """An inf among a rank's rows is not finite behind its codes either: the step is skipped at every stage."""
    module, start = build(4), {k: p.detach() for k, p in build(4).named_parameters()}
    for stage in range(4):
        _, params = trained(stage, module, steps=1, spoiled=0, precision=precision)
        assert_same_trees(params, start, f"stage {stage}")
        _, params = trained(stage, module, steps=2, spoiled=0, precision=precision)
        assert not same(params, start)


@pytest.mark.whole
def test_a_step_with_an_inf_is_skipped(ranks):
    ranks(2, skipped, "fp16")


MESHES = [
    ("llama", {"tensor": 2, "data": 2}),
    ("llama", {"context": 2, "data": 2}),
    ("mixtral", {"expert": 2, "data": 2}),
]


def on_mesh(name, sizes, wire=WIRE):
    run, shards = functools.partial(trained_on, name, sizes), {"precision": "bf16", "wire": wire}
    want = run(0, shards=shards)[:2]
    for stage in (1, 3):
        assert_same_trees(run(stage, shards=shards)[:2], want, f"stage {stage}")
    assert not same(want[1], run(3, shards={"precision": "bf16"})[1])


def in_stages(wire=WIRE):
    """Which reduce once a step, and once a microbatch. A stage has nothing of other stages' units, so no codes."""
    for stage in (0, 3):
        given, more = pipe_steps.params(dtype=torch.float32), {"data": 2}
        found, want = pipe_steps.both("1f1b", 3, stage, given=given, shards={"wire": wire}, **more)
        assert_same_trees(found, want, f"stage {stage}")
        assert not same(want[1], pipe_steps.trained("1f1b", 3, stage, given=given, **more)[1])


@pytest.mark.whole
def test_pipelines_have_the_bits_of_the_uncut_step(ranks):
    ranks(4, in_stages)


@pytest.mark.whole  # half a minute each; the same transfers along data alone are compared above
@pytest.mark.parametrize(("name", "sizes"), MESHES, ids=str)
def test_along_other_axes_every_stage_has_the_same_bits(ranks, name, sizes):
    ranks(4, on_mesh, name, sizes)

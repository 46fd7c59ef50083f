"""Regions: the step with them has the bits of the step without them, and they are the same at every stage."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import captures_of
from tests.support.tiny_models import BUILDERS, batch
from zerofn import optim
from zerofn.graph.alias import is_view, writes
from zerofn.graph.nested import calls, graphs_of, is_region
from zerofn.graph.phase import phase_of
from zerofn.lowering.outline_regions import outline_regions
from zerofn.passes import Pass, before

OUTLINED = before("hide_sums", Pass(outline_regions, "body"))


@functools.cache
def model_of(name):
    torch.manual_seed(0)
    model = BUILDERS[name]().eval()
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "use_cache"):
            module.config.use_cache = False
    return model


def trained(name, stage=3, num_microbatches=1, passes=OUTLINED, precision=None, **options):
    """(what two steps leave, the step's plan, names of regions in order)"""
    model = model_of(name)
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=tx), stage=stage, precision=precision)

    @functools.partial(zerofn.compile, passes=passes, **options)
    def step(state, rows):
        def loss_fn(p, rows):
            logits = functional_call(model, {**p, **buffers}, kwargs=rows).logits.flatten(0, -2)
            return F.cross_entropy(logits.float(), torch.arange(len(logits)) % 3)

        vg = state.value_and_grad(loss_fn)
        loss, grads = (vg if num_microbatches == 1 else zerofn.accumulate(vg, num_microbatches))(rows)
        return state.apply_gradients(grads), loss

    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = {k: x.roll(rank, 0) for k, x in batch(name).items()}
    losses = []
    for _ in range(2):
        state, loss = step(state, rows)
        losses.append(loss)
    (entry,) = captures_of(step)
    found = [call for gm in graphs_of(entry.program.gm) for _, call in calls(gm) if is_region(call.body)]
    return (losses, zerofn.unshard(state.params)), step.lower(state, rows).memory(), found


WAYS = {
    "alone": {},
    "bf16": {"precision": "bf16"},
    "microbatches": {"num_microbatches": 2},
    "recomputed": {"remat": "full"},
    "not donated": {"donate": False},
}


@pytest.mark.parametrize(
    "name, way",
    [
        *((name, "alone") for name in BUILDERS),
        *(("llama", way) for way in WAYS if way != "alone"),
        ("t5", "recomputed"),
    ],
)
def test_bits_are_those_of_the_step_without_regions(name, way):
    plain, alone, none = trained(name, passes=None, **WAYS[way])
    found, planned, regions = trained(name, **WAYS[way])
    assert_same_trees(found, plain)
    assert regions and not none
    assert planned.total <= 1.05 * alone.total  # results lie beside inputs that an operation alone would write over


def on_ranks(name):
    found = {}
    for stage in range(4):
        for n in (1, 2):
            results, _, regions = trained(name, stage, n)
            assert_same_trees(results, trained(name, stage, n, passes=None)[0], f"stage {stage}")
            names = [call.body.meta["region"] for call in regions]
            assert names and names == found.setdefault(n, names), f"stage {stage}: other regions than at stage 0"
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_regions_are_the_same_at_every_stage(ranks, name):
    first, second = ranks(2, on_ranks, name)
    assert first == second


def test_regions_compute_and_do_nothing_else():
    for call in trained("t5")[2]:
        nodes = [x for x in call.body.graph.nodes if x.op == "call_function"]
        assert len(nodes) >= 2 and not any(map(writes, nodes))
        assert all(phase_of(x) in ("forward", "backward") for x in nodes)
        made = [x for x in call.results if not is_view(x)]
        assert len(set(made)) == len(call.results)


def test_layers_share_their_regions():
    names = [call.body.meta["region"] for call in trained("llama")[2]]
    assert len(set(names)) < len(names)

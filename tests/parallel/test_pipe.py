"""Leaves on stages of a pipeline: which ones, and that steps are those of plain torch in float64, cut or not."""

from functools import partial

import pytest
import torch
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import build, in_float64
from benchmarks.mesh.training import assert_same_training, batches, plain, trained
from tests.support.small_steps import batch_of, fake_ranks, scheduled, state_of, train_step_of
from tests.support.small_steps import build as build_layers
from zerofn.comm.mesh import Mesh
from zerofn.graph.fingerprint import fingerprint
from zerofn.parallel import pipe

CASES = [
    pytest.param("llama", {"pipe": 2}, 3, {"num_microbatches": 3}, marks=pytest.mark.whole),
    # the embedding is tied: it lies on both stages
    pytest.param("gpt2", {"pipe": 2, "tensor": 2}, 1, {}, marks=pytest.mark.whole),
    pytest.param("llama", {"pipe": 2}, 0, {}, marks=pytest.mark.whole),
    pytest.param("llama", {"pipe": 2, "replicate": 2}, 3, {"shards": {"hpz": False}}, marks=pytest.mark.whole),
    pytest.param("llama", {"pipe": 2, "context": 2}, 2, {}, marks=pytest.mark.whole),
    pytest.param("t5", {"pipe": 3}, 2, {"num_microbatches": 3}, marks=pytest.mark.whole),
    pytest.param("mixtral", {"pipe": 2, "expert": 2}, 3, {}, marks=pytest.mark.whole),
    pytest.param("bert", {"pipe": 2, "data": 2}, 2, {"num_microbatches": 2}, marks=pytest.mark.whole),
    pytest.param(
        "llama, 2 key heads", {"pipe": 2, "data": 2, "tensor": 2}, 3, {"num_microbatches": 2}, marks=pytest.mark.whole
    ),
]


def uncut(known):
    return [x for x in known if x.name != "cut_stages"]


@pytest.mark.parametrize(("name", "sizes", "stage", "options"), CASES, ids=str)
def test_models_are_those_of_plain_torch(ranks, name, sizes, stage, options):
    options = {"compiles": {"passes": uncut}, **options}
    found = ranks(torch.tensor(list(sizes.values())).prod().item(), partial(trained, **options), name, sizes, stage)
    assert_same_training(found, plain(name))


@pytest.mark.whole
def test_eager_steps_have_the_bits_of_captured_ones(ranks):
    train = partial(trained, num_microbatches=4)
    eager, captured = (ranks(2, train, "llama", {"pipe": 2}, 3, x) for x in (False, True))
    assert_same_training(captured, plain("llama"))
    for (a, x, _), (b, y, _) in zip(eager, captured, strict=True):
        assert a == b and all(torch.equal(x[k], y[k]) for k in x)
    held = [each[2] for each in captured]
    assert sum(held) < 2 * trained_alone()  # a rank has its own stage's leaves


def trained_alone():
    return trained("llama", {"data": 1}, 3)[2]


def cuts_of(name, num_ranks, **options):
    """The cuts of a model, and its own parameters' names."""
    with in_float64():
        model = zerofn.skeleton(partial(build, name))
        mesh = Mesh.planned({"pipe": num_ranks})
        loss_fn = lambda params, batch: functional_call(model, params, (), batch).loss  # noqa: E731
        return pipe(model, mesh, loss_fn, batches()[0], **options)


def stages(cuts, of):
    return {name: cut.stages for name, (*_, cut) in cuts.items() if of in name and len(cut.stages) > 1}


def test_parts_are_spread_in_the_order_of_their_use():
    cuts = cuts_of("llama, 4 layers", 3, schedule="1f1b")
    parts = [part for row in cuts.stages for part in row.parts]
    assert parts == ["model.embed_tokens", *(f"model.layers.{k}" for k in range(4)), "model.norm"]
    assert stages(cuts, "") == {}
    assert [row.rank for row in cuts.stages] == [0, 1, 2]
    assert {row.sent for row in cuts.stages[:-1]} == {12 * 24 * 24 * 8} == {row.returned for row in cuts.stages[1:]}
    work = [row.f + row.i + row.w for row in cuts.stages]
    assert max(work) <= 2 * min(work)  # of four blocks, two are on one rank
    assert "model.layers.3" in repr(cuts) and "a line of 3 ranks, schedule '1f1b'" in repr(cuts)


def test_parameters_that_several_stages_read_lie_on_each():
    found = cuts_of("t5", 2, schedule="interleaved")
    shared = {"shared.weight", *(f"{x}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for x in CODERS)}
    assert set(stages(found, "")) == shared
    assert set(stages(cuts_of("gpt2", 2, schedule="1f1b"), "")) == {"transformer.wte.weight"}


CODERS = ("encoder", "decoder")


def test_stages_may_be_named():
    cuts = cuts_of("llama", 2, schedule="1f1b", stages=["model.layers.1.mlp"])
    assert cuts["model.layers.1.self_attn.o_proj.weight"][0].stages == (0,)
    assert cuts["model.layers.1.mlp.down_proj.weight"][0].stages == (1,)


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize(
    ("num_ranks", "options", "sentence"),
    [
        (8, {"schedule": "1f1b"}, r"pipe=8: the model has 4 parts that may begin a stage \(model.embed_tokens \.\.\. "),
        (3, {"schedule": "zbv"}, "pipe=3: a V of 3 ranks with 2 stages each needs 6 parts, and the model has 4 parts"),
        (8, {}, "write pipe=4 or less"),
        (2, {"schedule": "1f1"}, "schedule='1f1' is not known; did you mean '1f1b'"),
        (2, {"microbatches": 0}, "microbatches must be at least 1, got 0"),
        (2, {"chunks": 2}, "chunks= needs one placement of stages, but schedule='auto' chooses"),
        (2, {"schedule": "zbv", "chunks": 3}, "schedule 'zbv' needs chunks=2, got 3"),
        (2, {"schedule": "1f1b", "stages": ["model.layer.1"]}, "did you mean 'model.layers.1'"),
        (2, {"schedule": "1f1b", "stages": []}, "a line of 2 ranks has 2 stages, so stages= needs 1 name.* Got 0"),
        (
            3,
            {"schedule": "1f1b", "stages": ["model.layers.1", "model.layers.0"]},
            "in the order in which the loss reads them, got",
        ),
    ],
)
def test_what_cannot_be_is_told(num_ranks, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        cuts_of("llama", num_ranks, **options)


def test_one_stage_is_no_pipeline():
    """No leaf is cut, and a step has the nodes, and the digest that ranks compare, of one without the axis."""
    assert cuts_of("llama", 1) == {}
    module, found = build_layers(), []
    with fake_ranks(2):
        for sizes in ({"data": 2}, {"pipe": 1, "data": 2}):
            state = state_of(module, 3, mesh=Mesh.make(**sizes))
            program = scheduled(train_step_of(module, 2), state, batch_of(), donating=True)
            found.append((program.gm.code, fingerprint(program)))
    assert found[0] == found[1]


def chosen(schedule):
    return trained("llama, 4 layers", {"pipe": 2}, 3, chosen={}, compiles={"schedule": schedule}, num_microbatches=3)


@pytest.mark.whole
def test_steps_take_the_schedule_of_their_cuts(ranks):
    assert_same_training(ranks(2, chosen, None), plain("llama, 4 layers"))


def another_placement():
    with pytest.raises((ValueError, RuntimeError), match="compile: schedule='gpipe' is for a line of 2 ranks, and the"):
        chosen("gpipe")


@pytest.mark.whole
def test_a_schedule_of_another_placement_is_refused(ranks):
    ranks(2, another_placement)
    with pytest.raises(ValueError, match="compile: schedule='1f1' is not known; did you mean '1f1b'"):
        zerofn.compile(lambda state, batch: state, schedule="1f1")

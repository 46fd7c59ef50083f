"""Pieces of a pipeline, run in one process, and the body that they are made of."""

import functools
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from benchmarks.mesh.float64_models import build as build_of_mesh
from tests.support.same import assert_same_trees
from tests.support.small_steps import WIDTH, batch_of, build, fake_ranks, gathers, loss_of
from tests.support.staged import Pipeline, layers_begin, staged
from zerofn.comm.mesh import Mesh
from zerofn.geometry import cuts as geometry
from zerofn.geometry.cuts import on_stages
from zerofn.graph import boundaries
from zerofn.graph.boundaries import holders
from zerofn.graph.cut import cut
from zerofn.graph.liveness import AGAIN
from zerofn.graph.node_kinds import is_start, wait_of
from zerofn.graph.segments import Segments
from zerofn.graph.stages import Stages
from zerofn.parallel import tensor
from zerofn.passes.recompute_activations import recompute_activations
from zerofn.schedules import Placement

ops = torch.ops.zerofn
ROUNDS = 3
_TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.02, "experts_implementation": "batched_mm"}


def _llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, **_HEADS))


def _gpt2():
    """Tied, with dropout."""
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=4, n_head=4))


def _t5():
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


def _mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_TEXT, **_HEADS, num_local_experts=4, **_AUX))


def _qwen2_moe():
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts_per_tok": 2}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_TEXT, **_HEADS, **sizes, num_experts=4, **_AUX))


def _bert():
    return hf.BertForMaskedLM(hf.BertConfig(**_TEXT, num_attention_heads=4))


def _vit():
    image = {"image_size": 16, "patch_size": 4, "num_attention_heads": 4, "num_labels": 3}
    return hf.ViTForImageClassification(hf.ViTConfig(**_TEXT_OF_IMAGES, **image))


_TEXT_OF_IMAGES = {k: v for k, v in _TEXT.items() if k != "vocab_size"}
MODELS = {
    "llama": _llama,
    "gpt2": _gpt2,
    "t5": _t5,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "bert": _bert,
    "vit": _vit,
}
SEVERAL = {"gpt2", "t5", "bert"}  # have a leaf on several stages


def _batch(name):
    generator = torch.Generator().manual_seed(7)
    if name == "vit":
        pixels = torch.randn(2 * ROUNDS, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.arange(2 * ROUNDS) % 3}
    ids = torch.randint(3, 96, (2 * ROUNDS, 8), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1)}


@functools.cache
def body_of(name, copy=""):
    """A model's step, captured with what it needs to run. `copy`: of which, if a test changes it."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    model.config.use_cache = False
    return staged(
        dict(model.named_parameters()),
        lambda params, batch: functional_call(model, params, (), dict(batch)).loss,
        _batch(name),
        ROUNDS,
    )


def layers_of(dropout=0.1, **options):
    module = build(4, dropout, torch.float64)
    batch = batch_of(rows=2 * ROUNDS, dtype=torch.float64)
    return staged(dict(module.named_parameters()), loss_of(module), batch, ROUNDS, **options)


def cut_of(body, count, split=True, layer=r"\.(\d+)\."):
    region = body.region()
    leaves = holders(region, layers_begin(body.names(), count, layer))
    return cut(region, leaves, count, range(count), split), leaves


def assert_pieces_are_the_body(body, count, split=True, layer=r"\.(\d+)\.", exact=True):
    found, leaves = cut_of(body, count, split, layer)
    here, there = body.fresh(), body.fresh()
    ours, theirs = Pipeline([here] * count, found.pieces, found.alike).run(), there.whole()
    assert_same_trees([*here.given.values()], [*there.given.values()])  # what the body writes to
    assert exact or any(len(x) > 1 for x in leaves.values())
    if exact:
        assert_same_trees(ours, theirs)
    else:
        for mine, other in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    for piece in found.pieces.values():
        piece.graph.graph.lint()
    return found


def crossings(found, count):
    """(values, bytes) that cross each boundary, with F and with I."""
    rows = []
    for s in range(1, count):
        for kind in "FI":
            across = [
                e for e in found.edges if e.kind == kind and min(e.source, e.target) < s <= max(e.source, e.target)
            ]
            values = {e.name: e.nbytes for e in across}
            rows.append((len(values), sum(values.values())))
    return rows


@pytest.mark.part(count=[3])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("split", [True, False])
def test_pieces_have_the_bits_of_the_body(count, split):
    found = assert_pieces_are_the_body(layers_of(), count, split, r"^(\d+)\.")
    assert crossings(found, count) == [(1, 256)] * (2 * count - 2)
    kinds = {(s, kind) for s in range(count) for kind in ("FIW" if split else "FB")} - {(0, "I")}
    assert set(found.pieces) == kinds


# What crosses the boundaries between two, three and four stages, one after the other: (values, bytes) with F, then with
# I. An activation has 4096 bytes, and router logits for the auxiliary loss 512. T5's encoder's output goes on to all
# stages of its decoder, and the gradient of a relative bias to the stage before.
ONE, IMAGE = (1, 4096), (1, 8704)
_EXPERTS = [[(3, 5120)] * 2, [(3, 5120)] * 2 + [(4, 5632)] * 2, [(2, 4608)] * 2 + [(3, 5120)] * 2 + [(4, 5632)] * 2]
CROSSES = {
    **dict.fromkeys(("llama", "gpt2", "bert"), [[ONE] * 2, [ONE] * 4, [ONE] * 6]),
    **dict.fromkeys(("mixtral", "qwen2_moe"), _EXPERTS),
    "vit": [[IMAGE] * 2, [IMAGE] * 4, [IMAGE] * 6],
    "t5": [[ONE] * 2, [ONE] * 2 + [(2, 8192)] * 2, [ONE] * 4 + [(2, 8192)] * 2],  # the encoder's output, too
}


@pytest.mark.part(name=["t5"], count=[2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("count", "split"), [(2, True), (3, False), (4, True)])
def test_pieces_of_models_have_the_bits_of_the_body(name, count, split):
    found = assert_pieces_are_the_body(body_of(name), count, split, exact=name not in SEVERAL)
    assert crossings(found, count) == CROSSES[name][count - 2]


@pytest.mark.part(name=["llama"], count=[3])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_boundary_is_where_the_fewest_bytes_cross(name, count, monkeypatch):
    found, leaves = cut_of(body_of(name), count)
    assert crossings(found, count) == CROSSES[name][count - 2]
    monkeypatch.setattr(boundaries, "bytes_across", lambda region: [0] * len(region.forward))
    anywhere = crossings(cut(body_of(name).region(), leaves, count, []), count)
    assert all(many >= few for many, few in zip(anywhere, crossings(found, count), strict=True))
    assert anywhere[0] > CROSSES[name][count - 2][0]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "more"), [("mixtral", (4, 13312)), ("gpt2", (3, 8448))])
def test_gradients_that_do_not_sink_cross_in_addition(name, more, monkeypatch):
    monkeypatch.setattr(Stages, "_sink", lambda stages: None)
    found, _ = cut_of(body_of(name), 2)
    assert crossings(found, 2)[1] == more


@pytest.mark.whole
def test_a_tied_leaf_has_a_term_on_both_of_its_stages():
    found, leaves = cut_of(body_of("gpt2"), 3)
    assert {k: v for k, v in found.terms.items() if len(v) > 1} == {"transformer.wte.weight": (0, 2)}
    assert leaves["transformer.wte.weight"] == (0, 2)
    assert sorted(len(x) for x in found.homes)[-2:] == [1, 2]


def test_where_nothing_below_trains_no_gradient_crosses():
    body = layers_of(frozen=lambda name: name[0] in "03")
    found = assert_pieces_are_the_body(body, 4, layer=r"^(\d+)\.")
    assert {(e.kind, e.source, e.target) for e in found.edges if e.kind == "I"} == {("I", 3, 2)}


def test_a_body_without_a_backward_pass_has_pieces_of_the_forward_pass():
    found, _ = cut_of(layers_of(frozen=lambda name: True), 3, layer=r"^(\d+)\.")
    assert set(found.pieces) == {(0, "F"), (1, "F"), (2, "F")}


def recomputed(body):
    """The same, where the backward pass computes all activations again."""
    dropped = frozenset(x.name for x in Segments(body.body.graph).activations)
    recompute_activations(body.body, SimpleNamespace(choice=SimpleNamespace(dropped=dropped)))
    assert any(x.meta.get(AGAIN) for x in body.body.graph.nodes)
    return body


@pytest.mark.parametrize("split", [True, False])
def test_what_is_computed_again_is_computed_where_it_is_read(split):
    found = assert_pieces_are_the_body(recomputed(layers_of()), 3, split, r"^(\d+)\.")
    assert crossings(found, 3) == [(1, 256)] * 4
    for (_, kind), piece in found.pieces.items():
        assert kind != "F" or not any(x.meta.get(AGAIN) for x in piece.graph.graph.nodes)


@pytest.mark.whole
def test_a_model_that_is_computed_again_sends_no_more():
    found = assert_pieces_are_the_body(recomputed(body_of("llama", "again")), 4)
    assert crossings(found, 4) == CROSSES["llama"][2]


def test_a_part_that_torch_computes_again():
    module, batch = build(4, 0.2, torch.float64), batch_of(rows=2 * ROUNDS, dtype=torch.float64)

    def loss_fn(params, batch):
        x = batch["x"]
        for k in range(0, len(module), 3):
            own = {name.removeprefix(f"{k}."): p for name, p in params.items() if name.startswith(f"{k}.")}
            part = lambda x, w, b: torch.nn.functional.dropout(torch.tanh(torch.nn.functional.linear(x, w, b)), 0.2)  # noqa: E731
            x = checkpoint(part, x, own["weight"], own["bias"], use_reentrant=False)
        return (x - batch["y"]).square().sum(), batch["y"].square().sum()

    body = staged(dict(module.named_parameters()), loss_fn, batch, ROUNDS)
    found = assert_pieces_are_the_body(body, 4, layer=r"^(\d+)\.")
    assert crossings(found, 4) == [(1, 256)] * 6


LINE = geometry.Pipeline(Placement("line", 2), "1f1b")


def on_a_mesh(rank, **sizes):
    """What a rank captures, each leaf of which lies on one of two stages; and where they are."""
    leaves = {f"{3 * k}.{x}": (k // 2,) for k in range(4) for x in ("weight", "bias")}
    with fake_ranks(2 * sizes.get("data", 1), rank):
        cuts = {name: (on_stages(LINE, 0, WIDTH, where),) for name, where in leaves.items()}
        return layers_of(sharded={"mesh": Mesh.make(pipe=2, **sizes), "cuts": cuts}), leaves


def assert_equal_units(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        length = min(mine.numel(), other.numel())  # units of one leaf are padded
        assert torch.equal(mine.flatten()[:length], other.flatten()[:length])


def test_ranks_with_their_own_stages_have_the_pieces_of_one_pipeline():
    (first, leaves), (second, _) = (on_a_mesh(rank) for rank in range(2))
    ours, theirs = (cut(body.region(), leaves, 2, [k]) for k, body in enumerate((first, second)))
    assert ours.edges == theirs.edges and ours.homes == theirs.homes
    found, whole = Pipeline([first, second], ours.pieces | theirs.pieces, ours.alike).run(), layers_of().whole()
    assert_equal_units(found[0], whole[0])
    for piece in (ours.pieces | theirs.pieces).values():
        assert not [x for x in piece.graph.graph.nodes if x.target in (ops.on_stage.default, ops.to_stage.default)]


def test_a_leaf_of_no_stage_has_its_gradient_where_it_is_used():
    """A scalar, which cannot lie on a stage alone, is on all ranks, and nothing marks its gradient."""
    module, batch = build(4, 0.1, torch.float64), batch_of(rows=2 * ROUNDS, dtype=torch.float64)
    params = {**dict(module.named_parameters()), "scale": torch.tensor(2.0, dtype=torch.float64)}

    def loss_fn(params, batch):
        own = {k: x for k, x in params.items() if k != "scale"}
        return (functional_call(module, own, (batch["x"] * params["scale"],)) - batch["y"]).square().mean()

    bodies = []
    for rank in range(2):
        with fake_ranks(2, rank):
            cuts = {k: (on_stages(LINE, 0, WIDTH, (int(k[0]) // 6,)),) for k in dict(module.named_parameters())}
            bodies.append(staged(params, loss_fn, batch, ROUNDS, sharded={"mesh": Mesh.make(pipe=2), "cuts": cuts}))
    leaves = {k: cut.holders for k, (cut,) in cuts.items()}
    ours, theirs = (cut(body.region(), leaves, 2, [k]) for k, body in enumerate(bodies))
    assert ours.edges == theirs.edges and ours.homes == theirs.homes and len(ours.edges) == 2
    found, whole = (
        Pipeline(bodies, ours.pieces | theirs.pieces, ours.alike).run(),
        staged(params, loss_fn, batch, ROUNDS).whole(),
    )
    assert_equal_units(found[0], whole[0])


def test_what_is_computed_of_weights_gathers_nothing():
    body, leaves = on_a_mesh(3, data=2)
    found = cut(body.region(), leaves, 2, [1])
    assert [len(gathers(found.pieces[1, kind].graph)) for kind in "FIW"] == [4, 2, 0]


@pytest.mark.whole
def test_layers_that_are_cut_have_their_sums_within_a_piece():
    """Two stages of two ranks each, which have slices of the layers: what the first of each captures."""
    params = {k: x.detach() for k, x in build_of_mesh("llama").named_parameters()}
    where = {k: (int("layers.1." in k or k.startswith(("lm_head", "model.norm"))),) for k in params}
    found = []
    for rank in (0, 2):
        with fake_ranks(4, rank):
            mesh, model = Mesh.make(pipe=2, tensor=2), build_of_mesh("llama")
            own = tensor(model, mesh)
            cuts = {
                k: (*([own[k]] if k in own else []), on_stages(LINE, 0, x.shape[0], where[k]))
                for k, x in params.items()
            }
            body = staged(
                params,
                lambda p, batch, model=model: functional_call(model, p, (), dict(batch)).loss,
                {"input_ids": torch.ones(2 * ROUNDS, 8, dtype=torch.int64), "labels": torch.ones(2 * ROUNDS, 8).long()},
                ROUNDS,
                sharded={"mesh": mesh, "cuts": cuts},
            )
        found.append(cut(body.region(), where, 2, [rank // 2]))
    assert found[0].edges == found[1].edges and len(found[0].edges) == 2
    for piece in (found[0].pieces | found[1].pieces).values():
        starts = [x for x in piece.graph.graph.nodes if is_start(x)]
        assert all(wait_of(x) for x in starts)
    assert any(is_start(x) for x in found[0].pieces[0, "F"].graph.graph.nodes)

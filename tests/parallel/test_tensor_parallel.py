"""Unmodified models with slices of their layers, beside plain torch in float64."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import SMALL, build
from benchmarks.mesh.training import assert_same_training, plain, trained
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import Cut
from zerofn.parallel import Slice, tensor

CASES = [
    ("llama", 3, {"tensor": 3}, 0),
    pytest.param("llama", 4, {"data": 2, "tensor": 2}, 1, marks=pytest.mark.whole),
    pytest.param("llama, 2 key heads", 4, {"tensor": 4}, 3, marks=pytest.mark.whole),
    pytest.param("llama, tied", 2, {"tensor": 2}, 3, marks=pytest.mark.whole),  # gpt2 is tied, too
    pytest.param("qwen3", 4, {"replicate": 2, "tensor": 2}, 2, marks=pytest.mark.whole),
    pytest.param("mixtral", 2, {"tensor": 2}, 3, marks=pytest.mark.whole),
    pytest.param("qwen3_moe", 3, {"data": 1, "tensor": 3}, 3, marks=pytest.mark.whole),
    pytest.param(
        "deepseek_v3", 2, {"tensor": 2}, 0, marks=pytest.mark.whole
    ),  # attention as in v2; moe/test_experts.py
    # Whose attention is cut, by its own plan; whose experts get tokens alone, sorted.
    pytest.param("deepseek_v2", 2, {"tensor": 2}, 3, marks=pytest.mark.whole),
    pytest.param("llama4", 2, {"tensor": 2}, 3, marks=pytest.mark.whole),
    pytest.param("gpt2", 2, {"tensor": 2}, 3, marks=pytest.mark.whole),
    pytest.param("gpt2", 3, {"tensor": 3}, 2, marks=pytest.mark.whole),
    pytest.param("t5", 2, {"tensor": 2}, 3, marks=pytest.mark.whole),
    pytest.param("t5", 3, {"tensor": 3}, 1, marks=pytest.mark.whole),
    pytest.param("bert", 2, {"tensor": 2}, 2, marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("name", "num_ranks", "sizes", "stage"), CASES)
def test_models_are_those_of_plain_torch(ranks, name, num_ranks, sizes, stage):
    assert_same_training(ranks(num_ranks, trained, name, sizes, stage), plain(name))


def test_eager_steps_have_the_bits_of_captured_ones(ranks):
    eager, captured = (ranks(2, trained, "llama", {"tensor": 2}, 3, x) for x in (False, True))
    assert_same_training(captured, plain("llama"))
    for (a, x, _), (b, y, _) in zip(eager, captured, strict=True):
        assert a == b and all(torch.equal(x[k], y[k]) for k in x)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.down(torch.tanh(self.up(x))))


def mlp():
    torch.manual_seed(0)
    return Mlp().double()


PLAN = {"up": "colwise", "down": "rowwise"}


def of_mlp(sizes):
    mesh = Mesh.make(**sizes)
    model = zerofn.skeleton(mlp)
    cuts = tensor(model, mesh, PLAN)
    params = zerofn.shard({"params": dict(mlp().named_parameters())}, mesh=mesh, cuts=cuts)["params"]
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)[mesh.batch.rank :: mesh.batch.size]

    def loss(p):
        return functional_call(model, zerofn.gather(p), (x,)).pow(3).mean()

    ones = zerofn.tree_map(torch.ones_like, params)
    product = torch.func.jvp(torch.func.grad(loss), (params,), (ones,))[1]
    return zerofn.unshard(product), zerofn.global_norm(product).item(), zerofn.leaf_norms(params)


@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, {"tensor": 2}), (4, {"data": 2, "tensor": 2})])
def test_hessian_vector_products_and_norms_are_those_of_whole_layers(ranks, num_ranks, sizes):
    model = mlp()
    params = {k: v.detach() for k, v in model.named_parameters()}
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    ones = {k: torch.ones_like(v) for k, v in params.items()}
    grad = torch.func.grad(lambda p: functional_call(model, p, (x,)).pow(3).mean())
    expected = torch.func.jvp(grad, (params,), (ones,))[1]
    norm = torch.nn.utils.get_total_norm(list(expected.values())).item()
    for found, length, norms in ranks(num_ranks, of_mlp, sizes):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-14)
        assert length == pytest.approx(norm, rel=1e-12)
        assert {k: v.item() for k, v in norms.items()} == pytest.approx(
            {k: v.norm().item() for k, v in params.items()}, rel=1e-12
        )


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


def words(dim):
    torch.manual_seed(0)
    return nn.Sequential(Scaled(11, 6, padding_idx=7), nn.Linear(6, dim)).double()


IDS = torch.tensor([[0, 7, 3], [10, 7, 5]])


def of_words(word, ranks_of_linear):
    mesh = Mesh.make(tensor=-1)
    model = zerofn.skeleton(partial(words, 4))
    cuts = tensor(model, mesh, {"0": word, "1": ranks_of_linear})
    params = zerofn.shard({"params": dict(words(4).named_parameters())}, mesh=mesh, cuts=cuts)["params"]
    loss, grads = zerofn.value_and_grad(lambda p, x: functional_call(model, p, (x,)).pow(3).mean())(params, IDS)
    return loss, zerofn.unshard(grads)


@pytest.mark.parametrize(
    ("num_ranks", "word", "linear"),
    [
        (2, "embedding_rowwise", "colwise_gather_output"),
        (3, "embedding_rowwise", "rowwise_split_input"),
        (2, "embedding_colwise", "colwise_rep"),
    ],
)
def test_an_embedding_keeps_its_scale_and_its_padding(ranks, num_ranks, word, linear):
    model = words(4)
    loss = model(IDS).pow(3).mean()
    loss.backward()
    assert not model[0].weight.grad[7].any()
    for mine, grads in ranks(num_ranks, of_words, word, linear):
        torch.testing.assert_close(mine, loss.detach(), rtol=1e-12, atol=0)
        for name, x in model.named_parameters():
            torch.testing.assert_close(grads[name], x.grad, rtol=1e-12, atol=1e-15)


def held(sizes):
    """How many elements of parameters a rank holds at stage 0."""
    mesh, build_it = Mesh.make(**sizes), partial(build, "llama")
    cuts = tensor(zerofn.skeleton(build_it), mesh) if mesh.size("tensor") > 1 else None
    state = zerofn.shard(lambda: {"params": dict(build_it().named_parameters())}, stage=0, mesh=mesh, cuts=cuts)
    return sum(x.numel() for x in state["params"].shards)


def test_slices_take_their_part_of_the_memory(ranks):
    """At stage 0 a rank holds its slices of all layers."""
    whole, half = ranks(1, held, {"data": 1, "tensor": 1})[0], ranks(2, held, {"tensor": 2})[0]
    assert half < 0.8 * whole  # units are padded to 2,048 elements, and norms are whole


ODD = transformers.LlamaConfig(**{**SMALL, "num_attention_heads": 3, "num_key_value_heads": 3}, intermediate_size=35)
OVERLAPPING = {"w": Cut("tensor", 0, 3, (((0, 2),), ((1, 3),)))}


TIED, UNALIKE = "llama, tied", {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise"}


def refusals():
    mesh = Mesh.make(tensor=2)
    bad = [
        (lambda: tensor(mlp(), mesh), "Mlp has no tp_plan. Pass plan="),
        (lambda: tensor(mlp(), mesh, {"upp": "colwise"}), r"plan\['upp'\] matches no module.*'up'"),
        (lambda: tensor(mlp(), mesh, {"up": "colwize"}), "'colwize' is not known; did you mean 'colwise'"),
        (lambda: tensor(mlp(), mesh, {"up": 3}), "expected a word of tp_plan or a zerofn.parallel.Slice, got a int"),
        (lambda: tensor(mlp(), mesh, {"up": "colwise", "u*": "colwise"}), "both match 'up'"),
        (lambda: tensor(mlp(), mesh, PLAN, attributes={"mid": {}}), r"attributes\['mid'\] matches no module"),
        (lambda: tensor(mlp(), Mesh.make(data=2), PLAN), "mesh has no axis 'tensor'"),
        (lambda: zerofn.shard({"params": {"w": torch.ones(3)}}, mesh=mesh), "no leaf is cut over it"),
        (lambda: tensor(transformers.LlamaForCausalLM(ODD), mesh), "q_proj: .*2 ranks cannot divide 3 heads"),
        (
            lambda: zerofn.shard({"params": {"w": torch.ones(3)}}, mesh=mesh, cuts=OVERLAPPING),
            "do not cover each of its 3",
        ),
        (lambda: tensor(build(TIED), mesh, {**UNALIKE, "model.embed_tokens": "replicate"}), "share the parameter"),
        (
            lambda: tensor(build(TIED), mesh, {"model.embed_tokens": "embedding_rowwise"}),
            "lm_head and .* share the parameter",
        ),
        (
            lambda: tensor(build(TIED), mesh, UNALIKE),
            "lm_head: the plan slices dim 0 of .* here, but dim 1 for another module",
        ),
        (
            lambda: tensor(mlp(), mesh, PLAN, attributes={"up": {"out_features": lambda n, ranks: n // ranks}}),
            "out_features is 9, which 2 ranks cannot divide equally",
        ),
        (lambda: Slice(0, output="whole"), "output='whole' is not known"),
        (lambda: tensor(mlp(), mesh, {"up": Slice(-2)}), "up: a layer .* along 'out' needs .*output='cut' or 'concat'"),
        (lambda: tensor(mlp(), mesh, {"up": Slice(1)}), "up: a layer .* along 'in' needs input='cut' or 'take'"),
        (lambda: tensor(mlp(), mesh, {"up": Slice(2)}), r"up: the weight .* is \[out, in\], and has no dim 2"),
    ]
    for call, message in bad:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    cuts = tensor(zerofn.skeleton(mlp), mesh, PLAN)
    with pytest.raises(ValueError, match="no parameter has this name"):
        zerofn.shard({"params": {"w": torch.ones(3)}}, mesh=mesh, cuts=cuts)


def test_mistakes_are_sentences(ranks):
    ranks(2, refusals)


def meeting_the_state(note, build=mlp):
    """A step that uses what slices compute, before their sum."""
    mesh = Mesh.make(tensor=2)
    model = zerofn.skeleton(build)
    cut = Slice(-1, input="cut") if note is not None else Slice(-1, output="cut", kind="plain")  # without its sum
    cuts = tensor(model, mesh, {"up": "colwise", "down": cut})

    def init_state():
        params = dict(build().named_parameters())
        extra = {} if note is None else {"norm": torch.zeros((), dtype=torch.float64)}
        return zerofn.TrainState.create(params=params, tx=zerofn.optim.sgd(0.1), extra=extra)

    def train_step(state, batch):
        _, grads = state.value_and_grad(lambda p, x: functional_call(model, p, (x,)).pow(3).mean())(batch)

        def extra(params):
            return {} if note is None else {"norm": note(zerofn.gather(params)["up.weight"].square().sum())}

        return state.apply_gradients(grads, extra=extra), None

    state = zerofn.shard(init_state, mesh=mesh, cuts=cuts)
    zerofn.compile(train_step)(state, torch.ones(4, 6, dtype=torch.float64))


def of_slices():
    with pytest.raises(
        zerofn.CaptureError, match=r"differs along 'tensor': .*'up.weight'.*psum\(x, 'tensor'\) sums the results of"
    ):
        meeting_the_state(None)
    with pytest.raises(zerofn.CaptureError, match=r"'extra.norm' is replicated.*computed from this rank's slices"):
        meeting_the_state(lambda x: x)
    meeting_the_state(lambda x: zerofn.collectives.psum(x, "tensor"))


class Skipping(Mlp):
    def forward(self, x):
        hidden, dropped = torch.tanh(self.up(x)), nn.functional.dropout(x)  # drawn where draws are for slices
        return self.norm(self.down(hidden) + dropped)


def skipping():
    torch.manual_seed(0)
    return Skipping().double()


def drawn_for_slices():
    with pytest.raises(zerofn.CaptureError, match="random key"):
        meeting_the_state(lambda x: zerofn.collectives.psum(x, "tensor"), skipping)


def test_what_is_drawn_for_slices_may_not_meet_what_is_whole(ranks):
    ranks(2, drawn_for_slices)


def test_what_slices_compute_may_not_meet_what_is_whole(ranks):
    ranks(2, of_slices)

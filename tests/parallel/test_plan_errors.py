"""Plans with a mistake: a sentence says where, what is needed, and what to write."""

import re

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import SMALL
from tests.support.small_steps import step_with
from zerofn.comm.mesh import Mesh
from zerofn.parallel import Slice, tensor

PLAN = {"up": "colwise", "down": "rowwise"}
FEATURES = torch.linspace(-1, 1, 40 * 6).view(4, 10, 6)
TOKENS = torch.arange(24).view(2, 12)


class Mlp(nn.Module):
    def __init__(self, between=None):
        super().__init__()
        self.up, self.down, self.norm, self.between = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6), between

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        hidden = hidden if self.between is None else self.between(hidden)
        return x + self.norm(self.down(hidden))


class OverChannels(nn.Module):
    """Convolutions or norms, which have channels before tokens."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.parts(x.transpose(1, 2)).transpose(1, 2)


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.alpha


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.qkv, self.out = 2, nn.Linear(6, 18), nn.Linear(6, 6)
        self.blocks = 1

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def plan_of(build, plan, x=FEATURES, loss=None, attributes=None):
    """Capture a step on two ranks that need not exist."""
    mesh = Mesh.planned({"tensor": 2})
    model = zerofn.skeleton(build)
    cuts = tensor(model, mesh, plan, attributes=attributes)

    def init_state():
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=zerofn.optim.sgd(0.1))

    def loss_fn(params, x):
        y = functional_call(model, params, (), x) if isinstance(x, dict) else functional_call(model, params, (x,))
        return y.pow(2).mean() if loss is None else loss(y, x)

    step = step_with(loss_fn)

    return zerofn.plan(step, init_state, x, mesh=mesh, cuts=cuts, stage=3, offload=None, precision=None, remat=None)


HEADS = {"attributes": {"": {"heads": lambda n, ranks: n // ranks}}}
IN_THE_FORWARD = {
    "columns without rows": (Mlp, {"up": "colwise"}, "down .Linear.: .*'up' leaves 4 of its 8 .*'rowwise' for 'down'"),
    "rows without columns": (
        Mlp,
        {"down": "rowwise"},
        "down .Linear.: .*needs a slice of the features, but it got all.*'rowwise_split_input' for",
    ),
    "columns twice": (
        Mlp,
        {"up": "colwise", "down": "colwise"},
        "needs all features, but got a slice.*'rowwise' for 'down'",
    ),
    "a norm behind": (Mlp, {"down": "colwise"}, "norm .LayerNorm.: .*'colwise_gather_output' for 'down'"),
    "a layer between": (lambda: Mlp(nn.Linear(8, 8)), PLAN, "between .Linear.: .*'rowwise' for 'between'"),
    "a norm between": (lambda: Mlp(nn.RMSNorm(8)), PLAN, "between .RMSNorm.: .*needs all.*'rowwise_split"),
    "batch norm between": (lambda: Mlp(OverChannels(nn.BatchNorm1d(8))), PLAN, "between.parts.0 .BatchNorm1d.: .*'up'"),
    "a scale between": (lambda: Mlp(Scaled(8)), PLAN, "between .Scaled. at .*x . self.alpha.: .*'up' leaves 4"),
    "heads of all ranks": (
        Attention,
        {"qkv": "colwise", "out": "rowwise"},
        r"Attention .*unflatten\(-1, \(2, 3\).*'qkv'",
    ),
    "a parameter of a norm": (Mlp, PLAN | {"norm.weight": "colwise"}, "norm .LayerNorm.: .*The plan slices its weight"),
}


@pytest.mark.parametrize("case", IN_THE_FORWARD)
def test_what_slices_run_into_is_a_sentence_of_the_plan(case):
    build, plan, message = IN_THE_FORWARD[case]
    more = HEADS if build is Attention else {}
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        plan_of(build, plan, **more)


TWO_CONVOLUTIONS = (lambda: OverChannels(nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(8, 6, 3, padding=1)),)


@pytest.mark.parametrize(
    ("build", "plan", "message"),
    [
        (Whole, {"attention.out_proj": "rowwise"}, "attention: nn.MultiheadAttention computes with all of its weights"),
        (Whole, {"attention.in_proj_weight": Slice(0, parts=3)}, "attention: nn.MultiheadAttention"),
        (Whole, {"attention": "colwise"}, "attention: nn.MultiheadAttention"),
        (*TWO_CONVOLUTIONS, {"parts.0": "colwise"}, r"parts.0: expected a linear layer .*\[8, 6, 3\] of Conv1d"),
        (Mlp, {"norm": "colwise"}, r"norm: expected a linear layer .*\[6\] of LayerNorm"),
        (lambda: nn.Embedding(4, 6), {"": "colwise"}, "matches no module"),
        (lambda: nn.Sequential(nn.Embedding(4, 6)), {"0": "colwise"}, "0: Embedding is an embedding, .*'embedding_row"),
        (
            lambda: nn.Sequential(nn.Linear(4, 6)),
            {"0": "embedding_rowwise"},
            "0: Linear is a linear layer, .*'colwise'",
        ),
    ],
)
def test_a_module_of_another_kind_is_refused_before_it_runs(build, plan, message):
    with pytest.raises(ValueError, match=message):
        tensor(zerofn.skeleton(build), Mesh.planned({"tensor": 2}), plan)


def test_another_error_of_a_model_stays_as_it_is():
    class Unfit(Mlp):
        def forward(self, x):
            return super().forward(x) @ x

    with pytest.raises(RuntimeError, match="Expected size|must match|batch1|shapes|got") as found:
        plan_of(Unfit, PLAN)
    assert type(found.value) is RuntimeError


def test_an_eager_forward_says_it_too():
    model = zerofn.skeleton(Mlp)
    tensor(model, Mesh.planned({"tensor": 2}), {"up": "colwise"})
    slices = {k: x[: len(x) // 2] if k.startswith("up") else x for k, x in Mlp().named_parameters()}
    with pytest.raises(ValueError, match="down .Linear.: .*'up' leaves 4 of its 8"):
        functional_call(model, slices, (FEATURES,))


def test_an_mlp_beside_heads_is_told_from_attention():
    class Layer(Mlp):
        num_heads = 0

        def __init__(self):
            super().__init__()
            self.num_heads = 2

    with pytest.raises(ValueError, match=r"\('up', 'down'\).*are not, as in an MLP, .*lambda heads, ranks: heads\."):
        plan_of(Layer, PLAN)
    plan_of(Layer, PLAN, attributes={"": {"num_heads": lambda heads, ranks: heads}})


APERTUS = {**SMALL, "intermediate_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6}


def apertus():
    return transformers.ApertusForCausalLM(transformers.ApertusConfig(**APERTUS))


@pytest.mark.whole  # test_check_plan.py names it, too
def test_a_parameter_between_layers_that_are_cut_is_named_with_its_word():
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    word = "'model.layers.*.mlp.act_fn': 'replicated_with_grad_allreduce'"
    with pytest.raises(zerofn.CaptureError, match=rf"'model.layers.0.mlp.act_fn.alpha_.'.*Write {re.escape(word)}"):
        plan_of(apertus, None, batch, lambda y, _: y.loss)
    own = zerofn.skeleton(apertus).tp_plan
    mended = own | {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}
    plan_of(apertus, mended, batch, lambda y, _: y.loss)

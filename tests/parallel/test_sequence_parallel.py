"""Layers with parts of the tokens, and heads with parts of the vocabulary, beside plain torch in float64."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import SMALL
from benchmarks.mesh.training import assert_same_training, cuts_of, plain, trained
from tests.support.small_steps import step_with
from zerofn.comm.mesh import Mesh
from zerofn.parallel import tensor

CASES = [
    ("llama", {"tensor": 2}, 3, {}),
    pytest.param("llama, 2 key heads", {"tensor": 4}, 0, {}, marks=pytest.mark.whole),
    pytest.param("qwen3", {"tensor": 3}, 1, {}, marks=pytest.mark.whole),
    pytest.param("gpt2", {"tensor": 2}, 2, {}, marks=pytest.mark.whole),
    pytest.param("mixtral", {"tensor": 2}, 3, {}, marks=pytest.mark.whole),
    pytest.param("bert", {"tensor": 2}, 3, {}, marks=pytest.mark.whole),
    pytest.param("qwen3_moe", {"data": 2, "tensor": 2}, 3, {}, marks=pytest.mark.whole),
    pytest.param("llama", {"context": 2, "tensor": 2}, 3, {"method": "ring"}, marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("name", "sizes", "stage", "more"), CASES)
def test_models_are_those_of_plain_torch(ranks, name, sizes, stage, more):
    num_ranks = torch.tensor(list(sizes.values())).prod().item()
    fn = partial(trained, in_parts=True, **more)
    assert_same_training(ranks(num_ranks, fn, name, sizes, stage), plain(name))


def lowered(in_parts):
    mesh = Mesh.make(tensor=-1)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    build = partial(small, config)
    model = zerofn.skeleton(build)
    cuts = cuts_of("llama", model, mesh, in_parts)

    def init_state():
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=zerofn.optim.sgd(0.1))

    train_step = step_with(lambda p, b: functional_call(model, p, (), b).loss)

    state = zerofn.shard(init_state, stage=0, mesh=mesh, cuts=cuts)
    ids = torch.zeros(2, 64, dtype=torch.long)
    report = zerofn.compile(train_step).lower(state, {"input_ids": ids, "labels": ids})
    return report.sent_along.get("tensor", 0), report.memory().peak["activations"]


def small(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.whole
def test_parts_take_less_memory_and_send_no_more(ranks):
    ((sent, kept), *_), ((sent_whole, kept_whole), *_) = ranks(2, lowered, True), ranks(2, lowered, False)
    assert sent < sent_whole  # logits are not gathered, which is more than what is gathered again
    assert kept < 0.75 * kept_whole
    ((_, alone),) = ranks(1, lowered, True)
    assert kept < 0.55 * alone


class Attention(nn.Module):
    is_causal = True

    def __init__(self):
        super().__init__()
        self.q, self.o, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.o(self.norm(self.q(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(6), Attention()

    def forward(self, x):
        return x + self.attn(self.norm(x))


def layers():
    return nn.Sequential(Layer(), Layer())


class Convolved(Layer):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 1)


def refusal(plan, tokens, config=None):
    mesh = Mesh.make(tensor=-1)
    model = zerofn.skeleton(layers if "*.conv" not in plan else lambda: nn.Sequential(Convolved(), Layer()))
    if config is not None:
        model.config = config
    try:
        tensor(model, mesh, plan)
        model(torch.zeros(1, tokens, 6))
    except ValueError as error:
        return str(error)
    return None


COLUMNS, ROWS = {"*.attn.q": "colwise"}, {"*.attn.o": "rowwise"}
CONVOLVED = {"*.conv": "replicate"}
FIRST = {"0.attn.q": "colwise", "0.attn.o": "rowwise", "0.attn.norm": "replicated_with_grad_allreduce"}
VARIED, PARTS = {"*.attn.norm": "replicated_with_grad_allreduce"}, {"*": "sequence_parallel"}


@pytest.mark.parametrize(
    ("plan", "tokens", "message"),
    [
        ({"*.attn": "sequence_parallel"} | COLUMNS, 4, "0.attn has 'colwise' layers as direct"),
        (PARTS | ROWS, 4, "the layers contain no 'colwise' layer"),
        (PARTS | COLUMNS | ROWS, 4, "0.attn.norm.weight is not sliced, but other layers of its module are"),
        (PARTS | VARIED | COLUMNS | ROWS, 5, "cannot divide sequences of 5 tokens equally. Pad them to 6"),
        (PARTS | FIRST, 4, "1.attn combines several tokens, but would get only a part of them"),
        (PARTS | VARIED | COLUMNS | ROWS | CONVOLVED, 4, "0.conv combines several tokens, but would get only"),
        (PARTS | COLUMNS | {"*.attn.o": "rowwise_split_input"}, 4, "0.attn.o inside must be 'colwise', or be"),
    ],
)
def test_tensors_that_are_no_parts_of_a_sequence_are_refused(ranks, plan, tokens, message):
    for said in ranks(2, refusal, plan, tokens):
        assert message in said


def test_outputs_of_layers_are_refused(ranks):
    config = transformers.PretrainedConfig(output_hidden_states=True)
    for said in ranks(2, refusal, PARTS | VARIED | COLUMNS | ROWS, 4, config):
        assert "output_hidden_states is True, but each rank has only a part" in said


def asked_later():
    model = zerofn.skeleton(partial(small, transformers.MixtralConfig(**SMALL, num_local_experts=2)))
    tensor(model, Mesh.make(tensor=-1), model.tp_plan | {"model.layers.*": "sequence_parallel"})
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="output_router_logits is True, but each rank has only a part"):
        model(input_ids=ids, output_router_logits=True)
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states is True, but each rank has only a part"):
        model(input_ids=ids)


@pytest.mark.whole
def test_outputs_of_layers_are_refused_when_they_are_asked_for(ranks):
    ranks(2, asked_later)


NOTES = []


class Noted(Layer):
    def __init__(self):
        super().__init__()
        self.attn.norm = nn.Identity()

    def forward(self, x):
        x = super().forward(x)
        NOTES[:] = [x.square().mean()]
        return x


def noted():
    torch.manual_seed(0)
    return nn.Sequential(Noted(), Noted()).double()


def of_parts(finish):
    mesh = Mesh.make(tensor=-1)
    model = zerofn.skeleton(noted)
    cuts = tensor(model, mesh, PARTS | COLUMNS | ROWS)

    def init_state():
        extra = {"mean": torch.zeros((), dtype=torch.float64)}
        return zerofn.TrainState.create(params=dict(noted().named_parameters()), tx=zerofn.optim.sgd(0.1), extra=extra)

    def train_step(state, batch):
        def loss(params, x):
            out = functional_call(model, params, (x,)).square().mean()
            return out, NOTES.pop()

        (_, mean), grads = state.value_and_grad(loss, has_aux=True)(batch)
        return state.apply_gradients(grads, extra={"mean": finish(mean)}), None

    return zerofn.compile(train_step)(zerofn.shard(init_state, mesh=mesh, cuts=cuts), torch.ones(1, 4, 6).double())


def statistics():
    with pytest.raises(zerofn.CaptureError, match=r"'extra.mean' is replicated.*or its part of the tokens"):
        of_parts(lambda x: x)
    of_parts(lambda x: zerofn.collectives.psum(x, "tensor") / 2)


def test_what_parts_tell_may_not_meet_replicated_state(ranks):
    ranks(2, statistics)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8)).double()


def of_norm():
    mesh = Mesh.make(tensor=-1)
    model = zerofn.skeleton(normed)
    cuts = tensor(model, mesh, {"0": "sequence_parallel", "1": "colwise_gather_output"})
    params = zerofn.shard({"params": dict(normed().named_parameters())}, mesh=mesh, cuts=cuts)["params"]
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 4, 6).sin()
    loss, grads = zerofn.value_and_grad(lambda p, x: functional_call(model, p, (x,)).pow(3).mean())(params, x)
    return loss, zerofn.unshard(grads)


def test_a_norm_alone_may_have_parts(ranks):
    model = normed()
    expected = model(torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 4, 6).sin()).pow(3).mean()
    expected.backward()
    for loss, grads in ranks(2, of_norm):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for name, x in model.named_parameters():
            torch.testing.assert_close(grads[name], x.grad, rtol=1e-12, atol=1e-14)

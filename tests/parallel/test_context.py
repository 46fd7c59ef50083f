"""Unmodified models on parts of sequences, beside plain torch in float64."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import SMALL, build, in_float64
from benchmarks.mesh.training import assert_same_training, plain, trained
from tests.support.small_steps import step_with
from tests.support.some import some_of
from zerofn import optim, sparse
from zerofn.comm.mesh import Mesh
from zerofn.parallel import Chunks, context, split_sequence
from zerofn.passes.budget.decision import names_of
from zerofn.passes.budget.search import graphs

T5 = transformers.T5Config(vocab_size=67, d_model=24, d_kv=4, d_ff=36, num_layers=1, num_heads=6)
ODD = transformers.LlamaConfig(**{**SMALL, "num_attention_heads": 3, "num_key_value_heads": 3}, intermediate_size=35)
CASES = [
    pytest.param("llama", 3, {"context": 3}, 0, "ring", marks=pytest.mark.whole),  # rings of 3: test_attention.py
    pytest.param("llama, 2 key heads", 4, {"context": 4}, 1, "ulysses", marks=pytest.mark.whole),
    pytest.param("qwen3", 4, {"data": 2, "context": 2}, 2, "ring", marks=pytest.mark.whole),
    pytest.param("mixtral", 2, {"context": 2}, 3, "ulysses", marks=pytest.mark.whole),
    pytest.param("qwen3_moe", 3, {"context": 3}, 2, "ulysses", marks=pytest.mark.whole),
    pytest.param("deepseek_v3", 2, {"replicate": 1, "context": 2}, 3, "ring", marks=pytest.mark.whole),
    pytest.param("gpt2", 3, {"context": 3}, 1, "ulysses", marks=pytest.mark.whole),
    pytest.param("llama", 2, {"data": 2, "context": 1}, 2, "ring", marks=pytest.mark.whole),
    pytest.param("bert", 2, {"context": 2}, 3, "ulysses", marks=pytest.mark.whole),
    pytest.param("roberta", 2, {"context": 2}, 3, "ring", marks=pytest.mark.whole),  # not causal: test_attention.py
    pytest.param("mistral", 3, {"context": 3}, 3, "ulysses", marks=pytest.mark.whole),
    ("gemma3", 2, {"context": 2}, 1, "ulysses"),
    ("gemma3", 2, {"context": 2}, 3, "ring"),
    pytest.param("mistral", 3, {"context": 3}, 2, "ring", marks=pytest.mark.whole),
    pytest.param("llama", 4, {"context": 2, "tensor": 2}, 3, "ring", marks=pytest.mark.whole),
    pytest.param(
        "llama, 2 key heads", 8, {"data": 2, "tensor": 2, "context": 2}, 3, "ulysses", marks=pytest.mark.whole
    ),
]


@pytest.mark.parametrize(("name", "num_ranks", "sizes", "stage", "method"), CASES)
def test_models_are_those_of_plain_torch(ranks, name, num_ranks, sizes, stage, method):
    assert_same_training(ranks(num_ranks, trained, name, sizes, stage, True, method), plain(name))


@pytest.mark.whole  # test_tensor_parallel.py compares them, too
def test_eager_steps_have_the_bits_of_captured_ones(ranks):
    eager, captured = (ranks(2, trained, "llama", {"context": 2}, 3, x) for x in (False, True))
    assert_same_training(captured, plain("llama"))
    for (a, x, _), (b, y, _) in zip(eager, captured, strict=True):
        assert a == b and all(torch.equal(x[k], y[k]) for k in x)


def in_a_ring(memory):
    """The peak that is planned for this rank."""
    mesh = Mesh.make(context=-1)
    model = zerofn.skeleton(partial(build, "llama"))
    context(model, mesh, method="ring")

    def init_state():
        return zerofn.TrainState.create(params=dict(build("llama").named_parameters()), tx=optim.sgd(0.1))

    train_step = step_with(lambda p, x: functional_call(model, p, (), x).loss)

    step = zerofn.compile(train_step, memory=memory)
    plan = step.lower(zerofn.shard(init_state, mesh=mesh), split_sequence(of_rows(24), mesh))
    return plan.memory().total, names_of(graphs(plan.graph))


@pytest.mark.whole
def test_ranks_of_a_ring_keep_to_a_budget_each_by_its_own_operations(ranks):
    (peak, names), (other_peak, other_names) = ranks(2, in_a_ring, None)
    assert names != other_names
    memory = 9 * max(peak, other_peak) // 10
    assert all(total <= memory for total, _ in ranks(2, in_a_ring, memory))


def of_rows(num):
    return {"input_ids": torch.arange(num * 8).view(num, 8) % 67, "labels": torch.arange(num * 8).view(num, 8) % 67}


def stepped(mesh, batch, name="llama"):
    """A step on a batch that this function does not cut."""
    model = zerofn.skeleton(partial(build, name))
    context(model, mesh)
    train_step = step_with(lambda p, x: functional_call(model, p, (), x).loss)

    def init_state():
        return zerofn.TrainState.create(params=dict(build(name).named_parameters()), tx=optim.sgd(0.1))

    return zerofn.compile(train_step)(zerofn.shard(init_state, mesh=mesh), batch)


def refusals():
    mesh = Mesh.make(context=2)
    rank, batch = mesh.axis("context").rank, of_rows(2)
    cut = split_sequence(batch, mesh)
    own = {**cut, "shift_labels": None}
    in_chunks = {**SMALL, "attention_chunk_size": 4, "head_dim": 4}
    chunked = transformers.Llama4TextConfig(**in_chunks, intermediate_size=36, intermediate_size_mlp=36)
    bad = [
        (lambda: context(nn.Linear(2, 2), mesh), "Linear is not a transformers model"),
        (lambda: context(build("llama"), mesh, method="rings"), "method='rings' is not known"),
        (lambda: context(build("llama"), Mesh.make(data=2)), "mesh has no axis 'context'"),
        (lambda: context(transformers.T5ForConditionalGeneration(T5), mesh), "has an encoder and a decoder"),
        (
            lambda: context(transformers.LlamaForCausalLM(ODD), mesh, method="ulysses"),
            "2 ranks along 'context' cannot divide the 3 heads",
        ),
        (
            lambda: context(transformers.Llama4ForCausalLM(chunked), mesh, method="ring"),
            "Llama4.* not within chunks of 4 tokens. Write method=",
        ),
        (lambda: stepped(mesh, split_sequence(batch, Mesh.make(data=2))), "share sequences along"),
        (lambda: stepped(mesh, {k: x + rank for k, x in batch.items()}), "batch = zerofn.parallel.split_seq"),
        (lambda: stepped(mesh, own), "labels that are shifted before"),
        (lambda: stepped(mesh, split_sequence(batch, mesh, shift=False)), "labels that are shifted before"),
        (
            lambda: stepped(mesh, split_sequence({k: x + rank for k, x in batch.items()}, mesh)),
            "the rows whose sequences ranks of 'context' share, cut into .* must be",
        ),
        (lambda: stepped(mesh, split_sequence(batch, mesh, shift=False), "bert"), "has its own loss"),
        (
            lambda: stepped(mesh, split_sequence(batch, mesh, chunks=Chunks.in_order(2))),
            "cut into the chunks of zerofn.parallel.context, must be",
        ),
        (lambda: split_sequence({"labels": batch["labels"]}, mesh), "expected 'input_ids' in the batch"),
        (lambda: split_sequence({"input_ids": torch.zeros(1, 6)}, mesh), "of 6 tokens equally. Pad them to 8"),
        (lambda: split_sequence({**batch, "attention_mask": 0 * batch["labels"]}, mesh), "attention_mask masks tokens"),
        (
            lambda: split_sequence({**batch, "position_ids": batch["labels"] % 4 + 1}, mesh),
            "begin with 0 and increase by 1",
        ),
        (lambda: split_sequence({**batch, "weight": torch.ones(3)}, mesh), r"expected 'weight' \[.*got \[3\]"),
    ]
    for call, message in some_of(bad, *bad[:2], *bad[4:7], *bad[11:]):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call()
    model = build("llama")
    context(model, mesh)
    with pytest.raises(ValueError, match="context: was already called on this LlamaForCausalLM"):
        context(model, mesh)
    with pytest.raises(ValueError, match="does not support attention_mask. Leave it out"):
        model(**cut, attention_mask=torch.ones_like(cut["input_ids"]))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="the model's attention was changed to 'sdpa'"):
        model(**cut)
    model = transformers.LlamaForCausalLM(ODD)
    context(model, mesh)
    assert model.config._attn_implementation == "zerofn_ring"  # 3 heads for 2 ranks


def test_mistakes_are_sentences(ranks):
    ranks(2, refusals)


def packed():
    """Rows of 24 tokens with documents, which begin in the middle of chunks."""
    lengths = [(5, 1, 9, 9), (20, 4)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {**{k: x.view(2, 24) for k, x in of_rows(6).items()}, "position_ids": positions}


def on_packed_rows(name, method, chunks=None):
    """(loss, gradients) of a rank."""
    mesh, model = Mesh.make(context=-1), build(name)
    context(model, mesh, method=method, chunks=chunks)
    loss = model(**split_sequence(packed(), mesh, chunks=chunks)).loss
    names, params = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, params), strict=True))


@pytest.mark.part(name=["gemma3"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_documents_in_a_row_are_those_of_plain_torch(ranks, name, method):
    with in_float64():
        model = build(name)
        loss = model(**packed(), use_cache=False).loss  # with a cache, transformers does not look for documents
        grads = torch.autograd.grad(loss, list(model.parameters()))
        names = [n for n, _ in model.named_parameters()]
    for num_ranks, chunks in ((2, None), (2, Chunks.in_order(2)), (1, None)):
        found = ranks(num_ranks, in_wide_numbers, name, method, chunks)
        mean = sum(x for x, _ in found) / num_ranks
        torch.testing.assert_close(mean, loss.detach(), rtol=1e-12, atol=0)
        for param, expected in zip(names, grads, strict=True):
            total = sum(x[param] for _, x in found) / num_ranks
            torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-13)


def in_wide_numbers(*given):
    with in_float64():
        return on_packed_rows(*given)


def with_a_layout(method, mixed):
    """(loss, gradients) of a rank, or of plain torch without a method."""
    batch = {k: x for k, x in packed().items() if mixed or k != "position_ids"}
    with in_float64():
        model = sparse.use(build("llama"), sparse.pattern(by_head) & sparse.sliding_window(9))
        if method:
            mesh = Mesh.make(context=-1)
            context(model, mesh, method=method)
            batch = split_sequence(batch, mesh)
        else:
            model.set_attn_implementation("sdpa")
        loss = model(**batch).loss
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def by_head(head, query, key):
    return (key + head) % 3 != 0


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_layouts_that_are_put_into_a_model_are_those_of_whole_rows(ranks, method):
    loss, grads = with_a_layout("", False)
    found = ranks(2, with_a_layout, method, False)
    torch.testing.assert_close(sum(x for x, _ in found) / 2, loss, rtol=1e-12, atol=0)
    for k, expected in enumerate(grads):
        torch.testing.assert_close(sum(x[k] for _, x in found) / 2, expected, rtol=1e-12, atol=1e-13)
    mixed = [x for x, _ in ranks(2, with_a_layout, method, True)]
    assert mixed[0].isfinite() and abs(sum(mixed) / 2 - loss) > 1e-3  # documents hide more


def beside_a_plain_one():
    config = ODD
    build_one = partial(transformers.LlamaForCausalLM, config)
    before = config._attn_implementation
    context(zerofn.skeleton(build_one), Mesh.make(context=-1), method="ring")
    plain_model, ids = build_one(), torch.arange(16).view(2, 8)
    return config._attn_implementation == before, plain_model(input_ids=ids, labels=ids).loss.isfinite().item()


def test_other_models_of_the_same_config_stay_as_they_were(ranks):
    assert ranks(2, beside_a_plain_one) == [(True, True)] * 2

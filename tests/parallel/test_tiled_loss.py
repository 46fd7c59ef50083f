"""Losses of tiles of logits, beside those of whole ones."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import SMALL, build, in_float64
from benchmarks.mesh.training import cuts_of
from zerofn.comm.mesh import Mesh
from zerofn.parallel import context, split_sequence, tiled_loss

LABELS = torch.randint(67, (4, 12), generator=torch.Generator().manual_seed(0))
LABELS[:, 5] = -100  # of 3 tiles, each has another number of labels that count
BATCH = {"input_ids": LABELS.clamp(3), "labels": LABELS}


def of_tiles(name, sizes, tiles):
    with in_float64():
        mesh = Mesh.make(**sizes)
        model, batch = zerofn.skeleton(partial(build, name)), BATCH
        cuts = cuts_of(name, model, mesh, in_parts=True) if "tensor" in sizes else None
        tiled_loss(model, tiles)
        if "context" in sizes:
            context(model, mesh)
            batch = split_sequence(BATCH, mesh)
        params = zerofn.shard({"params": dict(build(name).named_parameters())}, mesh=mesh, cuts=cuts)["params"]
        loss, grads = zerofn.value_and_grad(lambda p, b: functional_call(model, p, (), b).loss)(params, batch)
        return loss, zerofn.unshard(grads)


@pytest.mark.parametrize(
    ("name", "sizes", "tiles"),
    [
        ("llama", {"data": 1}, 3),
        ("gpt2", {"data": 1}, 20),
        ("llama", {"tensor": 2}, 2),
        pytest.param("llama", {"context": 3}, 2, marks=pytest.mark.whole),
    ],
)
def test_losses_and_gradients_are_those_of_whole_logits(ranks, name, sizes, tiles):
    with in_float64():
        model = build(name)
        expected = model(**BATCH).loss
        expected.backward()
    for loss, grads in ranks(max(sizes.values()), of_tiles, name, sizes, tiles):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for key, x in model.named_parameters():
            torch.testing.assert_close(grads[key], x.grad, rtol=1e-11, atol=1e-13)


def small(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, intermediate_size=35, **more))


def test_a_step_never_has_all_logits_and_without_labels_a_model_returns_them():
    model = small(tie_word_embeddings=False)
    tiled_loss(model, 4)
    ids = torch.zeros(1, 16, dtype=torch.long)
    assert model(input_ids=ids).logits.shape == (1, 16, 67)
    assert model(input_ids=ids, labels=ids).logits is None

    def step(params, batch):
        return zerofn.value_and_grad(lambda p, b: functional_call(model, p, (), b).loss)(params, batch)

    params = zerofn.shard({"params": dict(small().named_parameters())})["params"]
    graph = zerofn.compile(step).lower(params, {"input_ids": ids, "labels": ids}).graph.graph
    rows = {x.numel() // 67 for n in graph.nodes for x in [n.meta.get("val")] if hasattr(x, "shape") and 67 in x.shape}
    assert 4 in rows and 16 not in rows


def test_a_model_that_does_more_with_logits_is_refused():
    config = transformers.Gemma2Config(
        **SMALL | {"num_hidden_layers": 1}, intermediate_size=8, head_dim=4, final_logit_softcapping=3.0
    )
    model = transformers.Gemma2ForCausalLM(config)
    tiled_loss(model)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM does more with its logits than compute the loss"):
        model(**BATCH)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="expected tiles to be 1 or more, got 0"):
        tiled_loss(small(), 0)
    with pytest.raises(TypeError, match="expected a transformers decoder with a head and a loss, got Linear"):
        tiled_loss(nn.Linear(2, 2))

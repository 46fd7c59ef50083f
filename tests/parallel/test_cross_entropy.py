"""Cross-entropy of slices of logits, beside torch's of whole ones."""

from functools import partial

import pytest
import torch
import transformers

import zerofn
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal, sliced
from zerofn.parallel import cross_entropy, tensor

LABELS = torch.tensor([[3, -100, 0], [10, 5, 2]])
TOP = torch.nn.functional.cross_entropy


def logits():
    return torch.randn(2, 3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 30


def of_slices(reduction, labels):
    mesh = Mesh.make(tensor=-1)
    cut = equal("tensor", 2, 11, mesh.axis("tensor").size)
    mine = sliced(logits(), [cut], mesh)

    def loss(x):
        return cross_entropy(x, labels, 11, axis=mesh.axis("tensor"), reduction=reduction).square().sum()

    product = torch.func.jvp(torch.func.grad(loss), (mine,), (torch.ones_like(mine),))[1]
    return loss(mine), torch.func.grad(loss)(mine), product


@pytest.mark.parametrize(("num_ranks", "reduction"), [(1, "mean"), (2, "none"), (3, "mean"), (4, "sum")])
def test_values_gradients_and_products_are_those_of_whole_logits(ranks, num_ranks, reduction):
    def loss(x):
        return TOP(x.movedim(-1, 1), LABELS, reduction=reduction).square().sum()

    whole = logits()
    product = torch.func.jvp(torch.func.grad(loss), (whole,), (torch.ones_like(whole),))[1]
    found = ranks(num_ranks, of_slices, reduction, LABELS)
    for value, _, _ in found:
        torch.testing.assert_close(value, loss(whole), rtol=1e-12, atol=0)
    for k, expected in ((1, torch.func.grad(loss)(whole)), (2, product)):
        torch.testing.assert_close(torch.cat([x[k] for x in found], -1), expected, rtol=1e-12, atol=1e-12)


def test_a_label_that_is_not_in_the_vocabulary_has_no_loss(ranks):
    ((value, _, _),) = ranks(1, of_slices, "sum", torch.full((2, 3), 11))
    assert value.isnan()


@pytest.mark.parametrize(
    ("shapes", "reduction", "message"),
    [
        ((2, 3, 10), "mean", "rank 0 of 1 along 'data' has 11 of 11 entries of the vocabulary, but got logits"),
        ((2, 4, 11), "mean", r"expected labels \[2, 4\] for logits \[2, 4, 11\], got \[2, 3\]"),
        ((2, 3, 11), "max", "expected reduction to be one of mean, sum, none, got 'max'"),
    ],
)
def test_bad_input_is_refused(shapes, reduction, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.zeros(shapes), LABELS, 11, axis="data", reduction=reduction)


def small(kind, config):
    torch.manual_seed(0)
    return getattr(transformers, kind)(config)


def loss_of(kind, config, plan):
    mesh = Mesh.make(tensor=-1)
    model = zerofn.skeleton(partial(small, kind, config))
    tensor(model, mesh, plan)
    try:
        model(input_ids=LABELS.clamp(0), labels=LABELS)
    except ValueError as error:
        return str(error)
    return None


def test_a_model_with_a_loss_of_its_own_is_refused_when_it_gets_labels(ranks):
    config = transformers.BertConfig(
        vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    for said in ranks(2, loss_of, "BertForMaskedLM", config, {"cls.predictions.decoder": "colwise"}):
        assert "call the model without labels, and pass its logits to zerofn.parallel.cross_entropy" in said

"""What a step may have beside a loss, inside a pipeline: a cut step has the bits of the same step uncut."""

import re

import pytest
import torch
import torch.nn.functional as F

import zerofn
from tests.support.pipe_steps import (
    LAYERS,
    WIDTH,
    both,
    cross_entropy,
    embedded,
    layer,
    logits,
    loss_fn,
    params,
    trained,
)
from tests.support.same import assert_same_trees
from zerofn import optim

whole = pytest.mark.whole


def assert_same_on_all(found):
    """Of each rank (cut, uncut): the same bits, on all ranks."""
    for cut, uncut in found:
        assert_same_trees(cut, uncut, "cut and uncut")
        assert_same_trees(cut, found[0][0], "two ranks")


def measured(batch, out, early):
    """Aux of the first stage, of the last, and of none."""
    return {"early": early.mean(), "rows": early.mean((1, 2)), "right": (out.argmax(-1) == batch["labels"]).sum(1),
            "words": batch["ids"].max(), "name": "x"}  # fmt: skip


def with_everything(schedule, m):
    """Weights, dropout, aux, running statistics, frozen and 0-d leaves, norms of gradients, clipping."""
    given = params() | {"factor": torch.tensor(1.3, dtype=torch.float64)}
    running = {"mean": torch.zeros(WIDTH, dtype=torch.float64), "var": torch.ones(WIDTH, dtype=torch.float64)}
    extra = {**running, "count": torch.zeros((), dtype=torch.int64)}

    def step(state, batch):
        inside = {k: x.clone() for k, x in state.extra.items()}

        def loss(params, batch):
            early = x = F.dropout(embedded(params, batch), 0.2)
            for i in range(LAYERS):
                x = layer(params, i, x)
            inside["count"].add_(1)
            normed = F.batch_norm(x.flatten(0, 1), inside["mean"], inside["var"], training=True, momentum=0.3)
            out = logits(params, F.dropout(normed.view_as(x), 0.2) * params["factor"], ())
            total = cross_entropy(out, batch, reduction="sum")
            return (total, (batch["labels"] > 3).sum()), measured(batch, out, early)

        (loss, aux), grads = zerofn.accumulate(state.value_and_grad(loss, has_aux=True), m)(batch)
        norms = {"global": zerofn.global_norm(grads), "leaf": zerofn.leaf_norms(grads)}
        return state.apply_gradients(grads, extra=inside), (loss, aux, norms)

    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))
    create = {"extra": extra, "frozen": lambda name: name in ("embed", "h.0.up")}
    return both(schedule, m, 2, step=step, given=given, tx=tx, create=create)


@pytest.mark.parametrize(
    ("schedule", "m"), [("zb-h1", 3), pytest.param("zbv", 4, marks=whole), pytest.param("interleaved", 1, marks=whole)]
)
def test_everything_at_once(ranks, schedule, m):
    assert_same_on_all(ranks(2, with_everything, schedule, m))


def without_gradients(params, batch):
    """Of the layers: the first stage trains nothing."""
    with torch.no_grad():
        x = embedded(params, batch)
        for i in range(LAYERS):
            x = layer(params, i, x)
    return cross_entropy(logits(params, x, ()), batch)


KINDS = {
    "layers without gradients": ({"stage": 3}, {"loss": without_gradients}),
    "on drives": ({"stage": 3}, {"shards": {"offload": "nvme"}, "given": "float32"}),
    "half of it on drives": ({"stage": 2}, {"shards": {"offload": zerofn.Offload(optimizer="nvme", fraction=0.5)}}),
    "bf16": ({"stage": 1}, {"shards": {"precision": "bf16"}, "given": "float32"}),
    "muon": ({"stage": 2}, {"tx": optim.muon(1e-2)}),
    "lamb": ({"stage": 1}, {"tx": optim.lamb(1e-2)}),
    "adafactor": ({"stage": 3}, {"tx": optim.adafactor(1e-2)}),
    "all but the head frozen": ({"stage": 3}, {"create": {"frozen": lambda name: name != "head"}}),
}


def of_kind(kind, schedule):
    where, options = KINDS[kind]
    options = dict(options)
    if options.pop("given", None):
        options["given"] = params(dtype=torch.float32)
    return both(schedule, 3, **where, **options)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("layers without gradients", "zbv"),
        pytest.param("on drives", "1f1b", marks=whole),
        *(pytest.param(kind, schedule, marks=whole) for kind, schedule in zip(
            [*KINDS][2:], ["zbv", "zb-h1", "interleaved", "1f1b", "zb-h1", "zbv"], strict=True
        )),
    ],
)  # fmt: skip
def test_kinds_of_states(ranks, kind, schedule):
    assert_same_on_all(ranks(2, of_kind, kind, schedule))


def of_two_losses(schedule):
    """Two loops in a step, whose pieces have the same shapes."""

    def squares(params, batch):
        return logits(params, embedded(params, batch)).square().mean()

    def step(state, batch):
        losses, grads = [], []
        for loss in (loss_fn, squares):
            value, gradient = zerofn.accumulate(state.value_and_grad(loss), 3)(batch)
            losses.append(value)
            grads.append(gradient)
        return state.apply_gradients(zerofn.tree_map(lambda a, b: a - 0.5 * b, *grads)), losses

    return both(schedule, 3, 3, step=step)


@pytest.mark.whole  # test_everything_at_once
def test_two_losses(ranks):
    assert_same_on_all(ranks(2, of_two_losses, "zbv"))


def with_tied(rule, schedule, stage):
    return both(schedule, 3, stage, given=params(tied=True), tx=getattr(optim, rule)(1e-2))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("rule", "schedule", "stage"),
    [
        ("sgd", "1f1b", 0),
        ("lion", "zb-h1", 2),
        ("muon", "interleaved", 3),
        ("lamb", "1f1b", 1),
        ("adafactor", "zbv", 3),
    ],
)
def test_tied_leaves_under_any_rule(ranks, rule, schedule, stage):
    """Their terms are added in another order, so to rounding."""
    for (_, cut), (_, uncut) in ranks(2, with_tied, rule, schedule, stage):
        torch.testing.assert_close(cut, uncut, rtol=1e-11, atol=1e-12)


def refused(kind):
    region = zerofn.eager_region(
        lambda x, p: layer(p, 2, layer(p, 1, x)), like=lambda x, p: torch.empty_like(x)
    )  # of layers 1 and 2, which lie on two stages

    def large(params, batch):
        out = logits(params, embedded(params, batch))
        return cross_entropy(out, batch), {"made": [out.repeat(1, 1000, 1)]}

    def of_two(params, batch):
        x = region(
            layer(params, 0, embedded(params, batch)), {k: x for k, x in params.items() if k[:3] in ("h.1", "h.2")}
        )
        return cross_entropy(logits(params, x, [3]), batch)

    losses = {"large aux": (large, True), "a region of two stages": (of_two, False)}
    loss, has_aux = losses[kind]
    with pytest.raises(ValueError) as error:
        trained("1f1b", 3, 2, loss=loss, has_aux=has_aux)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("large aux", r"aux\['made'\]\[0\] is computed on stage 1, .* 5.28 MB in every step. Return a metric"),
        pytest.param("a region of two stages", "uses parameters of stages 0 and 1. Write one", marks=whole),
    ],
)
def test_what_is_refused_on_every_rank(ranks, kind, sentence):
    for told in ranks(2, refused, kind):
        assert re.search(sentence, told), told


def with_skips(schedule, m, stage):
    """Half precision with a loss scale that is too large at first; and what is not finite is so on the first stage."""

    def loss(params, batch):
        x = layer(params, 0, embedded(params, batch))
        return (
            cross_entropy(logits(params, x, range(1, LAYERS)).tanh().float(), batch) + 0.0 * x.float().square().mean()
        )

    create, given = {"loss_scale": zerofn.DynamicLossScale(2.0**24)}, params(dtype=torch.float32)
    return both(schedule, m, stage, loss=loss, given=given, create=create, shards={"precision": "fp16"})


@pytest.mark.parametrize(("schedule", "m", "stage"), [pytest.param("zbv", 3, 3, marks=whole)])
def test_steps_that_are_skipped(ranks, schedule, m, stage):
    found = ranks(2, with_skips, schedule, m, stage)
    assert_same_on_all(found)
    assert 0 < found[0][0][1]["skipped"] <= 2

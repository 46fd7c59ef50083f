"""Segments of a forward pass that are joined: where most is gained, beside all other ways to join them."""

import itertools
import random

import pytest
import torch

import zerofn
from tests.support.small_steps import captured, step_with
from zerofn.graph.phase import FORWARD, phase_of
from zerofn.graph.segments import FINER, RECEIVED, STEP, LiveRange, Segments, _bytes, _least, joined


def starts_of(numbers):
    return [k for k, number in enumerate(numbers) if k == 0 or number != numbers[k - 1]]


def taken(spans, starts, count):
    """(bytes that are kept between these segments, the most of one of them but the last), counted one by one."""
    ends = [*starts[1:], count]
    cuts = [end - 1 for end in ends[:-1]]
    between = [x for x in spans if any(x.made <= cut < x.used for cut in cuts)]
    inside = [
        sum(x.nbytes for x in spans if x.saved and x not in between and start <= x.made < end)
        for start, end in zip(starts, ends, strict=True)
    ]
    return sum(x.nbytes for x in between), inside


def all_ways(count):
    for num in range(count):
        for rest in itertools.combinations(range(1, count), num):
            yield [0, *rest]


@pytest.mark.parametrize("seed", range(30))
def test_the_least_of_all_ways(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 7)
    spans = []
    for k in range(draw.randint(count, 20)):
        made = draw.randrange(count)
        # All of other sizes: a span is told from the others by its bytes.
        spans.append(LiveRange(made, draw.randint(made, count - 1), 100 * k + draw.randint(1, 99), draw.random() < 0.7))
    crossing, inner = (x.cumsum(1) for x in _bytes(spans, count))
    last = int(inner[-1, 0])
    for largest in (int(inner[:-1, 0].max(initial=0)), 1500, 4000, 100_000):
        if largest < inner[:-1, 0].max(initial=0):
            continue
        kept, numbers = _least(crossing, inner, largest)
        fitting = []
        for starts in all_ways(count):
            between, inside = taken(spans, starts, count)
            if max(inside[:-1], default=0) <= largest and inside[-1] <= max(last, largest):
                fitting.append(between)
        between, inside = taken(spans, starts_of(numbers), count)
        assert kept == between == min(fitting)
        assert max(inside[:-1], default=0) <= largest and inside[-1] <= max(last, largest)


@pytest.mark.parametrize("num_layers", [1, 4, 24])
def test_layers_stay_apart(num_layers):
    spans = [
        x
        for k in range(num_layers)
        for x in (LiveRange(k, k, 15, True), LiveRange(k, min(k + 1, num_layers - 1), 1, True))
    ]
    assert joined(spans, num_layers) == list(range(num_layers))


@pytest.mark.parametrize("many", [0, 1, 60])
def test_what_all_layers_use_joins_none(many):
    """Such as what relative positions add, however much that is beside what goes from layer to layer."""
    spans = [LiveRange(1, 11, many, True), LiveRange(0, 11, many, True)]
    spans += [x for k in range(12) for x in (LiveRange(k, k, 15, True), LiveRange(k, min(k + 1, 11), 1, True))]
    assert joined(spans, 12) == list(range(12))


def of_matrices(num_layers):
    """A transformer's layers with a unit for each matrix, in hidden states: the residual stream, what a layer norm and
    attention make, four times as many between the last two."""
    spans = []
    for layer in range(num_layers):
        qkv, out, up, down = range(4 * layer, 4 * layer + 4)
        spans += [
            LiveRange(qkv, qkv, 1, True),
            LiveRange(qkv, out, 3, True),
            LiveRange(out, out, 1, True),
            LiveRange(out, down, 1, True),
        ]
        spans += [LiveRange(up, up, 1, True), LiveRange(up, down, 4, True), LiveRange(down, down, 4, True)]
        if layer + 1 < num_layers:
            spans.append(LiveRange(down, down + 2, 1, True))
    return spans


def test_matrices_of_a_layer_are_joined():
    """What is between them takes more than a layer that is made again as a whole."""
    starts = starts_of(joined(of_matrices(24), 96))
    assert {k % 4 for k in starts} == {0} and len(starts) >= 20


def test_no_larger_than_they_have_to_be():
    """Larger ones only where memory is saved that is worth it."""
    count = 240
    spans = [x for k in range(count) for x in (LiveRange(k, k, 15, True), LiveRange(k, min(k + 1, count - 1), 1, True))]
    found = starts_of(joined(spans, count))
    totals = {size: len(range(size, count, size)) + 15 * size for size in range(1, 10)}
    between, inside = taken(spans, found, count)
    assert between + max(inside) <= STEP * FINER * min(totals.values()) < totals[1]


def test_nothing_and_one():
    assert joined([], 1) == [0]
    assert joined([LiveRange(0, 0, 5, True)], 1) == [0]
    assert len(joined([], 5)) == 5


def test_what_a_stage_receives_stays():
    """Where a segment is of several layers, a stage of a pipeline may begin within it."""

    def loss_fn(params, x):
        for _ in range(3):
            x = x + torch.tanh(x @ params["w"])
        return x.square().mean()

    created = zerofn.TrainState.create(params={"w": torch.ones(8, 8)}, tx=zerofn.optim.sgd(0.1))
    state = zerofn.shard(created)  # one leaf, so one segment
    graph = captured(step_with(loss_fn), state, torch.ones(4, 8)).gm.graph
    before = Segments(graph)
    sums = [x for x in graph.nodes if x.target is torch.ops.aten.add.Tensor and phase_of(x) == FORWARD]
    last = before.memory([x for x in graph.nodes if x.target is torch.ops.aten.tanh.default][-1])
    assert set(sums[:2]) <= set(before.missing(last, {last, *sums}))
    sums[1].meta[RECEIVED] = True
    after = Segments(graph)
    assert sums[1] not in after.activations
    assert not set(sums[:2]) & set(after.missing(last, {last, *sums}))

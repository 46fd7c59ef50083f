"""Heads and losses in tiles of logits, beside torch's with whole ones: bit for bit."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from zerofn.ops import head_loss
from zerofn.ops.head_loss import Sizes, sizes_of, tiles
from zerofn.ops.registry import traits_of

ops, aten = torch.ops.zerofn, torch.ops.aten
TOKENS, WIDTH, CLASSES = 600, 16, 700  # neither is a multiple of a tile
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def inputs(dtype, bias, ignored):
    torch.manual_seed(0)
    x, weight = torch.randn(TOKENS, WIDTH, dtype=dtype), torch.randn(CLASSES, WIDTH, dtype=dtype)
    labels = torch.randint(CLASSES, (TOKENS,))
    labels[::5] = ignored
    return x, weight, torch.randn(CLASSES, dtype=dtype) if bias else None, labels


def by_torch(x, weight, bias, labels, ignored, reduction, grad, dtype=torch.float32):
    leaves = [
        t.requires_grad_()
        for t in (x.clone(), weight.clone(), bias.clone() if bias is not None else None)
        if t is not None
    ]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits.to(dtype), labels, ignore_index=ignored, reduction=reduction)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad.expand(loss.shape))]


def assert_alike(ours, theirs):
    """Bit for bit, with the same NaNs."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def by_tiles(x, weight, bias, labels, ignored, reduction, grad, dtype=torch.float32):
    kind, sizes = REDUCTIONS[reduction], sizes_of(TOKENS, CLASSES)
    assert sizes == Sizes(256, 256)
    given = x, weight, bias, labels
    logs = ops.head_loss(*given, ignored, dtype, sizes.rows)
    places = (labels == ignored) * -100
    loss, total = aten.nll_loss_forward(logs, places, None, kind, -100)
    of_x, numbers = ops.head_loss_backward(grad.expand(loss.shape), *given, total, kind, ignored, dtype, sizes.rows)
    columns = numbers, *given, ignored, dtype, sizes.columns
    if bias is None:
        out = torch.empty_like(weight)
        ops.head_gradient.out(*columns, out=out)
        assert_alike(out, ops.head_gradient(*columns))
        return [loss, of_x, out]
    of_weight, of_bias = ops.head_gradients(*columns)
    return [loss, of_x, of_weight, of_bias[0]]


@pytest.mark.parametrize(
    ("dtype", "bias", "ignored", "reduction"),
    [
        (torch.float32, False, -100, "mean"),
        (torch.float32, True, 0, "sum"),
        (torch.bfloat16, True, -100, "mean"),
        (torch.bfloat16, False, 3, "none"),
        (torch.float32, True, CLASSES, "none"),
    ],
)
def test_losses_and_gradients_have_the_bits_of_whole_logits(dtype, bias, ignored, reduction):
    given = (
        *inputs(dtype, bias, ignored),
        ignored,
        reduction,
        torch.tensor(1.7, dtype=torch.promote_types(dtype, torch.float32)),
    )
    for ours, theirs in itertools.zip_longest(by_tiles(*given), by_torch(*given)):
        assert_alike(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bias", "ignored", "reduction"), [(False, -100, "mean"), (True, 3, "none")])
def test_log_probabilities_in_half_precision_have_them_too(dtype, bias, ignored, reduction):
    given = (*inputs(dtype, bias, ignored), ignored, reduction, torch.tensor(1.7, dtype=dtype), dtype)
    for ours, theirs in itertools.zip_longest(by_tiles(*given), by_torch(*given)):
        assert_alike(ours, theirs)


def test_infinite_logits_do_what_they_do_whole():
    x, weight, _, labels = inputs(torch.float32, False, -100)
    x[7] = float("inf")
    x[8, 0] = float("nan")
    given = x, weight, None, labels, -100, "mean", torch.tensor(1.0)
    for ours, theirs in itertools.zip_longest(by_tiles(*given), by_torch(*given)):
        assert_alike(ours, theirs)


def allocated(run):
    """The most bytes that a call has at a time, by the events of the host's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = run()
    events = sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    del kept
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_knows_the_bytes_that_tiles_take(dtype):
    x, weight, _, labels = inputs(dtype, False, -100)
    total, one = torch.tensor(480.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    numbers = torch.zeros(4, TOKENS)
    calls = [
        (ops.head_loss.default, (x, weight, None, labels, -100, dtype, 256)),
        (ops.head_loss_backward.default, (one, x, weight, None, labels, total, 1, -100, dtype, 256)),
        (ops.head_gradient.default, (numbers, x, weight, None, labels, -100, dtype, 256)),
    ]
    for op, args in calls:
        result = op(*args)
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=True))
        made = sum(t.nbytes for t in (result if isinstance(result, tuple) else (result,)))
        found, told = allocated(lambda: op(*args)), made + traits_of(op).workspace(given, result)  # noqa: B023
        assert found <= told <= 1.005 * found, op


def test_tiles_are_large_multiples_and_their_last_one_is_not_small():
    assert sizes_of(511, 10**6) is None and sizes_of(10**6, 511) is None
    assert sizes_of(8192, 128256) == (512, 7936)
    assert sizes_of(65536, 128256) == (512, 768)
    for num, size in ((512, 256), (767, 256), (768, 256), (5003, 256), (128256, 7936), (255, 256)):
        found = tiles(num, size)
        assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])] and found[-1][1] == num
        assert all(a % size == 0 for a, _ in found)
        assert num < 256 or all(min(size, 256) <= b - a < size + 256 for a, b in found)
    assert head_loss.EVEN == 256

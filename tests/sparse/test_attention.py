"""Attention by a layout has the values and gradients of attention with a mask of all pairs."""

import functools
import types

import numpy as np
import pytest
import torch

import zerofn
from tests.sparse.dense import attended, inputs, same_as_dense
from tests.support.same import assert_same_trees
from zerofn import sparse
from zerofn.ops import native
from zerofn.sparse.attention import with_logsumexp

EXACT = 1e-12  # in float64
TOLERANCES = {torch.float64: EXACT, torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.008}


def places(queries, keys=None):
    """i [L, 1] and j [S]."""
    return torch.arange(queries)[:, None], torch.arange(queries if keys is None else keys)


def document_mask(ends, num):
    """[num, num]: of one document, by a number for each token."""
    numbers = torch.full((num,), -1)
    for k, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        numbers[a:b] = k
    return (numbers[:, None] == numbers) & (numbers >= 0)


def cases(num):
    """name -> (pattern, its mask)"""
    i, j = places(num)
    ends = sorted(max(0, min(x, num)) for x in (0, 5, 5, num // 2, num // 2 + 1, num - 3))
    cut = torch.tensor(ends)
    window = (i - j).abs() < 9
    stripes = lambda head, query, key: (query // 7 + key // 5 + head) % 3 == 0  # noqa: E731
    striped = stripes(torch.arange(4)[:, None, None], i, j)
    return {
        "everything": (sparse.everything, i == i + 0 * j),
        "causal": (sparse.causal, j <= i),
        "window": (sparse.sliding_window(9), window),
        "wide window": (sparse.sliding_window(70) & sparse.causal, ((i - j).abs() < 70) & (j <= i)),
        "sinks": ((sparse.sinks(3) | sparse.sliding_window(9)) & sparse.causal, ((j < 3) | window) & (j <= i)),
        "prefix": (sparse.prefix(30) | sparse.causal, (j <= i) | ((i < 30) & (j < 30))),
        "documents": (sparse.documents(cut), document_mask(ends, num)),
        "documents, causal": (sparse.documents(cut) & sparse.causal, document_mask(ends, num) & (j <= i)),
        "documents, windows": (sparse.documents(cut) & sparse.sliding_window(9), document_mask(ends, num) & window),
        "documents or sinks": (sparse.documents(cut) | sparse.sinks(2), document_mask(ends, num) | (j < 2)),
        "two cuts": (
            sparse.documents(cut) & sparse.documents(torch.tensor([0, num // 3, num])),
            document_mask(ends, num) & document_mask([0, num // 3, num], num),
        ),
        "a function of heads": (sparse.pattern(stripes), striped),
        "a function in a window": (sparse.pattern(stripes) & sparse.sliding_window(9), striped & window),
        "rows without a key": (sparse.pattern(lambda head, query, key: query % 3 == 0), (i % 3 == 0) & (j >= 0)),
        "no key": (sparse.pattern(lambda head, query, key: query < 0), (i < 0) & (j >= 0)),
    }


NAMES = list(cases(4))


@pytest.mark.parametrize("num", [1, 63, 64, 150, 257])
@pytest.mark.parametrize("name", NAMES)
def test_patterns_are_their_masks(name, num):
    pattern, mask = cases(num)[name]
    same_as_dense(inputs(queries=num), lambda q, k, v: sparse.attention(q, k, v, pattern), mask, EXACT)


@pytest.mark.parametrize("name", ["sinks", "documents, causal", "a function of heads", "rows without a key"])
@pytest.mark.parametrize("isa", [*native.isas(), "torch"])
def test_each_instruction_set_and_torch_do_the_same(name, isa, monkeypatch):
    if isa == "torch":
        monkeypatch.setattr(native, "missing", lambda: "no library")
    else:
        monkeypatch.setenv("ZEROFN_ISA", isa)
    pattern, mask = cases(100)[name]
    for dtype, tolerance in TOLERANCES.items():
        given = inputs(queries=100, width=24, values=16, dtype=dtype)
        same_as_dense(given, lambda q, k, v: sparse.attention(q, k, v, pattern), mask, tolerance)


def padded(name, num):
    """Booleans [2, num]: False of padding."""
    at, draw = torch.arange(num), torch.Generator().manual_seed(3)
    return {
        "right": at < torch.tensor([[num // 3 + 1], [num]]),
        "left": at >= torch.tensor([[num // 2], [0]]),
        "holes": torch.rand(2, num, generator=draw) < 0.7,
        "a row of nothing else": torch.tensor([[False], [True]]).expand(2, num),
        "one for all rows": (at < num - 70)[None],
    }[name]


PADDINGS = ["right", "left", "holes", "a row of nothing else", "one for all rows"]


@pytest.mark.part(name=["left", "holes"], num=[150])
@pytest.mark.parametrize("num", [75, 150, 257])
@pytest.mark.parametrize("name", PADDINGS)
def test_no_query_looks_at_padding(name, num):
    there = padded(name, num)
    for kind in ("everything", "sinks", "documents, causal", "a function of heads"):
        pattern, mask = cases(num)[kind]
        both = pattern & sparse.padding(there.long())
        attend = lambda q, k, v, both=both: sparse.attention(q, k, v, both)  # noqa: E731
        same_as_dense(inputs(queries=num), attend, mask & there[:, None, None], EXACT)


@pytest.mark.parametrize("isa", [*native.isas(), "torch"])
def test_each_instruction_set_and_torch_hide_padding(isa, monkeypatch):
    if isa == "torch":
        monkeypatch.setattr(native, "missing", lambda: "no library")
    else:
        monkeypatch.setenv("ZEROFN_ISA", isa)
    there, (i, j) = padded("holes", 100), places(100)
    for dtype, tolerance in TOLERANCES.items():
        given = inputs(queries=100, width=24, values=16, dtype=dtype)
        attend = lambda q, k, v: sparse.attention(q, k, v, sparse.padding(there) & sparse.causal)  # noqa: E731
        same_as_dense(given, attend, (j <= i) & there[:, None, None], tolerance)


def test_an_index_of_no_block_gives_zeros():
    q, k, v, _ = inputs(queries=64)
    none = sparse.chosen(torch.zeros(1, 1, 4, 0, dtype=torch.int64), 16)
    assert not sparse.attention(q, k, v, none).any()


def test_there_is_no_derivative_in_forward_mode():
    q, k, v, _ = inputs(queries=64)

    def along(x):
        return torch.func.jvp(lambda x: sparse.attention(x, k, v, sparse.causal), (x,), (x,))[1]

    for run in (lambda: along(q), lambda: zerofn.compile(lambda _, x: {"out": along(x)})(None, q.detach())):
        with pytest.raises((NotImplementedError, zerofn.CaptureError), match="has no forward-mode derivative"):
            run()


class Model:
    """A window that functions read in many ways."""

    kind = 9

    def __init__(self):
        self.window, self.settings = 9, {"window": 9}

    def near(self, head, query, key):
        return (query - key).abs() < self.settings["window"]

    def width(self):
        return self.window

    @property
    def twice(self):
        return 2 * self.window


def test_a_function_counts_as_it_reads_now():
    own, window, table, module = Model(), 9, np.zeros(1, dtype=np.int64), types.ModuleType("settings")
    functions = [
        lambda head, query, key: (query - key).abs() < window,
        lambda head, query, key: (query - key).abs() < own.window,
        lambda head, query, key: (query - key).abs() < own.settings["window"],
        lambda head, query, key: (query - key).abs() < own.width(),
        lambda head, query, key: (query - key).abs() < own.twice // 2,
        lambda head, query, key: (query - key).abs() < Model.kind,
        lambda head, query, key: (query - key).abs() < module.window,
        lambda head, query, key: (query - key).abs() < int(table[0]),
        functools.partial(lambda x, head, query, key: (query - key).abs() < int(x[0]), table),
        own.near,
    ]
    q, k, v, _ = (x.detach() for x in inputs(1, 1, 1, queries=30))
    for window in (9, 3, 5):
        own.window = own.settings["window"] = Model.kind = module.window = table[0] = window
        expected = sparse.attention(q, k, v, sparse.sliding_window(window))
        for number, function in enumerate(functions):
            assert torch.equal(sparse.attention(q, k, v, function), expected), number


def test_keys_of_other_tokens_may_be_padding():
    there = torch.arange(150) < torch.tensor([[20], [140]])
    attend = lambda q, k, v: sparse.attention(q, k, v, sparse.padding(there))  # noqa: E731
    same_as_dense(inputs(queries=70, keys=150), attend, there[:, None, None], EXACT)


def test_instruction_sets_and_threads_give_the_same_bits(monkeypatch):
    pattern = (sparse.sinks(3) | sparse.sliding_window(40)) & sparse.causal
    *qkv, grad = inputs(queries=200, dtype=torch.float32)

    def run():
        out = sparse.attention(*qkv, pattern, dropout=0.0)
        return out, *torch.autograd.grad(out, qkv, grad)

    found = []
    for isa in native.isas():
        monkeypatch.setenv("ZEROFN_ISA", isa)
        found.append(run())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(native, "_PART", 1)
    found.append(run())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    "heads, groups, width, values", [(1, 1, 1, 1), (6, 2, 64, 64), (3, 3, 37, 130), (8, 1, 256, 5)]
)
def test_heads_and_widths_of_any_number(heads, groups, width, values):
    i, j = places(90)
    given = inputs(1, heads, groups, 90, width=width, values=values)
    same_as_dense(
        given, lambda q, k, v: sparse.attention(q, k, v, sparse.sliding_window(33)), (i - j).abs() < 33, EXACT
    )


def test_other_numbers_of_keys_scales_and_memory():
    i, j = places(70, 130)
    q, k, v, grad = inputs(queries=70, keys=130)
    same_as_dense(
        (q, k, v, grad),
        lambda q, k, v: sparse.attention(q, k, v, sparse.sliding_window(20), is_causal=True, scale=0.3),
        ((i - j).abs() < 20) & (j <= i),
        EXACT,
        scale=0.3,
    )
    rows = torch.randn(2, 50, 3, 4, 16, dtype=torch.float64)  # as a layer's one product of q, k and v leaves them
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in rows.unbind(2))
    i, j = places(50)
    grad = torch.ones(2, 4, 1, 1, dtype=torch.float64).expand(2, 4, 50, 16)
    same_as_dense((q, k, v, grad), lambda q, k, v: sparse.attention(q, k, v, sparse.causal), j <= i, EXACT)


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_features_need_not_be_side_by_side(which):
    i, j = places(70)
    *qkv, grad = inputs(queries=70, width=8, values=8)
    turned = [x.detach().mT.contiguous().mT.requires_grad_() for x in qkv]
    turned = [new if name in which else x for name, new, x in zip("qkv", turned, qkv, strict=True)]
    same_as_dense((*turned, grad), lambda q, k, v: sparse.attention(q, k, v, sparse.causal), j <= i, EXACT)


def test_documents_of_each_row():
    ends = torch.tensor([[0, 20, 50, 80], [0, 1, 80, 80]])
    mask = torch.stack([document_mask(x, 80) for x in ends.tolist()])[:, None]
    pattern = sparse.documents(ends) & sparse.causal
    same_as_dense(inputs(queries=80), lambda q, k, v: sparse.attention(q, k, v, pattern), mask.tril(), EXACT)


def test_autocast_casts_as_for_torchs_attention():
    q, k, v, _ = (x.detach() for x in inputs(groups=4, queries=40, width=8, values=8, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        found = sparse.attention(q, k.bfloat16(), v, sparse.causal)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k.bfloat16(), v, is_causal=True)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)


def test_documents_are_each_alone():
    q, k, v, _ = inputs(1, queries=90, dtype=torch.float32)
    out = sparse.attention(q, k, v, sparse.documents(torch.tensor([0, 17, 90])) & sparse.causal)
    alone = sparse.attention(*(x[:, :, 17:] for x in (q, k, v)), sparse.causal)
    torch.testing.assert_close(out[:, :, 17:], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("block, queries", [(16, 16), (64, 64), (32, 7), (100, 130), (1, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_index_names_blocks(block, queries, is_causal):
    num = 150
    blocks, rows = -(-num // block), -(-num // queries)
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(-1, blocks, (2, 4, rows, 3), generator=generator)
    index[0, 0, 0] = -1  # none at all
    index[0, 1, 0] = 0  # one block, named again
    named = (index[..., None] == torch.arange(blocks)).any(3)
    mask = named.repeat_interleave(block, 3).repeat_interleave(queries, 2)[:, :, :num, :num]
    mask = mask.tril() if is_causal else mask
    given = inputs(queries=num)

    def attend(q, k, v):
        return sparse.attention(q, k, v, sparse.chosen(index, block, queries=queries), is_causal=is_causal)

    same_as_dense(given, attend, mask, EXACT)


def test_the_logsumexp_has_a_gradient():
    i, j = places(100)
    *qkv, grad = inputs(queries=100)
    run = lambda q, k, v: with_logsumexp(q, k, v, sparse.sliding_window(30))  # noqa: E731
    mask = (i - j).abs() < 30
    found, expected = run(*qkv), attended(*qkv, mask)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=EXACT)
    of_sums = grad[..., 0]
    for a, b in zip(
        torch.autograd.grad(found, qkv, (grad, of_sums)),
        torch.autograd.grad(expected, qkv, (grad, of_sums)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=EXACT)


def test_dropout_is_a_function_of_its_draw(monkeypatch):
    given = inputs(queries=120, dtype=torch.float64)
    *qkv, grad = given

    def run():
        torch.manual_seed(3)
        out = sparse.attention(*qkv, sparse.sliding_window(50), dropout=0.3)
        return out, *torch.autograd.grad(out, qkv, grad)

    first, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(native, "missing", lambda: "no library")
    for a, b in zip(first, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=EXACT)


def test_dropout_drops_its_part():
    ones = torch.ones(1, 1, 512, 1, dtype=torch.float64)
    torch.manual_seed(0)
    eye = torch.eye(512, dtype=torch.float64)[None, None]
    weights = sparse.attention(ones, ones, eye, sparse.everything, dropout=0.25) * 512  # each pair's factor
    assert weights.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (weights == 0).double().mean() == pytest.approx(0.25, abs=0.005)
    assert (weights == 0).double().mean(-1).std() == pytest.approx((0.25 * 0.75 / 512) ** 0.5, rel=0.2)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_differentiates_attention():
    *qkv, grad = inputs(queries=20)

    def loss(q, k, v):
        return (sparse.attention(q, k, v, sparse.sliding_window(7)) * grad).sum()

    expected = torch.autograd.grad(loss(*qkv), qkv)
    plain = [x.detach() for x in qkv]
    assert_same_trees(torch.func.grad(loss, argnums=(0, 1, 2))(*plain), expected)
    by_row = torch.func.vmap(torch.func.grad(lambda q, k, v: sparse.attention(q, k, v, sparse.causal).sum()))
    rows = by_row(*(x[:, None] for x in plain))
    alone = torch.func.grad(lambda q, k, v: sparse.attention(q, k, v, sparse.causal).sum())(*plain)
    torch.testing.assert_close(rows[:, 0], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:torch.searchsorted")
def test_vmap_takes_documents_of_each_row():
    q, k, v = (x.detach()[:, None] for x in inputs(batch=3, queries=50)[:3])
    ends = torch.tensor([[0, 10, 50], [0, 20, 50], [0, 30, 45]])
    attend = lambda q, k, v, ends: sparse.attention(q, k, v, sparse.documents(ends) & sparse.causal)  # noqa: E731
    expected = attend(q[:, 0], k[:, 0], v[:, 0], ends)
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v, ends)[:, 0], expected, rtol=0, atol=EXACT)


def test_there_is_no_second_derivative():
    *qkv, grad = inputs(queries=20)
    out = sparse.attention(*qkv, sparse.causal)
    (slope,) = torch.autograd.grad(out, qkv[:1], grad, create_graph=True)
    with pytest.raises(NotImplementedError, match="block_attention has no second derivative"):
        slope.sum().backward()


@pytest.mark.parametrize("scale", [float("inf"), float("-inf")])
def test_a_scale_is_finite(scale):
    with pytest.raises(ValueError, match=f"scale must be a finite number, got {scale}"):
        sparse.attention(*inputs(queries=40)[:3], sparse.causal, scale=scale)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[0], k, v, sparse.causal), r"q must be \[batch, heads"),
        (lambda q, k, v: (q, k.float(), v, sparse.causal), "must be of one dtype"),
        (lambda q, k, v: (q, k[:, :, :5], v, sparse.causal), r"expected q \[B, H, L, D\]"),
        (lambda q, k, v: (q[:, :3], k, v, sparse.causal), "a multiple of the number of key heads; got 3 and 2"),
        (lambda q, k, v: (q, k, v, sparse.layout(sparse.causal, 20)), "the layout was made for 1 heads, 20 queries"),
        (lambda q, k, v: (q, k, v, sparse.chosen(torch.zeros(2, 4, 2, 1).long(), 64)), r"or 1, 1, k\] for 40 queries"),
        (lambda q, k, v: (q, k, v, sparse.chosen(torch.full((2, 4, 1, 1), 1), 64)), "names block 1 of keys"),
        (lambda q, k, v: (q, k, v, sparse.documents(torch.tensor([0, 3, 2, 40]))), "must start at 0 and never"),
        (lambda q, k, v: (q, k, v, sparse.documents(torch.tensor([0, 41]))), "ends at 41, but a row has only 40"),
        (lambda q, k, v: (q, k, v, sparse.documents(torch.zeros(3, 2).long())), "has 3 rows, but the batch has 2"),
        (
            lambda q, k, v: (q, k, v, sparse.documents(torch.tensor([0, 50, 41])) | sparse.causal),
            "must start at 0 and never decrease",
        ),
        (lambda q, k, v: (q, k, v, sparse.documents(torch.tensor([0, 41])) | sparse.causal), "ends at 41, but a row"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v, sparse.causal), "at least one head and a width of 1"),
        (lambda q, k, v: (q, k, v, torch.ones(40, 40).bool()), "write sparse.pattern"),
        (lambda q, k, v: (q, k, v, sparse.padding(torch.ones(3, 40).long())), r"expected a mask \[2 or 1, 40\]"),
        (
            lambda q, k, v: (q, k, v, sparse.padding(torch.ones(2, 40).bool()) | sparse.causal),
            "combined with .* by & only",
        ),
        (lambda q, k, v: (q, k, v, torch.zeros(2, 4, 1, 1).long()), r"write sparse.chosen\(index, block\)"),
        (lambda q, k, v: (q, k, v, lambda h, i, j: i - j), "must return a tensor of booleans"),
        (lambda q, k, v: (q, k, v, lambda h, i, j: torch.ones(3).bool()), r"it returned \[3\]"),
        (lambda q, k, v: (q, k.to("meta"), v, sparse.causal), "must be on one device, got cpu, meta and cpu"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q, k, v, _ = inputs(queries=40)
    with pytest.raises((ValueError, TypeError), match=message):
        sparse.attention(*change(q, k, v))

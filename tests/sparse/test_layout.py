"""Layouts have the tiles that a pattern names, and are made without a square of pairs."""

import sys

import pytest
import torch

from zerofn import sparse

module = sys.modules["zerofn.sparse.layout"]  # the package has a function of that name


def tokens(found):
    """The mask of a layout's runs, booleans [heads, queries, keys]."""
    heads, queries, keys = found.sizes
    mask = torch.zeros(heads, queries, keys, dtype=torch.bool)
    for head in range(heads):
        for block, (a, b) in enumerate(zip(found.starts[head], found.starts[head][1:], strict=False)):
            rows = slice(block * found.tile, min((block + 1) * found.tile, queries))
            for first, num, row in found.runs[a:b].tolist():
                if row < 0:
                    mask[head, rows, first : first + num] = True
                    continue
                shift = torch.arange(rows.stop - rows.start)[:, None]
                mask[head, rows, first : first + num] = (found.bits[row, None, :num] >> shift & 1).bool()
    return mask


@pytest.mark.parametrize("queries, keys", [(1, 1), (64, 64), (130, 130), (200, 75), (75, 200)])
def test_runs_are_the_pattern(queries, keys):
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    for pattern, mask in (
        (sparse.everything, (i >= 0) & (j >= 0)),
        (sparse.causal, j <= i),
        (sparse.sliding_window(70) | sparse.sinks(5), ((i - j).abs() < 70) | (j < 5)),
        (sparse.prefix(66) | sparse.causal, (j <= i) | ((i < 66) & (j < 66))),
        (sparse.pattern(lambda head, query, key: (query * 5 + key * 3) % 11 < 4), (i * 5 + j * 3) % 11 < 4),
    ):
        found = sparse.layout(pattern, queries, keys)
        assert torch.equal(tokens(found)[0], mask)
        assert found.attended == int(mask.sum())
        tiles = torch.nn.functional.pad(mask, (0, -keys % 64, 0, -queries % 64))
        tiles = tiles.unflatten(1, (-1, 64)).unflatten(0, (-1, 64))
        touched = tiles.any(3).any(1)
        assert torch.equal(found.status[0] > 0, touched)
        full = torch.nn.functional.pad(torch.ones_like(mask), (0, -keys % 64, 0, -queries % 64))
        area = full.unflatten(1, (-1, 64)).unflatten(0, (-1, 64)).sum((1, 3))
        assert found.computed == int((area * touched).sum())


def test_heads_are_alike_unless_a_function_tells_them_apart():
    assert sparse.layout(sparse.causal, 100, heads=4).sizes.heads == 1
    alike = sparse.pattern(lambda head, query, key: key <= query)
    assert sparse.layout(alike, 100, heads=4).sizes.heads == 1
    apart = sparse.pattern(lambda head, query, key: key <= query - head)
    found = sparse.layout(apart & sparse.sliding_window(30), 100, heads=4)
    assert found.sizes.heads == 4
    assert [int(x.sum()) for x in tokens(found)] == sorted((int(x.sum()) for x in tokens(found)), reverse=True)


def test_a_function_never_sees_all_pairs(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 1 << 14)
    seen = []

    def near(head, query, key):
        allowed = (query - key).abs() < 100
        seen.append(allowed.numel())
        return allowed

    assert sparse.layout(near, 1000).attended == sparse.layout(sparse.sliding_window(100), 1000).attended
    assert max(seen) <= 1 << 14
    before = len(seen)
    sparse.layout(sparse.pattern(near) & sparse.sliding_window(10), 1000)  # nothing far from the diagonal is asked for
    assert sum(seen[before:]) < 1000 * 1000 / 4


def test_layouts_say_what_they_are():
    found = sparse.layout(sparse.sliding_window(64) & sparse.causal, 256)
    assert repr(found) == "Layout of 256 queries and 256 keys, all heads: 7 of 16 tiles of 64, 43.8 % of the pairs"
    assert found.share == 7 / 16
    assert found._repr_html_().count("<rect") == 4  # a row's two tiles of the same shade are one


def test_pictures_show_heads_and_join_tiles():
    apart = sparse.pattern(lambda head, query, key: key <= query - head * 40)
    html = sparse.layout(apart, 64 * 66, heads=2)._repr_html_()
    assert html.count("<svg") == 2 and 'aria-label="head 1"' in html
    assert len(html) < 40_000


def test_what_is_no_pattern_is_refused():
    with pytest.raises(TypeError, match="& and | combine patterns"):
        sparse.causal & (lambda head, query, key: key < 3)
    with pytest.raises(TypeError, match="got function. For a function, write sparse.pattern"):
        (lambda head, query, key: key < 3) | sparse.causal
    with pytest.raises(TypeError, match="got Layout"):
        sparse.layout(sparse.causal, 4) & sparse.causal
    with pytest.raises(TypeError, match="got Blocks.*write is_causal=True"):
        sparse.chosen(torch.zeros(1, 1, 1, 1).long(), 64) & sparse.causal
    for make in (sparse.sliding_window, sparse.sinks, sparse.prefix):
        with pytest.raises(ValueError, match="must be 1 or more"):
            make(0)
    with pytest.raises(TypeError, match="must be int32 or int64"):
        sparse.documents(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"\[documents \+ 1\]"):
        sparse.documents(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"pass cu_seqlens \[documents \+ 1\]"):
        sparse.layout(sparse.documents(torch.tensor([[0, 4], [0, 4]])) | sparse.causal, 4)
    with pytest.raises(TypeError, match="int32 or int64"):
        sparse.chosen(torch.zeros(1, 1, 1, 1), 64)
    with pytest.raises(ValueError, match=r"\[batch, heads, blocks of queries, k\]"):
        sparse.chosen(torch.zeros(1, 1, 1).long(), 64)

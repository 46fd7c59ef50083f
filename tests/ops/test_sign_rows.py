"""Rows of signs: the library's passes beside torch's operations, and beside what `csrc/wire.h` says."""

import pytest
import torch

from tests.support.kernel_cases import chosen as chosen
from tests.support.kernel_cases import each_isa, wild
from zerofn.ops import cpu, native, sign_rows, wire_codes
from zerofn.ops import sign_sums as _ops  # noqa: F401  (defines zerofn::sign_send and its like)
from zerofn.ops.sign_rows import Mix, Signs, row_bytes
from zerofn.ops.wire_codes import BLOCKS

ops = torch.ops.zerofn
ROWS = 3


def rows_of(num, size, block, gaps=()):
    return Signs(torch.full((num, row_bytes(size, block)), 77, dtype=torch.uint8), size, block, gaps)


def ends(block):
    """Gaps at a start, inside a block, over a block and more, and at the end, of three rows of two blocks."""
    return [0, 3, block - 40, block - 8, 2 * block - 1, 3 * block + 2, 6 * block - 32, 6 * block]


def without_gaps(x, gaps):
    for a, b in zip(gaps[::2], gaps[1::2], strict=True):
        x[a:b] = 0
    return x


def same(a, b):
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def used(signs):
    """The bytes that mean something: rows are aligned."""
    return signs.rows[:, : signs.size // 8 + signs.size // signs.block * 2]


@each_isa
def test_elements_arrive_with_the_mean_magnitude_of_what_is_there(isa):
    for block in BLOCKS:
        gaps = ends(block)
        x = without_gaps(torch.randn(6 * block, generator=torch.Generator().manual_seed(block)), gaps)
        signs = rows_of(ROWS, 2 * block, block, gaps)
        sign_rows.encode(x, signs)
        found, there = sign_rows.decoded(signs), without_gaps(torch.ones(6 * block), gaps).view(-1, block)
        scale = x.view(-1, block).double().abs().sum(1) / there.double().sum(1).clamp(min=1)
        want = torch.where(x.view(-1, block) < 0, -1.0, 1.0) * scale[:, None] * there
        assert torch.allclose(found.view(-1, block).double(), want, rtol=2**-8, atol=0)


def cases(block):
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        added, before, left = (wild(6 * block, k) for k in range(3))
        added, before[block : 2 * block], left[3 * block + 9] = added.clamp(-6e4, 6e4).to(kind), 0.0, torch.nan
        yield added, before, left


@each_isa
@pytest.mark.parametrize("gaps", [False, True], ids=["no gaps", "gaps"])
def test_what_is_mixed_is_sent_and_nothing_is_lost(gaps, isa, monkeypatch):
    for block in BLOCKS:
        between, how = ends(block) if gaps else [], Mix(0.1, 0.45, 0.3)
        for added, before, left in cases(block):
            for x in (added, before, left):
                without_gaps(x, between)
            sent, signs = rows_of(ROWS, 2 * block, block, between), rows_of(ROWS, 2 * block, block, between)
            sign_rows.encode(before, signs)
            s = sign_rows.decoded(signs)
            x = without_gaps(added.float() * 0.1 + ((s * 0.45 + (before - s) * 0.3) + left), between)
            wanted, rest = rows_of(ROWS, 2 * block, block, between), left.clone()
            sign_rows.encode(x, wanted)
            sign_rows.mix(added, before, rest, how, sent, rest)  # in the place of what was left
            assert torch.equal(used(sent), used(wanted)), block
            assert same(rest, x - sign_rows.decoded(sent)), block
            sign_rows.mix(added, signs, left, how, sent, other := torch.empty_like(left))  # the rest is zero then
            again, expected = rows_of(ROWS, 2 * block, block, between), torch.empty_like(left)
            with monkeypatch.context() as without:
                without.setattr(cpu, "missing", lambda: "not there")
                sign_rows.mix(added, signs, left, how, again, expected)
            assert torch.equal(used(sent), used(again)) and same(other, expected), block


@each_isa
def test_rows_of_ranks_are_added_in_float32_and_in_their_order(isa, monkeypatch):
    for block in BLOCKS:
        for num, gaps in ((1, []), (2, [5, 13]), (5, [block, 2 * block - 40])):
            each = [wild(2 * block, k, 100.0**k) for k in range(num)]
            came = rows_of(num, 2 * block, block, gaps)
            for x, row in zip(each, came.rows, strict=True):
                sign_rows.encode(without_gaps(x, gaps), came.like(row[None]))
            before, left = (without_gaps(wild(2 * block, k), gaps) for k in (7, 8))
            total = sign_rows.decoded(came.like(came.rows[:1]))
            for row in came.rows[1:]:
                total = total + sign_rows.decoded(came.like(row[None]))
            how, sent = Mix(1.0, 0.0, 0.9), rows_of(1, 2 * block, block, gaps)
            sign_rows.mix(came, before, left, how, sent, rest := torch.empty_like(left))
            wanted, expected = rows_of(1, 2 * block, block, gaps), torch.empty_like(left)
            sign_rows.mix(total, before, left, how, wanted, expected)
            assert torch.equal(used(sent), used(wanted)) and same(rest, expected)
            with monkeypatch.context() as without:
                without.setattr(cpu, "missing", lambda: "not there")
                sign_rows.mix(came, before, left, how, wanted, expected)
            assert torch.equal(used(sent), used(wanted)) and same(rest, expected)


@each_isa
def test_rows_have_the_codes_of_the_wires_signs(isa):
    x, signs = wild(4096, 5), rows_of(2, 2048, 512)
    sign_rows.encode(x, signs)
    for part, row in zip(x.view(2, -1), signs.codes(), strict=True):
        out = wire_codes.Codes(torch.empty(256, dtype=torch.uint8), torch.empty(4).bfloat16(), "sign", 512)
        wire_codes.encode(part, out)
        assert torch.equal(out.codes, row.codes) and torch.equal(out.scales, row.scales)


@pytest.mark.parametrize("threads", [3])
def test_results_do_not_depend_on_the_number_of_threads(threads):
    size = 1 << 18
    given = [wild(size, k) for k in range(3)]
    found = []
    for num in (1, threads):
        before = torch.get_num_threads()
        torch.set_num_threads(num)
        try:
            found.append(ops.sign_send(given[0], given[1], given[2], None, 0.1, 0.45, 2, 2048, [0, 40, 2048, 2050]))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_step_that_is_skipped_leaves_what_was_left_out():
    size = 8 * 2048  # of a row, which has no bytes behind its scales
    left, added, before = (wild(2 * size, k) for k in range(3))
    for finite in (torch.tensor(False), torch.tensor(True), None):
        kept, wanted = left.clone(), left if finite is not None and not finite else None
        how = (added, before, finite, 0.1, 0.45, 2, 2048, [])
        fresh, rows = ops.sign_send(left, *how)
        assert torch.equal(ops.sign_send_(kept, *how), rows) and torch.equal(kept, fresh)
        assert same(fresh, wanted) if wanted is not None else not same(fresh, left)
        how = (rows, before, finite, 0.9, size, 2048, [])
        fresh, row = ops.sign_sum(left[:size], *how)
        kept = left[:size].clone()
        assert torch.equal(ops.sign_sum_(kept, *how), row) and torch.equal(kept, fresh)


def test_what_does_not_fit_is_refused():
    x = torch.ones(4096)
    with pytest.raises(ValueError, match="signs: left must have 6144 elements, got 4096"):
        sign_rows.mix(x, x, x, Mix(1, 0, 0), rows_of(3, 2048, 2048), x)
    with pytest.raises(ValueError, match=r"in blocks of 100, for 4096 elements; a block of 128, 256, .* divides a row"):
        sign_rows.encode(x, rows_of(1, 4096, 2048)._replace(block=100))
    with pytest.raises(ValueError, match="signs: left must have 4096 elements, got 5"):
        sign_rows.mix(x, x, torch.ones(5), Mix(1, 0, 0), rows_of(2, 2048, 2048), x)
    with pytest.raises(TypeError, match=r"signs: added must be torch.float32 or .*, got torch.float64"):
        sign_rows.mix(x.double(), x, x, Mix(1, 0, 0), rows_of(2, 2048, 2048), x)


def test_without_the_library_nothing_is_asked_of_it(monkeypatch):
    monkeypatch.setattr(cpu, "missing", lambda: "not there")
    monkeypatch.setattr(native, "kernel", lambda name: pytest.fail(name))
    left = wild(4096, 0)
    assert ops.sign_send(left, left, left, None, 0.1, 0.45, 2, 2048, [])[1].shape == (2, row_bytes(2048, 2048))

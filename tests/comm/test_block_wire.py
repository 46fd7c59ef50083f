"""Units in blocks of codes between ranks, beside torch's own cast of each scaled block."""

import pytest
import torch

from zerofn.comm.block_wire import BlockWire, block_wire, name_of
from zerofn.comm.wire import nbytes_on_wire, rounded

SIZE = 12 * 256
RUNS = [((0, 12),), ((1, 2), (5, 11)), ((0, 4), (11, 12)), ((3, 9),)]


def numbers(size=SIZE, dtype=torch.bfloat16):
    rng = torch.Generator().manual_seed(0)
    return (torch.randn(size, generator=rng) * torch.exp(2 * torch.randn(size, generator=rng))).to(dtype)


def expected(x, format, coded):
    """By torch: a block is scaled by the power of two that brings its largest element to at most 448, or so that it is
    an integer of at most 127 or 7.
    """
    out = x.clone().view(-1, 256)
    for a, b in coded:
        blocks = out[a:b].float()
        top = blocks.abs().amax(1, keepdim=True)
        if format == "fp8":
            scale = torch.exp2(torch.floor(torch.log2(448.0 / top)))
            out[a:b] = ((blocks * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)
        else:
            scale = (top / (127 if format == "int8" else 7)).bfloat16().float()
            out[a:b] = ((blocks * (1 / scale)).round() * scale).to(x.dtype)
    return out.view(-1)


@pytest.mark.parametrize("coded", RUNS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_what_arrives_is_torchs_cast_of_the_coded_blocks(format, coded, ranks):
    how, x = BlockWire(format, 256, coded), numbers()
    whole = torch.full_like(x, torch.nan)
    rows = how.rows_in(whole, ranks)
    for rank, shard in enumerate(x.chunk(ranks)):
        how.encode_row(shard, rows, rank)
    how.decode_rows(whole, rows)
    assert torch.equal(whole, expected(x, format, coded)) and not torch.equal(whole, x)
    assert torch.equal(how.rounded(x), whole)
    last = SIZE // ranks * (ranks - 1)
    assert torch.equal(how.rounded(x[last:], last), whole[last:])
    assert torch.equal(how.rounded(torch.stack([x, 2 * x]))[0], whole)
    name = f"{format}.256:" + ",".join(f"{a}-{b}" for a, b in coded)
    assert block_wire(name) == how and torch.equal(rounded(x, name), whole)
    assert nbytes_on_wire(x.chunk(ranks)[0], name, ranks) == rows.shape[1]
    mine = x.clone()
    mine[: SIZE // ranks * (ranks - 1)] = torch.nan
    rows[-1] = how.rows_of(mine, ranks, ranks - 1)[-1]
    how.decode_rows(mine, rows)
    assert torch.equal(mine, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coded", RUNS, ids=str)
def test_sums_of_a_part_are_in_float32_and_in_order(coded, dtype):
    """Of ranks 1 of 3's shard, of a part of the unit that begins later."""
    how, part, start = BlockWire("int8", 256, coded), 2 * 256, 3 * 256
    each = [numbers(3 * part, dtype) * 3**k for k in range(3)]
    rows = [how.encode_all(x.view(3, -1), start)[1] for x in each]
    found = torch.empty(part, dtype=dtype)
    how.sum_(found, rows, start + part)
    arrived = [how.rounded(x, start)[part : 2 * part].float() for x in each]
    if dtype is not torch.float32:  # in float32, before they are rounded to the dtype
        wide = BlockWire("int8", 256, coded)
        coded_only = [wide.rounded(x.float(), start)[part : 2 * part] for x in each]
        arrived = coded_only
    assert torch.equal(found, (arrived[0] + arrived[1] + arrived[2]).to(dtype))


def test_a_row_has_its_codes_and_two_bytes_a_block():
    how = BlockWire("fp8", 256, ((0, 6), (8, 9)))
    assert how.row_bytes(SIZE, 2, 1) == 4368 >= 7 * 258 + 5 * 512 > 4368 - 16
    assert how.row_bytes(SIZE // 2, 2, 2) == 2832 >= max(6 * 258, 258 + 5 * 512) > 2832 - 16
    half = BlockWire("int4", 256, ((0, 12),))
    assert half.row_bytes(SIZE, 4, 1) == 12 * 130 + 8
    assert how.row_bytes(256, 4, 1, 6 * 256) == 1024 and how.row_bytes(256, 4, 2, 7 * 256) == 1024


def test_codes_are_a_fourth_and_an_eighth_of_float32():
    whole = ((0, 1 << 12),)
    sizes = {form: BlockWire(form, 256, whole).row_bytes(1 << 20, 4, 1) / (4 << 20) for form in ("int8", "fp8", "int4")}
    assert sizes["int8"] == sizes["fp8"] < 0.27 and sizes["int4"] < 0.15


def test_what_is_not_finite_or_zero_arrives_so():
    how, x = BlockWire("fp8", 256, ((0, 4),)), torch.ones(4 * 256, dtype=torch.bfloat16)
    x[3], x[300], x[512:768] = torch.inf, torch.nan, 0.0
    found = how.rounded(x).view(4, 256)
    assert not found[:2].isfinite().any() and not found[2].any() and found[3].eq(1).all()


def test_blocks_without_a_part_of_what_is_plain_are_coded():
    assert name_of("fp8", 256, 2048, [(512, 800), (1000, 1010)]) == "fp8.256:0-2,4-8"
    assert name_of("int4", 128, 1024, []) == "int4.128:0-8"
    assert name_of("int8", 256, 1024, [(0, 256), (256, 300), (700, 710)]) == "int8.256:3-4"
    assert name_of("int8", 256, 512, [(10, 500)]) == name_of("int8", 256, 512, [(0, 1), (256, 257)]) == ""
    assert name_of("int8", 256, 512, [(8, 8)]) == "int8.256:0-2"

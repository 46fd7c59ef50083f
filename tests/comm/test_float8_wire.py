"""Weights as float8 between ranks, beside torch's own cast of each scaled block."""

import pytest
import torch

from zerofn.comm.float8_wire import Fp8Wire, fp8_wire, name_of
from zerofn.comm.wire import nbytes_on_wire, rounded

SIZE = 12 * 256


def numbers(size=SIZE):
    rng = torch.Generator().manual_seed(0)
    return (torch.randn(size, generator=rng) * torch.exp(2 * torch.randn(size, generator=rng))).bfloat16()


def expected(x, coded):
    """By torch: a block is scaled by the power of two that brings its largest element to at most 448."""
    out = x.clone().view(-1, 256)
    for a, b in coded:
        scale = torch.exp2(torch.floor(torch.log2(448.0 / out[a:b].abs().amax(1, keepdim=True).float())))
        out[a:b] = ((out[a:b].float() * scale).to(torch.float8_e4m3fn).float() / scale).bfloat16()
    return out.view(-1)


@pytest.mark.parametrize("coded", [((0, 12),), ((1, 2), (5, 11)), ((0, 4), (11, 12)), ((3, 9),)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_arrives_is_torchs_cast_of_the_coded_blocks(coded, ranks):
    how, x = Fp8Wire(coded), numbers()
    whole = torch.full_like(x, torch.nan)
    rows = how.rows_in(whole, ranks)
    for rank, shard in enumerate(x.chunk(ranks)):
        how.encode_row(shard, rows, rank)
    how.decode_rows(whole, rows)
    assert torch.equal(whole, expected(x, coded)) and not torch.equal(whole, x)
    assert torch.equal(how.rounded(x, 0), whole) and torch.equal(how.rounded(whole, 0), whole)
    last = SIZE // ranks * (ranks - 1)
    assert torch.equal(how.rounded(x[last:], last), whole[last:])
    name = "fp8:" + ",".join(f"{a}-{b}" for a, b in coded)
    assert fp8_wire(name) == how and torch.equal(rounded(x, name), whole)
    assert nbytes_on_wire(x.chunk(ranks)[0], name, ranks) == rows.shape[1]


def test_a_row_has_a_byte_an_element_and_one_a_block():
    how = Fp8Wire(((0, 6), (8, 9)))
    assert how.row_bytes(SIZE, 1) == 4368 >= 7 * 257 + 5 * 512 > 4368 - 16
    assert how.row_bytes(SIZE // 2, 2) == 2832 >= max(6 * 257, 257 + 5 * 512) > 2832 - 16


def test_what_is_not_finite_or_zero_arrives_so():
    how, x = Fp8Wire(((0, 4),)), torch.ones(4 * 256, dtype=torch.bfloat16)
    x[3], x[300], x[512:768] = torch.inf, torch.nan, 0.0
    found = how.rounded(x, 0).view(4, 256)
    assert not found[:2].isfinite().any() and not found[2].any() and found[3].eq(1).all()


def test_whole_blocks_of_weights_are_coded():
    assert name_of([(0, 512), (512, 800), (1000, 2048)]) == "fp8:0-3,4-8"
    assert name_of([(10, 500)]) == name_of([]) == ""

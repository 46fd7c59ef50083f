"""How the CPU kernels store numbers: split masters, 8-bit blocks; and what they read: norms, checksums."""

import pytest
import torch

from tests.support import kernel_cases as cases
from zerofn.ops import cpu, native, reference

each_isa, chosen = cases.each_isa, cases.chosen


def floats(bits):
    return bits.view(torch.float32)


# --- split -------------------------------------------------------------------------------------


@each_isa
def test_split_and_join_are_exact_for_every_upper_half(isa):
    """All 65,536 upper halves, each with 64 lower ones, the corners among them."""
    rng = torch.Generator().manual_seed(0)
    low = torch.randint(0, 1 << 16, (64,), generator=rng, dtype=torch.int64)
    low[:8] = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    bits = ((torch.arange(-(1 << 15), 1 << 15)[:, None] << 16) + low).int().view(-1)
    x = floats(bits)
    hi, lo = cpu.split(x)
    nan = x.isnan()
    assert torch.equal(cpu.join(hi, lo).view(torch.int32)[~nan], bits[~nan])
    usual = ~nan & ((bits & 0xFFFF) != 0x8000)  # ties go away from zero here, and to even in torch
    assert torch.equal(hi[usual], x.bfloat16()[usual])
    assert (hi[nan].view(torch.int16) == 0x7FC0).all() and (lo[nan] == 0).all()


@each_isa
def test_split_equals_torchs_operations(isa):
    x = cases.wild(5003, 3)
    x[::50], x[1::50], x[2::50] = torch.inf, -torch.inf, torch.nan
    expected = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    reference.split(x, expected)
    assert all(map(cases.same_bits, cpu.split(x), expected))
    whole = torch.empty_like(x)
    reference.join(*expected, whole)
    assert cases.same_bits(cpu.join(*expected), whole) and cases.same_bits(whole, x)


# --- bfloat16 ----------------------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("size", [0, 1, 31, 5003, 3 * (1 << 16) + 5])
def test_nearest_bfloat16_are_torchs(size, first, past_caches, isa, monkeypatch):
    """`first`: an output whose address vectors do not divide. It is written through the caches."""
    if past_caches:
        monkeypatch.setattr(native, "_FAR", 0)
    x = cases.wild(size + first, 0)[first:]
    x[::50], x[1::70], x[2::90] = torch.nan, torch.inf, 1 + 2**-8  # the last is between two numbers of bfloat16
    out, want = torch.full((size + first + 8,), -1.0, dtype=torch.bfloat16), x.bfloat16()
    cpu.to_bf16(x, out[first : size + first])
    found = out[first : size + first]
    assert torch.equal(found.view(torch.int16), want.view(torch.int16))  # and the bits of each NaN
    assert (out[size + first :] == -1).all() and (out[:first] == -1).all()
    whole = torch.full((size + first + 8,), -1.0)
    cpu.sum_bf16([found, found], whole[first : size + first])
    assert torch.equal(whole[first : size + first].nan_to_num(0.5), (2 * want.float()).nan_to_num(0.5))
    assert (whole[size + first :] == -1).all() and (whole[:first] == -1).all()


# --- sums of bfloat16 --------------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("size", [0, 1, 31, 5003, 3 * (1 << 16) + 5])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_sums_of_bfloat16_are_those_of_fp32_in_order(num_rows, size, isa):
    rows = [cases.wild(size, k).bfloat16() for k in range(num_rows)]
    for k, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        rows[0][k::50], rows[-1][2 * k :: 70] = value, -value
    want = rows[0].float()
    for row in rows[1:]:
        want = want + row.float()
    out, plain = torch.full((size + 8,), -1.0), torch.empty(size)
    cpu.sum_bf16(rows, out[:size])
    reference.sum_bf16(rows, plain)
    assert torch.equal(out[:size].nan_to_num(0.5), want.nan_to_num(0.5)) and torch.equal(
        out[:size].isnan(), want.isnan()
    )
    assert torch.equal(plain.nan_to_num(0.5), want.nan_to_num(0.5)) and (out[size:] == -1).all()


@pytest.mark.parametrize(
    "rows, out, why",
    [
        ([], torch.ones(3), "there are no rows"),
        ([torch.ones(2).bfloat16()], torch.ones(3), "a row must have 3 elements"),
        ([torch.ones(3)], torch.ones(3), "a row must be torch.bfloat16"),
        ([torch.ones(6).bfloat16()[::2]], torch.ones(3), "must be contiguous"),
    ],
)
def test_rows_that_cannot_be_summed(rows, out, why):
    with pytest.raises((TypeError, ValueError), match=why):
        cpu.sum_bf16(rows, out)


# --- 8-bit blocks ------------------------------------------------------------------------------


def every_code(scale, signed):
    """The 256 codes in one block, and its scale."""
    return torch.arange(256, dtype=torch.uint8), torch.tensor([scale])


@each_isa
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("power", [-94, -93, -60, -1, 0, 1, 77, 126, 127])
def test_what_was_decoded_goes_back_to_its_code(power, signed, isa):
    codes, scales = every_code(2.0**power, signed)
    x = cpu.decode(codes, scales, signed)
    again = cpu.encode(x, signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    top = torch.tensor(127 if signed else 255)
    assert x[top] == 2.0**power and x[0] == (0.0 if signed else 2.0 ** (power - 32) * 1.125)
    assert (x[1 : top + 1] >= 2.0**-126).all() and (x[1 : top + 1].diff() > 0).all()
    for random in (0, 1, 0x7FFFF, 0xFFFFF):  # however the rounding falls
        out = torch.empty_like(codes), torch.empty_like(scales)
        reference.encode(x, signed, out, random)
        assert torch.equal(out[0], codes)


@each_isa
@pytest.mark.parametrize("signed", [True, False])
def test_encoding_equals_torchs_operations(signed, isa):
    x = cases.wild(10_007, 4)
    x = x if signed else x.abs()
    x[300], x[700], x[1100] = torch.inf, torch.nan, 3e38
    x[2048:2560] = 0
    x[4096:4352] *= 1e-38
    expected = torch.empty(x.numel(), dtype=torch.uint8), torch.empty(40)
    reference.encode(x, signed, expected)
    codes, scales = cpu.encode(x, signed)
    assert torch.equal(codes, expected[0]) and cases.same_bits(scales, expected[1])
    decoded = torch.empty_like(x)
    reference.decode(codes, scales, signed, decoded)
    assert cases.same_bits(cpu.decode(codes, scales, signed), decoded)


@each_isa
@pytest.mark.parametrize("signed", [True, False])
def test_encoding_is_near(signed, isa):
    """Off by at most 1/16, down to 2^-14 (m) and 2^-30 (v) of the largest; zero stays zero, or as near as v comes."""
    rng = torch.Generator().manual_seed(6)
    x = torch.randn(100_000, generator=rng) * torch.exp(torch.randn(100_000, generator=rng))
    x = x if signed else x.square()
    x[::97] = 0.0
    decoded = cpu.decode(*cpu.encode(x, signed), signed)
    largest = torch.nn.functional.pad(x.abs(), (0, 96)).view(-1, 256).amax(1).repeat_interleave(256)[: x.numel()]
    inside = x.abs() >= largest * 2.0 ** (-14 if signed else -30)
    assert inside.sum() > 90_000
    assert ((decoded - x).abs() <= x.abs() / 16)[inside].all()
    assert (decoded[x == 0] <= (0 if signed else 2.0**-31.8 * 2 * largest[x == 0])).all()
    tiny = torch.full((256,), 1e-20)
    tiny[0] = 1.0
    assert (cpu.encode(tiny, signed)[0][1:] == 0).all()


def test_what_is_not_finite_spoils_its_block():
    x = torch.ones(768)
    x[300], x[600] = torch.inf, torch.nan
    decoded = cpu.decode(*cpu.encode(x, True), True)
    assert (decoded[:256] == 1).all() and (decoded[256:512] == torch.inf).all() and decoded[512:].isnan().all()


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_rounding_is_unbiased(signed):
    """The mean of 2^20 roundings is within five of its standard errors of the number."""
    for value in (0.3, 0.7001, 0.99, 1e-3):
        num = 1 << 20
        x = torch.full((num,), value)
        x[::256] = 1.0
        random = reference.draws(7, 0, num, 1 - signed) >> 12
        out = torch.empty(num, dtype=torch.uint8), torch.empty(num // 256)
        reference.encode(x, signed, out, random)
        decoded = cpu.decode(*out, signed).double().view(-1, 256)[:, 1:]
        error = decoded.std() / decoded.numel() ** 0.5
        assert decoded.unique().numel() == 2
        assert abs(decoded.mean() - torch.tensor(value).double()) < 5 * error


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-30])
def test_bf16_stochastic_rounding_is_unbiased(value):
    num = 1 << 20
    rounded = reference.to_bf16(torch.full((num,), value), reference.draws(3, 0, num, 0) >> 16).double()
    assert rounded.unique().numel() == 2
    assert abs(rounded.mean() - torch.tensor(value).double()) < 5 * rounded.std() / num**0.5


def test_bf16_stochastic_rounding_makes_no_inf_below_the_last_step():
    largest = torch.tensor([3.38e38, -3.38e38, torch.inf, -torch.inf, torch.nan])
    rounded = reference.to_bf16(largest, torch.tensor([0xFFFF] * 5))
    assert rounded[:2].isfinite().all() and rounded[2:4].tolist() == [torch.inf, -torch.inf] and rounded[4].isnan()


# --- norms and checksums -----------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("dtype", cases.GRADIENTS)
def test_norms_are_torchs(dtype, isa):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # torch cuts long sums among threads
    try:
        parts = [
            torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
            for n in [*range(1, 41), 1000, 4099, 100_003]
        ]
        for x, (norm, extreme) in zip(parts, cpu.norm2_and_extreme(parts), strict=True):
            assert norm == torch.linalg.vector_norm(x, dtype=torch.float32).item()
            assert extreme == x.abs().max().item()
    finally:
        torch.set_num_threads(before)
    assert cpu.norm2_and_extreme([torch.zeros(0, dtype=dtype)]) == [(0.0, 0.0)]


@each_isa
@pytest.mark.parametrize("dtype", cases.GRADIENTS)
@pytest.mark.parametrize("place", [0, 77, 1022])
def test_what_is_not_finite_shows_in_the_extreme(dtype, place, isa):
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(1023, dtype=dtype)
        x[place] = bad
        extreme = torch.tensor(cpu.norm2_and_extreme([x])[0][1])
        assert extreme.isnan() if bad != bad else extreme == torch.inf


@each_isa
def test_checksums(isa):
    """Every ISA's is the portable one's; a changed bit, exchanged words, another length or a shift show."""
    rng = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (5000,), generator=rng, dtype=torch.uint8)
    for size in (0, 1, 3, 4, 255, 256, 257, 511, 5000):
        assert cpu.checksum(memory, size) == reference.checksum(memory.data_ptr(), size)
    assert cpu.checksum(memory.data_ptr(), 777) == cpu.checksum(memory, 777)
    seen = {cpu.checksum(memory), cpu.checksum(memory, 4999), cpu.checksum(memory[1:])}
    for place in range(0, 5000, 7):
        for bit in range(8):
            memory[place] ^= 1 << bit
            seen.add(cpu.checksum(memory))
            memory[place] ^= 1 << bit
    words = memory.view(torch.int32)
    for distance in (1, 2, 8, 64, 128, 1024):
        swapped = words.clone()
        swapped[3], swapped[3 + distance] = words[3 + distance], words[3]
        seen.add(cpu.checksum(swapped))
    zeros = torch.zeros(4096, dtype=torch.uint8)
    seen |= {cpu.checksum(zeros, size) for size in range(4097)}
    assert len(seen) == 3 + 715 * 8 + 6 + 4097


def test_checksum_asks_for_a_length():
    with pytest.raises(ValueError, match="must say how many bytes"):
        cpu.checksum(1234)
    with pytest.raises(ValueError, match="has 4 bytes, and 5 are asked for"):
        cpu.checksum(torch.zeros(1), 5)

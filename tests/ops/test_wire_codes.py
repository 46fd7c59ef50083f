"""What ranks send in 8, 4 or 1 bits, beside torch's casts, integers of float64, and the same in torch's operations."""

import itertools

import pytest
import torch

from tests.support import kernel_cases as cases
from zerofn.ops import cpu, native, wire_codes
from zerofn.ops.wire_codes import BLOCKS, FORMATS, Codes, Draws, bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_isa, chosen = cases.each_isa, cases.chosen


def room(size, format, block):
    codes = torch.full((size * bits(format) // 8,), 99, dtype=torch.uint8)
    return Codes(codes, torch.full((size // block,), 99.0, dtype=torch.bfloat16), format, block)


def encoded(x, format, block, draws=None):
    out = room(x.numel(), format, block)
    wire_codes.encode(x, out, draws)
    return out


def decoded(given, dtype=torch.float32):
    out = torch.full((given.size,), -1.0, dtype=dtype)
    wire_codes.decode(given, out)
    return out


def numbers(size, seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=rng) * torch.exp(2 * torch.randn(size, generator=rng))
    return x.to(dtype)


def by_float64(x, format, block):
    """A block's elements over its scale, which float64 and torch's cast to bfloat16 decide."""
    blocks = x.double().view(-1, block)
    top = blocks.abs().amax(1, keepdim=True)
    if format == "sign":
        scale = blocks.abs().mean(1, keepdim=True).float().bfloat16().double()
        return torch.where(blocks < 0, -scale, scale).view(-1), scale
    if format == "fp8":
        scale = torch.exp2(torch.ceil(torch.log2(top / 448)))
        return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).view(-1), scale
    most = 127 if format == "int8" else 7
    scale = (top.float() / most).bfloat16().double()
    return ((blocks / scale).round() * scale).view(-1), scale


@each_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_outputs_that_are_written_past_the_caches_are_the_same(format, dtype, isa, monkeypatch):
    x, block = numbers(3 << 16, dtype=dtype), 256
    kept = encoded(x, format, block)
    values, drawn, total = decoded(kept, dtype), encoded(x, format, block, Draws(7, 2)), torch.empty(len(x))
    wire_codes.sum_([kept, kept], total)
    monkeypatch.setattr(native, "_FAR", 0)
    for before, draws in ((kept, None), (drawn, Draws(7, 2))):
        again = encoded(x, format, block, draws)
        assert torch.equal(again.codes, before.codes) and torch.equal(again.scales, before.scales)
    assert torch.equal(decoded(kept, dtype), values)
    found = torch.empty(len(x) + 1)
    for out in (found[:-1], found[1:]):  # the latter's address is no multiple of a vector's bytes
        wire_codes.sum_([kept, kept], out)
        assert torch.equal(out, total)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_what_arrives_is_what_float64_says(format, dtype, isa):
    """Off by half a step at most; where two codes are equally near, or nearly so, either."""
    for block in BLOCKS:
        x = numbers(6 * block, dtype=dtype)
        want, scale = by_float64(x, format, block)
        found = decoded(encoded(x, format, block))
        far = (found.double() - want).abs().view(-1, block) / scale
        if format == "sign":  # bfloat16 may round the mean in float32 to the neighbour
            assert far.max() <= 2**-7, block
            continue
        assert (far > 1e-3).float().mean() < (0 if format == "fp8" else 2e-3) + 1e-9, block
        if format != "fp8":
            assert ((found.double() - x.double()).view(-1, block) / scale).abs().max() <= 0.5 + 1e-4
        top = x.float().abs().view(-1, block).amax(1)
        assert torch.allclose(found.abs().view(-1, block).amax(1), top, rtol=2**-8 if format != "fp8" else 1 / 16)


@each_isa
@pytest.mark.parametrize("format", FORMATS)
def test_what_was_decoded_arrives_as_it_is(format, isa):
    """For any magnitude, so that a rank may send on what it has received."""
    largest = 1e34 if format == "sign" else 1.4e37  # a block's magnitudes are added up
    for block, scale in itertools.product((128, 2048), (1e-38, 1e-31, 1e-20, 1.0, largest)):
        once = decoded(encoded(numbers(4 * block, 1).clamp(-10, 10) * scale, format, block))
        assert torch.equal(decoded(encoded(once, format, block)), once), (block, scale)


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
@each_isa
@pytest.mark.parametrize("draws", [None, Draws(2**64 - 3, 12_345)], ids=["nearest", "drawn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_instruction_set_has_the_bits_of_torchs_operations(format, dtype, draws, isa, monkeypatch):
    for block in BLOCKS:
        x = torch.cat([numbers(3 * block, 2), cases.wild(5 * block, 3)])
        x[3 * block + 7], x[4 * block + 1], x[5 * block : 6 * block] = torch.inf, torch.nan, 0.0
        x[6 * block] = torch.finfo(torch.float32).max
        x = x.to(dtype)
        found = encoded(x, format, block, draws)
        values = [decoded(found, each) for each in DTYPES]
        rows = [encoded(numbers(8 * block, k) * 10.0**k, format, block) for k in range(3)]
        total = torch.empty(8 * block)
        wire_codes.sum_(rows, total)
        with monkeypatch.context() as without:
            without.setattr(wire_codes.cpu, "missing", lambda: "not there")
            want = encoded(x, format, block, draws)
            assert torch.equal(found.codes, want.codes), block
            assert torch.equal(found.scales.view(torch.int16), want.scales.view(torch.int16)), block
            for each, value in zip(DTYPES, values, strict=True):
                expected = decoded(want, each)
                assert torch.equal(value.isnan(), expected.isnan())
                assert torch.equal(value.nan_to_num(), expected.nan_to_num()), (block, each)
            expected = torch.empty_like(total)
            wire_codes.sum_(rows, expected)
            assert torch.equal(total, expected)


@each_isa
@pytest.mark.parametrize("format", FORMATS)
def test_sums_are_in_float32_and_in_order(format, isa):
    for num in (1, 2, 5):
        rows = [encoded(numbers(3 * 256, k) * 100.0**k, format, 256) for k in range(num)]
        want = decoded(rows[0])
        for row in rows[1:]:
            want = want + decoded(row)
        found = torch.empty_like(want)
        wire_codes.sum_(rows, found)
        assert torch.equal(found, want)


@each_isa
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_spoils_its_block_alone(format, isa):
    x = torch.ones(4 * 128)
    x[3], x[200], x[256:384] = -torch.inf, torch.nan, 0.0
    found = decoded(encoded(x, format, 128)).view(4, 128)
    assert found[:2].isnan().all() and not found[2].any() and torch.allclose(found[3], torch.ones(128), rtol=2**-8)


@each_isa
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_numbers_arrive_or_spoil_their_block(format, isa):
    """Their codes are the top ones, never beyond, where an integer would change its sign."""
    most = {"int8": 2.0**120 * 127, "int4": 2.0**124 * 7, "fp8": 2.0**119 * 448, "sign": 2.0**121 / 1.005}[format]
    tops = torch.cat([most * (1 - torch.arange(64) / 128), torch.tensor([1.01 * most, 3.4e38])])
    found = decoded(encoded(tops.repeat_interleave(128), format, 128)).view(-1, 128)
    assert torch.allclose(found[:64], tops[:64, None].expand(64, 128), rtol=1 / 16 if format == "fp8" else 2**-8)
    assert found[64:].isnan().all()


DRAWN = [format for format in FORMATS if format != "sign"]


@pytest.mark.parametrize("format", DRAWN)
def test_what_is_drawn_is_right_on_average(format):
    """Numbers over many octaves, each of which becomes one of its two codes: 2,048 means, within 5 standard errors."""
    x, block, num = numbers(2048, 4) * 1e-3, 256, 4000
    x[:64] *= 1e-4  # denormal e4m3, and integers that are seldom drawn
    scale = encoded(x, format, block, Draws(0, 3)).scales.double().repeat_interleave(block)
    size, gap = x.double().abs(), scale
    if format == "fp8":
        gap = scale * torch.exp2(torch.floor(torch.log2(size / scale).clamp(min=-6)) - 3)
    up = (size / gap) % 1
    total = torch.zeros(len(x), dtype=torch.float64)
    for k in range(num):
        off = decoded(encoded(x, format, block, Draws(k * 31, 3))).double() - x.double()
        assert (off.abs() <= gap).all()
        total += off
    error = gap * (up * (1 - up) / num).sqrt()
    allowed = 4 * error + gap * (2 / num + 2**-15)  # for what is drawn twice, and as finely as it is drawn
    far = (total / num).abs() / allowed
    assert far.max() < 1.25 and far.gt(0.5).float().mean() < 0.06  # of normal numbers 4.5 % are off by 2 errors


@pytest.mark.parametrize("format", DRAWN)
def test_codes_depend_on_the_key_and_the_place_in_the_unit_alone(format):
    x = numbers(16 * 128, 5)
    whole = decoded(encoded(x, format, 128, Draws(11, 7)))
    parts = [encoded(part, format, 128, Draws(11, 7 + 4 * k)) for k, part in enumerate(x.split(4 * 128))]
    assert torch.equal(torch.cat(list(map(decoded, parts))), whole)
    for other in (Draws(12, 7), Draws(11, 8)):
        assert not torch.equal(decoded(encoded(x, format, 128, other)), whole)


@each_isa
@pytest.mark.parametrize("format", DRAWN)
def test_what_codes_hold_is_drawn_as_it_is(format, isa):
    """Also the largest magnitudes, which a scale that was rounded down could not hold."""
    for k, scale in itertools.product(range(8), (1e-26, 1.0, 1e30)):
        x = numbers(4 * 128, 6).clamp(-10, 10) * scale
        once = decoded(encoded(x, format, 128, Draws(k, 0)))
        assert torch.equal(decoded(encoded(once, format, 128, Draws(k + 100, 0))), once)
    tops = 1 + torch.arange(2**12) * 2.0**-23
    found = decoded(encoded(tops.repeat_interleave(128), format, 128, Draws(3, 0))).view(-1, 128)
    assert torch.allclose(found, tops[:, None].expand_as(found), rtol=1 / 8 if format == "fp8" else 1 / 6)


def test_threads_change_no_bit():
    x, before = numbers(2**19 + 2048), torch.get_num_threads()
    for format in FORMATS:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            once = encoded(x, format, 2048, Draws(1, 5))
            total = torch.empty_like(x)
            wire_codes.sum_([once, once], total)
            found.append((once.codes, once.scales, decoded(once), total))
        torch.set_num_threads(before)
        assert all(map(torch.equal, *found))


def test_bytes():
    sizes = {format: encoded(numbers(2048), format, 256) for format in FORMATS}
    sizes["sign, 2048"] = encoded(numbers(2048), "sign", 2048)
    found = {k: x.codes.nbytes + x.scales.nbytes for k, x in sizes.items()}
    assert found == {"int8": 2064, "int4": 1040, "fp8": 2064, "sign": 272, "sign, 2048": 258}


@each_isa
def test_signs_are_of_plus_and_minus_the_mean_magnitude(isa):
    """Zeros of both signs count as positive, and a block of zeros stays zero."""
    x = torch.zeros(3 * 128)
    x[:128] = torch.tensor([3.0, -1.0, 0.0, -0.0]).repeat(32)
    x[128:256] = -0.0
    x[256:] = -(2.0**-110)
    found = decoded(encoded(x, "sign", 128))
    assert torch.equal(found[:128], torch.tensor([1.0, -1.0, 1.0, 1.0]).repeat(32))
    assert not found[128:].any() and not encoded(x, "sign", 128).codes[16:].any()


def test_wrong_arguments_are_refused():
    x = torch.ones(512)
    with pytest.raises(ValueError, match="512 elements as 'int3' in blocks of 256; formats are int8, int4, fp8, sign"):
        wire_codes.encode(x, Codes(*room(512, "int8", 256)[:2], "int3", 256))
    with pytest.raises(ValueError, match="blocks of 100"):
        wire_codes.encode(x, room(512, "int8", 256)._replace(block=100))
    with pytest.raises(ValueError, match="codes must have 512 elements, got 256"):
        wire_codes.encode(x, room(256, "int8", 256))
    with pytest.raises(TypeError, match="x must be"):
        wire_codes.encode(x.double(), room(512, "int8", 256))
    assert native.missing() is None or "not used" in str(native.missing())

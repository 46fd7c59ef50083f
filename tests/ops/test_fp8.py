"""float32 numbers in float8 blocks, against torch's own casts to float8 and the numbers of each format."""

import pytest
import torch

from tests.support import kernel_cases as cases
from zerofn.ops import reference
from zerofn.ops.codecs import E4M3, E5M2

CODECS = {"e4m3": (E4M3, torch.float8_e4m3fn, 448.0), "e5m2": (E5M2, torch.float8_e5m2, 57344.0)}
each_codec = pytest.mark.parametrize("name", CODECS)
DEVICES = ["cpu", *["cuda"][: torch.cuda.device_count()]]


def numbers(name):
    """All finite numbers of a format, in blocks of 256: of e5m2 those that are positive."""
    _, dtype, _ = CODECS[name]
    x = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    x = x[x.isfinite()] if name == "e4m3" else x[x.isfinite() & (x > 0)]
    return torch.cat([x, x[-1:].abs().expand(256 - x.numel())])


@each_codec
@pytest.mark.parametrize("power", [-90, -1, 0, 1, 100])
def test_what_was_decoded_encodes_to_the_same_numbers(name, power):
    """However the rounding falls."""
    codec, _, largest = CODECS[name]
    x = numbers(name) * 2.0**power
    assert x.abs().max() == largest * 2.0**power
    for random in (None, torch.zeros(256, dtype=torch.int64), torch.full((256,), 0xFFFFFFFF)):
        parts = codec.encode(x, random)
        assert torch.equal(codec.decode(parts), x) and parts[1].tolist() == [2.0**power]
        small = codec.encode(torch.where(x.abs() == x.abs().max(), x / 2, x), random)  # whose scale is smaller
        assert torch.equal(codec.decode(codec.encode(codec.decode(small), random)), codec.decode(small))


@each_codec
def test_encoding_is_torchs_cast_of_each_scaled_block(name):
    codec, dtype, largest = CODECS[name]
    x = cases.wild(10_007, 4).clamp(-1e30, 1e30)
    x = x if name == "e4m3" else x.abs() + 1e-25
    codes, scales = codec.encode(x)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.uint8, x.shape, torch.float32, (40,))
    top = torch.nn.functional.pad(x.abs(), (0, 233)).view(-1, 256).amax(1)
    assert ((top <= largest * scales) & (top > largest / 2 * scales)).all()
    scaled = x / scales.repeat_interleave(256)[:10_007]
    scaled = scaled if name == "e4m3" else scaled.clamp(min=2.0**-16)
    assert torch.equal(codec.decode((codes, scales)), scaled.to(dtype).float() * scales.repeat_interleave(256)[:10_007])


@pytest.mark.parametrize(("name", "error", "reach"), [("e4m3", 1 / 16, 2.0**-13), ("e5m2", 1 / 8, 2.0**-28)])
def test_encoding_is_near(name, error, reach):
    """Off by at most `error` of an element down to `reach` of the largest in its block."""
    rng = torch.Generator().manual_seed(6)
    x = torch.randn(1 << 16, generator=rng) * torch.exp(2 * torch.randn(1 << 16, generator=rng))
    x = x if name == "e4m3" else x.square()
    decoded = CODECS[name][0].decode(CODECS[name][0].encode(x))
    largest = x.abs().view(-1, 256).amax(1).repeat_interleave(256)
    inside = x.abs() >= largest * reach
    assert inside.sum() > 50_000 and ((decoded - x).abs() <= x.abs() * error)[inside].all()


@each_codec
def test_zeros(name):
    """A block of zeros stays one, signs included; beside others zero stays zero, but a second moment is never lost."""
    codec = CODECS[name][0]
    zeros = torch.tensor([0.0, -0.0] * 128) if name == "e4m3" else torch.zeros(256)
    assert cases.same_bits(codec.decode(codec.encode(zeros)), zeros)
    x = torch.zeros(256)
    x[3] = 1.0
    rest = codec.decode(codec.encode(x))[4:]
    assert (rest == (0.0 if name == "e4m3" else 2.0**-31)).all()  # e5m2's smallest is 2^-16, the scale is 2^-15
    assert codec.decode(codec.encode(torch.zeros(0))).shape == (0,)


@each_codec
def test_what_is_not_finite_spoils_its_block(name):
    x = torch.ones(768)
    x[300], x[600] = torch.inf, torch.nan
    decoded = CODECS[name][0].decode(CODECS[name][0].encode(x))
    assert (decoded[:256] == 1).all() and (decoded[256:512] == torch.inf).all() and decoded[512:].isnan().all()


@pytest.mark.part(value=[0.7001])
@pytest.mark.part(value=[3e-6], name=["e5m2"])
@pytest.mark.part(value=[1e-3], name=["e4m3"])
@each_codec
@pytest.mark.parametrize("value", [0.3, 0.7001, 0.99, 1e-3, 3e-6])
def test_stochastic_rounding_is_unbiased(name, value):
    """The mean of 2^20 roundings is within five of its standard errors of the number; each is one of its neighbours."""
    if name == "e5m2" or value > 1e-5:  # e4m3's smallest, here 2^-18, is more than 3e-6
        num, codec = 1 << 20, CODECS[name][0]
        x = torch.full((num,), value)
        x[::256] = 1.0
        random = reference.draws(7, 0, num, int(name == "e5m2"))
        decoded = codec.decode(codec.encode(x, random)).double().view(-1, 256)[:, 1:]
        below, above = decoded.min(), decoded.max()
        assert decoded.unique().numel() == 2 and below < value < above and (above - below) <= value / 4
        assert abs(decoded.mean() - torch.tensor(value).double()) < 5 * decoded.std() / decoded.numel() ** 0.5


@each_codec
@pytest.mark.parametrize("device", DEVICES)
def test_every_device_has_the_same_bits(name, device):
    x = cases.wild(4096, 1).clamp(-1e30, 1e30)
    x = x if name == "e4m3" else x.abs()
    for random in (None, reference.draws(3, 0, 4096, 0)):
        here = CODECS[name][0].encode(x, random)
        there = CODECS[name][0].encode(x.to(device), None if random is None else random.to(device))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
        assert torch.equal(CODECS[name][0].decode(there).cpu(), CODECS[name][0].decode(here))

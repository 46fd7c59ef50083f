"""Products of float8 numbers, against torch's own casts and product, and float64."""

import pytest
import torch

from tests.support import kernels_on_cpu
from zerofn.ops import cuda, fp8_products

ops = torch.ops.zerofn
FORMATS = {False: (torch.float8_e4m3fn, 448.0), True: (torch.float8_e5m2, 57344.0)}
DEVICES = ["cpu", *["cuda"][: torch.cuda.device_count()]]
each_format = pytest.mark.parametrize("grad", [False, True], ids=["e4m3", "e5m2"])
each_device = pytest.mark.parametrize("device", DEVICES)


def numbers(*shape, seed=0, dtype=torch.bfloat16, device="cpu"):
    rng = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape, generator=rng) * torch.exp(3 * torch.randn(*shape, generator=rng))
    return wide.to(dtype).to(device)


def encoded(x, grad=False):
    scale = ops.fp8_scale(x, grad)
    return ops.fp8_codes(x, scale, grad), scale


def decoded(codes, scale, grad=False):
    return codes.view(FORMATS[grad][0]).double() * scale.double()


@each_device
@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power", [-40, 0, 30])
def test_codes_are_those_of_torchaos_tensorwise_recipe(grad, dtype, power, device):
    """Its scale is largest / amax in float32, rounded down to a power of two, by which it multiplies."""
    x = numbers(31, 48, dtype=dtype, device=device) * 2.0**power
    float8, largest = FORMATS[grad]
    theirs = torch.exp2(torch.floor(torch.log2(largest / x.abs().max().float())))
    want = (x.float() * theirs).clamp(-largest, largest).to(float8)
    codes, scale = encoded(x, grad)
    assert scale.dtype == torch.float32 and scale.shape == () and float(scale) == 1 / float(theirs)
    assert codes.dtype == torch.uint8 and torch.equal(codes, want.view(torch.uint8))


@each_format
def test_the_scale_is_the_least_with_which_the_largest_number_fits(grad):
    float8, largest = FORMATS[grad]
    for top in (1.0, 1.75, 1.7500001, 448.0, 449.0, 57344.0, 57345.0, 3.0e-20):
        scale = float(ops.fp8_scale(torch.tensor([top, -top / 3]), grad))
        assert largest / 2 < top / scale <= largest, top


@each_format
def test_what_was_decoded_has_the_same_codes(grad):
    codes, scale = encoded(numbers(16, 16), grad)
    again = decoded(codes, scale, grad).bfloat16()
    assert torch.equal(ops.fp8_codes(again, scale, grad), codes)
    assert torch.equal(decoded(*encoded(again, grad), grad), again.double())


@each_format
@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_spoils_the_product(grad, wrong):
    """Also where torch's cast to float8 takes infinity for the largest number."""
    x = numbers(16, 16)
    x[3, 5] = wrong
    codes, scale = encoded(x, grad)
    other, other_scale = encoded(numbers(16, 16, seed=1))
    assert not ops.fp8_mm(codes, other, scale, other_scale, None, grad, torch.bfloat16).isfinite().any()


@each_format
def test_zeros_and_the_smallest_numbers(grad):
    other, other_scale = encoded(numbers(16, 16, seed=1))
    for x in (torch.zeros(16, 16), torch.full((16, 16), 1e-44)):
        codes, scale = encoded(x, grad)
        assert not ops.fp8_mm(codes, other, scale, other_scale, None, grad, torch.float32).any()


@each_device
@each_format
@pytest.mark.parametrize("shape", [(16, 16, 16), (5, 48, 32), (33, 16, 256)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_the_decoded_numbers(grad, shape, with_bias, device):
    m, n, k = shape
    (a, a_scale), (b, b_scale) = encoded(numbers(m, k, device=device), grad), encoded(numbers(n, k, device=device))
    bias = numbers(n, seed=2, device=device) if with_bias else None
    x, y = decoded(a, a_scale, grad), decoded(b, b_scale)
    want = x @ y.T + (0 if bias is None else bias.double())
    found = ops.fp8_mm(a, b, a_scale, b_scale, bias, grad, torch.bfloat16)
    size = x.abs() @ y.abs().T
    assert found.dtype == torch.bfloat16 and found.shape == (m, n)
    assert ((found.double() - want).abs() <= want.abs() / 256 + size * (1e-6 if device == "cpu" else 1e-3)).all()
    if bias is None:
        theirs = torch._scaled_mm(
            a.view(FORMATS[grad][0]), b.view(torch.float8_e4m3fn).t(), a_scale, b_scale, out_dtype=torch.bfloat16
        )
        assert ((found - theirs).double().abs() <= want.abs() / 128 + size * 1e-3).all()


@each_device
@each_format
@pytest.mark.parametrize("rows", [1, 15, 16, 17])
def test_codes_are_turned_with_zeros_behind(rows, grad, device):
    x = numbers(rows, 32, device=device)
    codes, scale = encoded(x, grad)
    both = ops.fp8_both(x, scale, grad)
    for turned in (ops.fp8_turned(codes), ops.fp8_turned(x, scale, grad), both[1]):
        assert turned.is_contiguous() and turned.shape == (32, (rows + 15) // 16 * 16)
        assert torch.equal(turned[:, :rows], codes.t()) and not turned[:, rows:].any()
    assert torch.equal(both[0], codes)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return kernels_on_cpu.build(tmp_path_factory.mktemp("kernels"))


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (16, 64), (33, 80), (70, 7), (64, 130)])
def test_gpu_kernels_have_the_bits_of_torchs_operations(grad, dtype, shape, library, monkeypatch):
    """Run thread by thread. Odd sizes, too, whose rows begin anywhere."""
    x = numbers(*shape).clamp(-6e4, 6e4).to(dtype)
    scale = ops.fp8_scale(x, grad)
    codes, turned = ops.fp8_both(x, scale, grad)
    monkeypatch.setattr(cuda, "launch", kernels_on_cpu.launcher(library, most_blocks=1))
    monkeypatch.setattr(fp8_products, "kernels", lambda x: cuda)
    assert torch.equal(ops.fp8_scale(x, grad), scale)
    assert torch.equal(ops.fp8_codes(x, scale, grad), codes)
    for found in (ops.fp8_turned(codes), ops.fp8_turned(x, scale, grad), ops.fp8_both(x, scale, grad)[1]):
        assert torch.equal(found, turned)
    assert torch.equal(ops.fp8_both(x, scale, grad)[0], codes)
    assert torch.equal(ops.fp8_codes(x.t(), scale, grad), codes.t())


@each_format
def test_gpu_kernels_round_every_bfloat16_as_torch_does(grad, library, monkeypatch):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    x = x.where(x.abs() <= FORMATS[grad][1], torch.nan)
    one = torch.ones(())
    codes = ops.fp8_codes(x, one, grad)
    monkeypatch.setattr(cuda, "launch", kernels_on_cpu.launcher(library, most_blocks=1))
    monkeypatch.setattr(fp8_products, "kernels", lambda x: cuda)
    found = ops.fp8_codes(x, one, grad)
    assert torch.equal(found[x.isfinite()], codes[x.isfinite()])
    assert found.view(FORMATS[grad][0])[~x.isfinite()].isnan().all()


@each_format
def test_gpu_kernels_find_the_same_scale(grad, library, monkeypatch):
    tops = [0.0, 1e-44, 1e-30, 1.0, 1.75, 1.7500001, 3e38, float("inf"), float("nan")]
    want = torch.stack([ops.fp8_scale(torch.tensor([x, 0.0]), grad) for x in tops])
    monkeypatch.setattr(cuda, "launch", kernels_on_cpu.launcher(library, most_blocks=1))
    monkeypatch.setattr(fp8_products, "kernels", lambda x: cuda)
    found = torch.stack([ops.fp8_scale(torch.tensor([x, 0.0]), grad) for x in tops])
    assert torch.equal(found.nan_to_num(-1), want.nan_to_num(-1)) and want.isnan().sum() == 2


def test_shapes_are_known_without_values():
    with torch.device("meta"):
        x, w = torch.empty(3, 32, dtype=torch.bfloat16), torch.empty(48, 32, dtype=torch.bfloat16)
    (a, a_scale), (b, b_scale) = encoded(x), encoded(w)
    y = ops.fp8_mm(a, b, a_scale, b_scale, None, False, torch.bfloat16)
    assert (y.shape, y.dtype, ops.fp8_turned(a).shape) == ((3, 48), torch.bfloat16, (32, 16))

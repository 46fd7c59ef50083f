"""The dtypes of a parameter's three lives."""

import pytest
import torch

from zerofn import Fp8, Precision
from zerofn.sharding.precision import resolve

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "given, stored, computes, reduces",
    [
        (None, f64, f64, f64),
        (None, bf16, bf16, bf16),
        ("fp32", f32, f32, f32),
        ("bf16", f32, bf16, f32),
        ("fp16", f32, f16, f32),
        (Precision(compute=bf16), f32, bf16, bf16),
        (Precision(reduce=f32), bf16, bf16, f32),
        (Precision(f32, f16), f32, f16, f16),
    ],
)
def test_dtypes(given, stored, computes, reduces):
    precision = resolve(given)
    assert precision.computes(stored) == computes
    assert precision.reduces(stored) == reduces
    assert precision.computes(torch.int64) == precision.reduces(torch.int64) == torch.int64


@pytest.mark.parametrize("given, nearest", [("bf61", "bf16"), ("float16", "fp16"), ("fp23", "fp32"), ("", "fp")])
def test_an_unknown_name_is_answered_with_the_nearest(given, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}"):
        resolve(given)


@pytest.mark.parametrize("given", [torch.float16, 16, True])
def test_what_is_no_precision_raises(given):
    with pytest.raises(TypeError, match="expected None, .bf16., .fp16., .fp32., .fp8. or a zerofn.Precision"):
        resolve(given)


@pytest.mark.parametrize("given", [True, False, "yes", Fp8, lambda name: True])
def test_what_is_no_rule_of_float8_products_raises(given):
    with pytest.raises(TypeError, match=r"Precision: fp8 must be a zerofn.Fp8 or None, got .*Write fp8=zerofn.Fp8\(\)"):
        Precision(f32, bf16, f32, fp8=given)


def test_two_wires_are_refused():
    with pytest.raises(ValueError, match=r"wire=zerofn.Wire\(gather='int8', .*and precision= contains wire="):
        resolve(Precision(wire="bf16"), "int8")
    assert resolve("bf16", "bf16") == Precision(f32, bf16, f32, "bf16")

"""Linear layers whose products are float8: forward, and both of the backward pass.

A leaf of the parameters is marked with its name and the rule, `Fp8`. While the loss function and its derivative run,
`torch.nn.functional.linear` and `torch.addmm` look for the mark on the weight that they get. So a model needs no
change, and what is recomputed is computed in the same way; a weight that is used otherwise is used in bfloat16.

The input, the weight and the gradient of the output each get one scale, from their largest element, and are rounded
once, to codes. The input's are saved for the backward pass in the place of the input, and are shared by layers with
the same input. The weight's are made again for it, with the scale of the forward pass: they would be another copy of
all weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch_compat import backward_running, is_functorch_tensor, unwrapped
from ..capture.float8_products import of_calls
from ..ops import fp8_products as _products  # noqa: F401  (defines zerofn::fp8_mm)
from ..sharding.float8 import Fp8
from ..util.patches import Patches

ops = torch.ops.zerofn
_MARK = "_zerofn_fp8"  # attribute of a leaf: its `_Weight`


class Products:
    """What becomes of the weights of one loss: `leaves` of the parameters by name, to which it gives a mark. It does
    not hold them: they hold it.
    """

    def __init__(self, rule: Fp8, leaves: Mapping[str, Tensor]) -> None:
        self._rule = rule
        self._matrices = [name for name, x in leaves.items() if x.dim() > 1]
        self._tables: dict[str, int] = {}  # embedding tables -> their rows
        self._left_out: dict[str, str] = {}  # weights -> why the rule leaves them out, "" if it does not
        self._calls: dict[str, dict[str, None]] = {}  # weights -> "" or why not, of each call of a layer
        self._inputs = WeakTensorKeyDictionary()
        for name, leaf in leaves.items():
            setattr(leaf, _MARK, _Weight(self, name))

    @property
    def told(self) -> dict[str, str]:
        """The weights that were multiplied by -> "" for float8, or why not; and all other matrices."""
        others = dict.fromkeys(self._matrices, "no linear layer multiplies by it as it is")
        tables = dict.fromkeys(self._tables, "an embedding table")
        return {**others, **tables, **{name: of_calls(whys) for name, whys in self._calls.items()}}

    def sees_table(self, name: str, rows: int) -> None:
        """Note an embedding table."""
        self._tables[name] = rows

    def takes(self, name: str, x: Tensor, weight: Tensor) -> bool:
        """Return whether a layer with this input multiplies by this weight [outputs, inputs] in float8."""
        why = self._left_out.get(name)
        if why is None:  # asked once: a table that is seen later would decide otherwise about what is recomputed
            longest = max(self._tables.values(), default=0)
            why = self._left_out[name] = self._rule.why_not(name, weight, longest)
        return not self.sees_call(name, why or _unfit(x, weight))

    def sees_call(self, name: str, why: str) -> str:
        """Note a call of a layer with this weight, and return why it is not float8."""
        self._calls.setdefault(name, {})[why] = None
        return why

    def codes_of(self, x: Tensor) -> _Codes:
        """Return the codes of a layer's input, made for the first of the layers that share it. What is recomputed makes
        its own.
        """
        key = x._version, backward_running()
        known: tuple[Any, _Codes] | None = self._inputs.get(x)
        if known is None or known[0] != key:
            with torch.no_grad():
                scale = ops.fp8_scale(x.detach(), False)
                known = self._inputs[x] = key, _Codes(ops.fp8_codes(x.detach(), scale, False), scale, _Turned())
        return known[1]


def _unfit(x: Tensor, weight: Tensor) -> str:
    if not x.dtype == weight.dtype == torch.bfloat16:
        return f"its input is {str(x.dtype).removeprefix('torch.')}, and not bfloat16"
    return "" if x.numel() else "its input is empty"


class _Weight(NamedTuple):
    products: Products
    name: str


class _Turned:
    """The codes of a layer's input, turned in the backward pass: for the first of the layers that share it, and kept
    until the last.
    """

    def __init__(self) -> None:
        self._num_readers, self._value = 0, None

    def expect_reader(self) -> None:
        self._num_readers += 1

    def of(self, codes: Tensor) -> Tensor:
        value: Tensor = ops.fp8_turned(codes) if self._value is None else self._value
        self._num_readers -= 1
        self._value = value if self._num_readers > 0 else None  # type: ignore[assignment]
        return value


class _Codes(NamedTuple):
    codes: Tensor
    scale: Tensor
    turned: _Turned


class _Product(torch.autograd.Function):
    """x [m, k] @ weight.T + bias. `codes`, `scale`: of x. `turned`: the weight is [k, n], and not [n, k]. `x_turned`:
    where the codes are turned.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, weight: Tensor, bias: Any, turned: bool, x_turned: _Turned
    ) -> Tensor:
        weight_scale = ops.fp8_scale(weight, False)
        made = ops.fp8_turned if turned else ops.fp8_codes
        right = made(weight, weight_scale, False)
        ctx.save_for_backward(weight, weight_scale, *((codes, scale) if ctx.needs_input_grad[3] else ()))
        ctx.turned, ctx.x_turned = turned, x_turned
        if ctx.needs_input_grad[3]:
            x_turned.expect_reader()
        return ops.fp8_mm(codes, right, scale, weight_scale, bias, False, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "float8 products have no second derivative: write precision='bf16', or let Fp8(where) leave these "
                "layers out."
            )
        (dy,) = gradients
        weight, weight_scale, *given = ctx.saved_tensors
        scale = ops.fp8_scale(dy, True)
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0] and ctx.needs_input_grad[3]:
            codes, turned = ops.fp8_both(dy, scale, True)
        elif ctx.needs_input_grad[0]:
            codes = ops.fp8_codes(dy, scale, True)
        else:
            turned = ops.fp8_turned(dy, scale, True)
        if ctx.needs_input_grad[0]:
            made = ops.fp8_codes if ctx.turned else ops.fp8_turned
            right = made(weight, weight_scale, False)
            by_x = ops.fp8_mm(codes, right, scale, weight_scale, None, True, dy.dtype)
        if ctx.needs_input_grad[3]:
            x_codes, x_scale = given
            by_weight = ops.fp8_mm(turned, ctx.x_turned.of(x_codes), scale, x_scale, None, True, weight.dtype)
            by_weight = by_weight.t() if ctx.turned else by_weight
        if ctx.needs_input_grad[4]:
            by_bias = dy.sum(0)
        return by_x, None, None, by_weight, by_bias, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor | None:
    """x [..., k] -> [..., n]; None if it is not to be multiplied in float8."""
    mark = getattr(unwrapped(weight), _MARK, None) if isinstance(x, Tensor) and isinstance(weight, Tensor) else None
    if not isinstance(mark, _Weight) or weight.dim() != 2:
        return None
    products, name = mark
    if is_functorch_tensor(x) or is_functorch_tensor(weight):
        products.sees_call(name, "its layer is called inside a transform of torch.func")
        return None
    if not products.takes(name, x, weight.t() if turned else weight):
        return None
    codes, scale, x_turned = products.codes_of(x)
    rows, codes = (y.reshape(-1, x.shape[-1]) for y in (x, codes))
    out: Tensor = _Product.apply(rows, codes, scale, weight, bias, turned, x_turned)
    return out.view(*x.shape[:-1], out.shape[-1])


def _linear(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = _product(input, weight, bias, False)
        return plain(input, weight, bias) if found is None else found

    return linear


def _addmm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def addmm(input: Tensor, *args: Any, **options: Any) -> Tensor:
        found = None if len(args) != 2 or options or input.dim() != 1 else _product(*args, input, True)
        return plain(input, *args, **options) if found is None else found

    return addmm


def _embedding(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def embedding(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        mark = getattr(weight, _MARK, None)
        if isinstance(mark, _Weight):
            mark.products.sees_table(mark.name, len(weight))
        return plain(input, weight, *args, **options)

    return embedding


_patches = Patches(
    lambda: (
        (torch.nn.functional, "linear", _linear),
        (torch, "addmm", _addmm),
        (torch.nn.functional, "embedding", _embedding),
    )
)


def float8_products() -> Patches:
    """Return a context in which linear layers multiply by marked weights (`Products`) in float8. Run both the forward
    and the backward pass inside.
    """
    return _patches

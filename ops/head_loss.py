"""A head and its cross entropy without whole logits: tiles of them are computed, used and dropped.

Tokens are x [T, H], the head is weight [V, H] with or without bias [V], labels are [T]. Logits would be [T, V], of
which some rows or some columns exist at a time. No sum is cut: each number of a result is computed by the same kernels
from the same numbers as with whole logits, so it has the same bits wherever a product's number does not depend on how
many rows or columns the product has. `sizes_of` chooses tiles for which it does not, on the host.

The gradient of the head's input needs whole rows of logits, that of its weight whole columns. So logits are computed
three times: for the loss, and for each of the two gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .registry import OUT_GRADIENT, OnShard, Traits, define

aten = torch.ops.aten
# Of BLAS on the host, products of this many rows or columns, and multiples of it, give each number the bits that it has
# in a product of all of them. Narrower tiles meet other kernels.
EVEN = 256
TILES = 16  # enough tiles for the logits in memory to be few, if each has at least `EVEN` rows
WIDE = 512  # rows of a tile that keep a device busy: weights are read once for all of them
GRADIENT_AT_LABEL, MOST, LOG_SUM, AT_LABEL = range(4)  # the rows of `numbers`


class Sizes(NamedTuple):
    """How many `rows` and how many `columns` of logits a tile has; the last one may have up to `EVEN` - 1 more."""

    rows: int
    columns: int


def sizes_of(num_rows: int, num_columns: int) -> Sizes | None:
    """Return the sizes of tiles of [num_rows, num_columns] logits; None if they are too few for tiles.

    >>> sizes_of(8192, 128256)
    Sizes(rows=512, columns=7936)
    """
    number = max(-(-num_rows // WIDE), min(TILES, num_rows // EVEN))
    if number < 2 or num_columns < 2 * EVEN:
        return None
    return Sizes(*(max(1, n // (number * EVEN)) * EVEN for n in (num_rows, num_columns)))


def tiles(num: int, size: int) -> list[tuple[int, int]]:
    """Return the bounds of tiles; fewer than `EVEN` rows or columns at the end belong to the tile before."""
    starts = [k for k in range(0, num, size) if num - k >= min(EVEN, num)]
    return list(zip(starts, [*starts[1:], num], strict=True))


def head_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignored: int, dtype: torch.dtype, rows: int
) -> Tensor:
    """Return the log-probabilities of labels [T, 1] in `dtype`; of a label that is `ignored` some number."""
    found = x.new_empty(len(x), 1, dtype=dtype)
    at = _places(labels, ignored)
    for start, stop in tiles(len(x), rows):
        part = slice(start, stop)
        logs = torch.log_softmax(_logits(x[part], weight, bias, dtype), 1)
        torch.gather(logs, 1, at[part], out=found[part])
        del logs
    return found


def head_loss_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignored: int,
    dtype: torch.dtype,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and `numbers` [4, T] for that of the head.

    `grad`, `reduction`, `ignored` and `total_weight` are those of `aten::nll_loss_backward`. `numbers`: the gradient of
    the label's log-probability; the largest logit; the logarithm of the sum of exp(logit - largest); the gradient of
    the label's logit.
    """
    found, numbers = torch.empty_like(x), x.new_empty(4, len(x), dtype=_wide(dtype))
    at = _places(labels, ignored)
    # In half precision the host rounds the logarithm before it subtracts it, as its log-probability of the largest
    # logit has it. Devices subtract it in float32.
    exact = x.device.type == "cpu" or dtype == numbers.dtype
    for start, stop in tiles(len(x), rows):
        part = slice(start, stop)
        into = numbers[:, part]
        logits = _logits(x[part], weight, bias, dtype)
        into[MOST] = torch.amax(logits, 1)
        if not exact:
            into[LOG_SUM] = _log_sums(logits, into[MOST])
        logs = torch.log_softmax(logits, 1)
        del logits
        if exact:
            into[LOG_SUM] = torch.amax(logs, 1).neg_()  # of 0 - the logarithm, which is not rounded again
        of_tile = grad[part] if grad.dim() else grad
        given = aten.nll_loss_backward(of_tile, logs, labels[part], None, reduction, ignored, total_weight)
        back = aten._log_softmax_backward_data(given, logs, 1, dtype)
        del logs
        into[GRADIENT_AT_LABEL] = given.gather(1, at[part])[:, 0]
        del given
        into[AT_LABEL] = back.gather(1, at[part])[:, 0]
        torch.mm(back.to(x.dtype), weight, out=found[part])
        del back
    return found, numbers


def head_gradient(
    numbers: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignored: int,
    dtype: torch.dtype,
    columns: int,
) -> Tensor:
    """Return the gradient of the head's weight. `numbers`: those of `head_loss_backward`."""
    return head_gradient_out(numbers, x, weight, bias, labels, ignored, dtype, columns, out=torch.empty_like(weight))


def head_gradient_out(
    numbers: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignored: int,
    dtype: torch.dtype,
    columns: int,
    *,
    out: Tensor,
) -> Tensor:
    """Write the gradient of the head's weight into `out`."""
    _write_gradients(numbers, x, weight, bias, labels, ignored, dtype, columns, out, None)
    return out


def head_gradients(
    numbers: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    ignored: int,
    dtype: torch.dtype,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the head's weight and of its bias [1, V]."""
    of_weight, of_bias = torch.empty_like(weight), bias.new_empty(1, len(bias))
    _write_gradients(numbers, x, weight, bias, labels, ignored, dtype, columns, of_weight, of_bias)
    return of_weight, of_bias


def _write_gradients(
    numbers: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignored: int,
    dtype: torch.dtype,
    columns: int,
    of_weight: Tensor,
    of_bias: Tensor | None,
) -> None:
    for start, stop in tiles(len(weight), columns):
        back = _backward_of_columns(numbers, x, weight, bias, _places(labels, ignored), dtype, start, stop)
        torch.mm(back.t(), x, out=of_weight[start:stop])
        if of_bias is not None:
            torch.sum(back, [0], True, out=of_bias[:, start:stop])
        del back


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the logits of some rows or columns in `dtype`, rounded to the tokens' dtype before."""
    found = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return found.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which log_softmax of this dtype computes."""
    return torch.promote_types(dtype, torch.float32)


def _log_sums(logits: Tensor, most: Tensor) -> Tensor:
    """Return the logarithm of each row's sum of exp(logit - largest) in the dtype of `most`, the largest."""
    return logits.to(most.dtype, copy=True).sub_(most[:, None]).exp_().sum(1).log_()


def _places(labels: Tensor, ignored: int) -> Tensor:
    """Return labels as an index [T, 1]; where they are ignored, any."""
    return torch.where(labels == ignored, 0, labels)[:, None]


def _backward_of_columns(
    numbers: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    at: Tensor,
    dtype: torch.dtype,
    start: int,
    stop: int,
) -> Tensor:
    """Return columns [T, stop - start] of the gradient of logits, in the tokens' dtype.

    The kernel of log_softmax's backward pass needs each row's sum of gradients, of which all but the label's are 0. One
    more column has that sum, so that the kernel, and no other exponential function, makes the numbers.
    """
    num = stop - start
    logits = _logits(x, weight[start:stop], None if bias is None else bias[start:stop], dtype).to(numbers.dtype)
    logits.sub_(numbers[MOST, :, None]).sub_(numbers[LOG_SUM, :, None])
    logs = logits.new_empty(len(x), num + 1, dtype=dtype)
    logs[:, :num] = logits  # rounded once, as in log_softmax
    del logits
    logs[:, num] = 0
    given = torch.zeros_like(logs)
    given[:, num] = numbers[GRADIENT_AT_LABEL]
    back = aten._log_softmax_backward_data(given, logs, 1, dtype)
    del given, logs
    inside = (at >= start) & (at < stop)
    rows, places = torch.arange(len(x), device=x.device), torch.where(inside, at - start, num)[:, 0]
    back[rows, places] = numbers[AT_LABEL].to(dtype)  # scatter_ copies all of `back` in half precision
    return back[:, :num].to(x.dtype)


def _flops(products: int) -> Callable[[Mapping[str, Any], Any], int]:
    return lambda given, result: 2 * products * len(given["x"]) * given["weight"].numel()


def _touches(passes: int) -> Callable[[Mapping[str, Any], Any], int]:
    """Bytes that are read and written: weights or tokens once a tile, logits once for each of `passes` passes."""

    def of(given: Mapping[str, Any], result: Any) -> int:
        x, weight = given["x"], given["weight"]
        again = weight.nbytes * len(tiles(len(x), given["rows"])) if "rows" in given else 0
        again += x.nbytes * len(tiles(len(weight), given["columns"])) if "columns" in given else 0
        return again + passes * given["dtype"].itemsize * len(x) * len(weight)

    return of


def _workspace(given: Mapping[str, Any], result: Any) -> int:
    """Bytes of a tile: its logits and their logarithms in the forward pass, three copies in the backward pass."""
    x, weight, size = given["x"], given["weight"], given["dtype"].itemsize
    indices = 8 * len(x)  # the labels
    if "columns" in given:
        tile = len(x) * (_largest(len(weight), given["columns"]) + 1)
        return 3 * size * tile + indices
    tile = _largest(len(x), given["rows"]) * len(weight)
    return (3 if "grad" in given else 2) * size * tile + indices


def _largest(num: int, size: int) -> int:
    return max(stop - start for start, stop in tiles(num, size))


_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor labels"
_ROWS = "int ignored, ScalarType dtype, int rows"
_COLUMNS = f"Tensor numbers, {_HEAD}, int ignored, ScalarType dtype, int columns"
define(
    f"head_loss({_HEAD}, {_ROWS}) -> Tensor",
    head_loss,
    lambda x, weight, bias, labels, ignored, dtype, rows: x.new_empty(len(x), 1, dtype=dtype),
    traits=Traits(OnShard.REFUSED, flops=_flops(1), multiplies="x", touches=_touches(5), workspace=_workspace),
)
_BACKWARD = Traits(OnShard.REFUSED, flops=_flops(2), again=0.5, touches=_touches(12), workspace=_workspace)
define(
    f"head_loss_backward(Tensor grad, {_HEAD}, Tensor total_weight, int reduction, {_ROWS}) -> (Tensor, Tensor)",
    head_loss_backward,
    lambda grad, x, weight, bias, labels, total_weight, reduction, ignored, dtype, rows: (
        torch.empty_like(x),
        x.new_empty(4, len(x), dtype=_wide(dtype)),
    ),
    traits=_BACKWARD,
)
define(
    f"head_gradient({_COLUMNS}) -> Tensor",
    head_gradient,
    lambda numbers, x, weight, *_: torch.empty_like(weight),
    traits=_BACKWARD,
)
define(
    f"head_gradient.out({_COLUMNS}, *, Tensor(a!) out) -> Tensor(a!)",
    head_gradient_out,
    lambda *_, out: out,
    traits=_BACKWARD,
)
define(
    f"head_gradients({_COLUMNS}) -> (Tensor, Tensor)",
    head_gradients,
    lambda numbers, x, weight, bias, *_: (torch.empty_like(weight), bias.new_empty(1, len(bias))),
    traits=_BACKWARD,
)
OUT_GRADIENT[torch.ops.zerofn.head_gradient.default] = torch.ops.zerofn.head_gradient.out

"""Keys, and the operations that draw from them: pure functions of (key, position, arguments).

`zerofn::fold_in` makes keys from keys. `zerofn::uniform`, `normal`, `bernoulli`, ... make a
contiguous tensor of a given size; `zerofn::multinomial`, `poisson`, `native_dropout`, ... are
ATen's operations of that name with a key and a position before their arguments. Each seeds a
generator that lives for that one call, so none of them has an effect, and to run one again is to
get the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import (
    REJECTION_SAMPLERS,
    OpOverload,
    num_dispatch_modes,
    schema_arguments,
    schema_text,
    tree_leaves,
)
from ..ops.registry import OnShard, Traits, base_name, define
from ..util.arguments import checked
from ..util.process import the

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_DRAW = 0x7A65726F2E647277  # keeps the seeds of draws apart from keys folded with small numbers
_CODE = 0x7A65726F2E636F64  # and those of codes from both


def mix(z: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit words."""
    z &= _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _fold(key: int, data: int) -> int:
    """Output `data` of the splitmix64 stream that starts at the mixed key."""
    return mix(mix(key + _GOLDEN) + (data + 1) * _GOLDEN)


def _signed(word: int) -> int:
    return ((word & _WORD) ^ (1 << 63)) - (1 << 63)


def _scalar(word: int) -> Tensor:
    return torch.full((), _signed(word), dtype=torch.int64, device="cpu")


@checked()
def key(seed: int) -> Tensor:
    """The random key of a seed: an int64 scalar on the CPU.

    >>> bool(key(0) == key(0)), bool(key(0) == key(1))
    (True, False)
    """
    if not isinstance(seed, int):
        raise TypeError(f"key: seed must be an int, got {type(seed).__name__}.")
    return _scalar(mix(seed))


@checked("data")
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number (a step, a rank, a microbatch): int64 scalars on the CPU.

    For one key, different numbers give different keys (a bijection of 64-bit words). It is the one
    node `zerofn::fold_in` in a captured graph. Raises `TypeError` for any other tensors.

    >>> bool(fold_in(key(0), 1) == fold_in(key(0), 1))
    True
    >>> bool(fold_in(key(0), 1) == fold_in(key(0), 2))
    False
    """
    check_scalar(key, "fold_in", "the key")
    if isinstance(data, Tensor):
        check_scalar(data, "fold_in", "the number")
        return torch.ops.zerofn.fold_in.default(key, data)
    return torch.ops.zerofn.fold_in.int(key, _signed(data))


def fold_in_rank(key: Tensor, rank: int, axis: str = "") -> Tensor:
    """The bits of `fold_in(key, rank)`, for this process's rank: a captured step knows that ranks draw differently,
    along an axis of the mesh, or along those of the batch.
    """
    return torch.ops.zerofn.fold_in_rank.default(key, rank, axis)


def check_scalar(x: Any, where: str, what: str) -> None:
    """Raise `TypeError` unless `x` is an int64 scalar tensor on the CPU (read without waiting)."""
    is_tensor = isinstance(x, Tensor)
    if is_tensor and x.shape == () and x.dtype == torch.int64 and x.device.type == "cpu":
        return
    kind = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" if is_tensor else repr(x)
    raise TypeError(
        f"{where}: {what} must be an int64 scalar tensor on the CPU, got {kind}. Make a key with "
        "zerofn.random.key(seed)."
    )


# A draw on a shard would depend on how the state is cut.
_define = partial(define, traits=Traits(OnShard.REFUSED))


def _run_fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    return _scalar(_fold(int(key), int(data)))


def _fake_fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    return torch.empty_like(key)


_define("fold_in(Tensor key, Tensor data) -> Tensor", _run_fold_in, _fake_fold_in)
_define("fold_in.int(Tensor key, int data) -> Tensor", _run_fold_in, _fake_fold_in)
define(  # the same, by a name that says that ranks get different keys
    "fold_in_rank(Tensor key, int rank, str axis='') -> Tensor",
    lambda key, rank, axis="": _run_fold_in(key, rank),
    lambda key, rank, axis="": _fake_fold_in(key, rank),
    traits=Traits(OnShard.REFUSED, rank_dependent=True),
)


def seed_of(key: Tensor, position: int) -> int:
    """Return the seed of a draw."""
    # A CPU generator takes the low 32 bits of a seed, a CUDA one all 64: two of many CPU draws may
    # share a stream by chance (1 pair in 4e9), which no mask or noise notices.
    return _fold(_fold(int(key), _DRAW), position)


def seed_of_codes(key: Tensor, number: int) -> int:
    """Return the 64 bits by which the codes of a transfer are drawn. `number`: of it, among those that a key is for."""
    return _fold(_fold(int(key), _CODE), number)


class Generators:
    """`lend(key, position)` gives the generator of a draw, where draws are recorded to be repeated with other keys."""

    lend: Callable[[Tensor, int], torch.Generator] | None = None


@contextmanager
def draws_with_generators(lend: Callable[[Tensor, int], torch.Generator]) -> Iterator[None]:
    """Let draws take their generators from `lend`, which seeds them as `seed_of` says."""
    the(Generators).lend = lend
    try:
        yield
    finally:
        the(Generators).lend = None


def _generator(device: torch.device, key: Tensor, position: int) -> torch.Generator:
    lend = the(Generators).lend
    return torch.Generator(device).manual_seed(seed_of(key, position)) if lend is None else lend(key, position)


_ORDINARY = (Tensor, torch.nn.Parameter)


def _is_eager(*tensors: Any) -> bool:
    """Whether these are ordinary tensors and nobody wants to see the operation: no capture."""
    return num_dispatch_modes() == 0 and all(type(t) in _ORDINARY for t in tensors)


# ---- draws of a given size


def _fill_integers(out: Tensor, low: int | None, high: int | None, generator: Any) -> Tensor:
    if low is None:
        return out.random_(generator=generator)
    return out.random_(low, high, generator=generator)


_CHUNK = 1 << 16  # elements whose words are drawn at a time: what that takes stays in the cache


def _fill_bernoulli(out: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """On the host 32-bit words beside a threshold: `bernoulli_` draws doubles there, which takes 3 times as long."""
    if out.device.type != "cpu" or not 0 <= p < 1:  # 1 exactly, or an error of its own
        return out.bernoulli_(p, generator=generator)
    threshold = round(p * (1 << 32)) - (1 << 31)
    if threshold == 1 << 31:  # p is within 2^-33 of 1
        return out.fill_(1)
    words = torch.empty(min(_CHUNK, out.numel() + 1) // 2, dtype=torch.int64)
    for part in out.view(-1).split(_CHUNK):
        drawn = words[: (len(part) + 1) // 2].random_(-(1 << 63), None, generator=generator)
        part.copy_(drawn.view(torch.int32)[: len(part)] < threshold)
    return out


_truncated = getattr(*REJECTION_SAMPLERS[0])  # torch's own: how often it draws depends on what it drew


# name -> (its parameters in the schema, what fills a contiguous tensor)
_FILLS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "uniform": ("float low, float high", Tensor.uniform_),
    "normal": ("float mean, float std", Tensor.normal_),
    "bernoulli": ("float p", _fill_bernoulli),
    "exponential": ("float rate", Tensor.exponential_),
    "geometric": ("float p", Tensor.geometric_),
    "log_normal": ("float mean, float std", Tensor.log_normal_),
    "cauchy": ("float median, float sigma", Tensor.cauchy_),
    "randint": ("int? low, int? high", _fill_integers),
    "trunc_normal": ("float mean, float std, float a, float b", _truncated),
}


def _run_fill(name: str, key: Tensor, position: int, size: Any, *params: Any, dtype: Any, device: Any) -> Tensor:
    out = torch.empty(size, dtype=dtype, device=device)
    return _FILLS[name][1](out, *params, generator=_generator(out.device, key, position))


def _fake_fill(key: Tensor, position: int, size: Any, *params: Any, dtype: Any, device: Any) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


for _name, (_params, _) in _FILLS.items():
    _define(
        f"{_name}(Tensor key, int position, SymInt[] size, {_params}, *, ScalarType dtype, Device device) -> Tensor",
        partial(_run_fill, _name),
        _fake_fill,
    )


def fill(
    name: str, key: Tensor, position: int, size: Any, params: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A contiguous tensor of draws from the distribution `name`, a key of `_FILLS`."""
    if _is_eager(key):
        return _run_fill(name, key, position, size, *params, dtype=dtype, device=device)
    op = getattr(torch.ops.zerofn, name).default
    return op(key, position, size, *params, dtype=dtype, device=device)


def fill_(out: Tensor, name: str, key: Tensor, position: int, params: Sequence[Any]) -> Tensor:
    """The same draws written into `out`, which is returned."""
    if _is_eager(out, key) and out.is_contiguous():  # the same bits, without a copy
        return _FILLS[name][1](out, *params, generator=_generator(out.device, key, position))
    return out.copy_(fill(name, key, position, out.shape, params, out.dtype, out.device))


def _run_randperm(key: Tensor, position: int, n: int, *, dtype: Any, device: Any) -> Tensor:
    generator = _generator(torch.device(device), key, position)
    return torch.randperm(n, generator=generator, dtype=dtype, device=device)


def _fake_randperm(key: Tensor, position: int, n: int, *, dtype: Any, device: Any) -> Tensor:
    return torch.empty(n, dtype=dtype, device=device)


_define(
    "randperm(Tensor key, int position, SymInt n, *, ScalarType dtype, Device device) -> Tensor",
    _run_randperm,
    _fake_randperm,
)


# ---- ATen's own operations, given a key


_KEYED_NAMES = (
    "bernoulli",
    "multinomial",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "native_dropout",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


@contextmanager
def _default_generator_seeded(device: torch.device, seed: int) -> Iterator[None]:
    """For operations that take no generator: lend them the default one, and put it back."""
    if device.type == "cpu":
        generator = torch.default_generator
    elif device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
    else:
        raise NotImplementedError(
            f"zerofn: on {device.type}, neither fused attention with dropout nor native_dropout can take its random "
            "numbers from the step's key. Compute attention with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), and "
            "write dropout with torch.rand."
        )
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _run_keyed(op: OpOverload, takes_generator: bool, key: Tensor, position: int, *args: Any, **kwargs: Any) -> Any:
    device = next(x.device for x in tree_leaves(args) if isinstance(x, Tensor))
    if op is torch.ops.aten.native_dropout.default and device.type == "cpu":
        return _run_dropout(key, position, *args, **kwargs)
    if takes_generator:
        return op(*args, generator=_generator(device, key, position), **kwargs)
    with _default_generator_seeded(device, seed_of(key, position)):
        return op(*args, **kwargs)


def _run_dropout(key: Tensor, position: int, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """As ATen's on the host, with the coins that `bernoulli` tosses there: dropout's other form."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _run_fill("bernoulli", key, position, x.shape, 1 - p, dtype=torch.bool, device=x.device)
    return x.mul(mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask


def _fake_keyed(op: OpOverload, key: Tensor, position: int, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _takes_generator(op: OpOverload) -> bool:
    return any(a.name == "generator" for a in schema_arguments(op))


def _define_keyed(op: OpOverload) -> Callable[..., Any]:
    takes_generator = _takes_generator(op)
    name, rest = schema_text(op).removeprefix("aten::").split("(", 1)
    rest = re.sub(r"(, \*)?, Generator\? generator=None", "", rest)
    name = "bernoulli.of" if name == "bernoulli" else name  # beside the draw of a given size
    run = partial(_run_keyed, op, takes_generator)
    _define(f"{name}(Tensor key, int position, {rest}", run, partial(_fake_keyed, op))
    packet, _, overload = name.partition(".")
    named = getattr(getattr(torch.ops.zerofn, packet), overload or "default")

    def call(key: Tensor, position: int, *args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return (run if _is_eager(key, *tensors) else named)(key, position, *args, **kwargs)

    return call


# ATen's operation -> the same of (key, position, its arguments without a generator)
KEYED: dict[OpOverload, Callable[..., Any]] = {
    packet.default: _define_keyed(packet.default)
    for packet in (getattr(torch.ops.aten, name) for name in _KEYED_NAMES if hasattr(torch.ops.aten, name))
}


def permutation(key: Tensor, position: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random permutation of `range(n)`."""
    run = _run_randperm if _is_eager(key) else torch.ops.zerofn.randperm.default
    return run(key, position, n, dtype=dtype, device=device)


def is_draw(target: object, seeds: bool = False) -> bool:
    """Return whether an operation draws from a key. `seeds`: with a generator of its own, and not torch's default."""
    if not isinstance(target, OpOverload) or target.namespace != "zerofn":
        return False
    name = base_name(target)
    keyed = (base_name(op) for op in KEYED if not seeds or _takes_generator(op))
    return name in _FILLS or name == "randperm" or name in keyed

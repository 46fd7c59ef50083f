"""The GPU kernels of `csrc/cuda.cu`: what `cpu` does on the CPU, for tensors on one CUDA device, in torch's stream.

CuPy has the driver's functions; NVRTC compiles the kernels at their first use on a device (two to three seconds).
Nothing waits for the device, which reads counts, learning rates, factors and finite checks itself. Results are those of
the CPU library, bit for bit, except where `pow` of a device and of the host differ (`zf_runs`): at rare counts a
constant differs by an ulp. Without CuPy torch's operations serve. `ZEROFN_NATIVE=0` disables the kernels, as on the
CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..util.process import the
from .kernel_args import GRADIENTS, RULES, check_run_lists, check_tensor, check_tensors, moment_format, num_blocks, pair

# CuPy's own RawModule would add -ftz=true, with which small numbers lose their bits.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_UPDATES = ("update_whole", "update_half", "update_blocks")  # by the moments' format
_CODES = ("wire_encode", "wire_decode", "wire_sum", "sign_mix", "fp8", "fp8_scale")
KERNELS = ("runs", *_UPDATES, "chunks", "norms", "split", "joined", "encode", "decode", "cast", *_CODES)
_NUMBERS = {dtype: i for i, dtype in enumerate(GRADIENTS)}  # zf_number
_WARPS, _RUN_BYTES = 8, 64  # of a launch's block; of a zf_run
_CHUNK = 8192  # elements of a part that one warp reads: always, so that a part's sums are those of no other's


@functools.cache
def source() -> str:
    """`csrc/cuda.cu` with its headers in their places: one text, which needs no folder when it is compiled."""
    folder = Path(__file__).parent / "csrc"

    def text(name: str) -> str:
        return re.sub(r'^#include "(.+)"$', lambda found: text(found[1]), (folder / name).read_text(), flags=re.M)

    return text("cuda.cu")


@functools.cache
def missing() -> str | None:
    """Why the kernels are not used, as a sentence; None where they are."""
    reason = _reason()
    return f"The GPU kernels are not used: {reason}." if reason else None


def _reason() -> str | None:
    if os.environ.get("ZEROFN_NATIVE") == "0":
        return "ZEROFN_NATIVE is 0"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    wanted = int(torch.version.cuda.split(".")[0])
    package = f'`pip install "zerofn[cuda{wanted}]"`'
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); {package} installs it"
    if int(cupy.__version__.split(".")[0]) < 14:
        return f"CuPy is {cupy.__version__}, and they need 14 or newer; {package} brings it"
    have = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if have != wanted:
        return (
            f"torch was built for CUDA {wanted} and this CuPy for CUDA {have}; `pip uninstall cupy-cuda{have}x`, "
            f"then {package}"
        )
    try:
        driver = cupy.cuda.runtime.driverGetVersion() // 1000
        known = cupy.cuda.nvrtc.getSupportedArchs()
    except Exception as error:  # CuPy has an error class for each library
        nvrtc = "nvidia-cuda-nvrtc" if wanted > 12 else "nvidia-cuda-nvrtc-cu12"
        return f"CuPy finds no driver or no NVRTC ({error}); `pip install {nvrtc}` installs NVRTC"
    if driver == 0:
        return "CuPy finds no driver of an NVIDIA GPU; install one"
    if driver < have:
        return (
            f"the driver is for CUDA {driver} and this CuPy for CUDA {have}; take a torch for CUDA {driver} and "
            f'`pip install "zerofn[cuda{driver}]"`, or a newer driver'
        )
    if _capability(None) < min(known):
        return (
            f"NVRTC compiles for sm_{min(known)} and newer, and this GPU is of sm_{_capability(None)}; take a "
            'torch for CUDA 12 and `pip install "zerofn[cuda12]"`'
        )
    return None


def can_update(rule: str, p: Sequence[Tensor], g: Tensor, moments: Sequence[Sequence[Tensor]]) -> bool:
    """Whether `update_` takes these: the rule is known, everything on one device and in dtypes that it knows."""
    try:
        check_tensors(rule, p, g, moments, g.device)
    except (TypeError, ValueError):
        return False
    return True


def update_(
    rule: str,
    p: Sequence[Tensor],
    g: Tensor,
    moments: Sequence[Sequence[Tensor]],
    *,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    hyper: dict[str, Any],
    count: Tensor | int,
    lr: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    finite: Tensor | None = None,
    offset: int = 0,
) -> None:
    """`cpu.update_` on a GPU. What differs: `count`, `lr` (rates are multiplied by it), `factor` (the gradient is)
    and `finite` (bool; where False nothing changes) are scalar tensors, read on the device, or numbers.

    Raises `TypeError` and `ValueError` before anything is written, `RuntimeError` where `missing()` says why.
    """
    check_tensors(rule, p, g, moments, g.device)
    check_run_lists(g.numel(), starts, stops, rates, decays, (), offset)
    device, known = g.device, RULES[rule]
    table = _kept(_run_table(device, tuple(starts), tuple(stops), tuple(rates), tuple(decays)))
    if not len(table):
        return
    counted = _scalar(count, torch.int64, device)
    runs = _runs_of(rule, table, hyper, counted, lr)
    kept = [part for moment in moments for part in pair(moment)]
    launch(
        _UPDATES[moment_format(moments[0]) if moments else 0],
        device,
        num_blocks(g.numel()),
        known.number,
        _NUMBERS[g.dtype],
        *pair(p),
        g,
        *(*kept, *[None] * 4)[:4],
        counted,
        _scalar(factor, torch.float32, device),
        _scalar(finite, torch.bool, device),
        offset,
        g.numel(),
        runs,
        len(table),
    )


def _runs_of(
    rule: str, table: Tensor, hyper: dict[str, Any], count: Tensor | None, lr: Tensor | float | None
) -> Tensor:
    """The constants of each run, made on the device: uint8 [runs, bytes of one]."""
    device = table.device
    runs = torch.empty(len(table), _RUN_BYTES, dtype=torch.uint8, device=device)
    launch(
        "runs",
        device,
        -(-len(table) // 32),
        table,
        runs,
        len(table),
        RULES[rule].corrected,
        RULES[rule].decoupled,
        float(hyper.get("b1", 0.0)),
        float(hyper.get("b2", 0.0)),
        float(hyper.get("eps", 0.0)),
        bool(hyper.get("nesterov", False)),
        count,
        _scalar(lr, torch.float64, device),
    )
    return runs


def norms_and_extremes(
    g: Tensor, starts: Sequence[int], stops: Sequence[int], factor: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """(2-norms, largest magnitudes) of the parts [starts[i], stops[i]) of `g * factor`, float32 [num parts], in one
    read. `g`: fp32, bf16 or fp16 [size], its product with `factor` (float32 scalar or number) rounded to fp32.

    Squares are summed in float, eight by eight, their sums in double, in an order that only the part decides,
    whatever others are asked for beside it. A NaN or inf in a part makes its magnitude NaN or inf.
    """
    check_tensor("norms_and_extremes: g", g, GRADIENTS, device=g.device)
    for start, stop in zip(starts, stops, strict=True):
        if not 0 <= start <= stop <= g.numel():
            raise ValueError(f"norms_and_extremes: parts must be inside [0, {g.numel()}), got [{start}, {stop}).")
    device, num = g.device, len(starts)
    table, num_chunks = _part_table(device, tuple(starts), tuple(stops), _CHUNK)
    _kept(table)
    sums = torch.empty(num_chunks, dtype=torch.float64, device=device)
    largest = torch.empty(num_chunks, dtype=torch.int32, device=device)
    results = torch.empty(2, num, device=device)
    launch(
        "chunks",
        device,
        num_chunks,
        g,
        _NUMBERS[g.dtype],
        _scalar(factor, torch.float32, device),
        table,
        num,
        _CHUNK,
        sums,
        largest,
    )
    launch("norms", device, num, table, num, sums, largest, results)
    return results[0], results[1]


def split(p: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (bfloat16, int16) of its shape, exact; a NaN becomes the one NaN. See formats.h."""
    check_tensor("split: p", p, (torch.float32,), device=p.device)
    hi, lo = torch.empty_like(p, dtype=torch.bfloat16), torch.empty_like(p, dtype=torch.int16)
    launch("split", p.device, num_blocks(p.numel()), p, hi, lo, p.numel())
    return hi, lo


def high(p: Tensor) -> Tensor:
    """fp32 -> bfloat16, nearest, ties away from zero: the first of `split`."""
    check_tensor("high: p", p, (torch.float32,), device=p.device)
    hi = torch.empty_like(p, dtype=torch.bfloat16)
    launch("split", p.device, num_blocks(p.numel()), p, hi, None, p.numel())
    return hi


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """(bfloat16, int16) -> the fp32 they were split from."""
    check_tensor("join: hi", hi, (torch.bfloat16,), device=hi.device)
    check_tensor("join: lo", lo, (torch.int16,), hi.numel(), hi.device)
    p = torch.empty_like(hi, dtype=torch.float32)
    launch("joined", hi.device, num_blocks(hi.numel()), hi, lo, p, hi.numel())
    return p


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """`cpu.encode`: fp32 -> (uint8 codes of its shape, fp32 scales [ceil(size / 256)]), rounded to nearest."""
    check_tensor("encode: x", x, (torch.float32,), device=x.device)
    codes = torch.empty_like(x, dtype=torch.uint8)
    scales = torch.empty(num_blocks(x.numel()), device=x.device)
    launch("encode", x.device, num_blocks(x.numel()), x, codes, scales, x.numel(), signed)
    return codes, scales


def decode(codes: Tensor, scales: Tensor, signed: bool, out: Tensor | None = None) -> Tensor:
    """What `encode` made -> fp32 of the codes' shape."""
    check_tensor("decode: codes", codes, (torch.uint8,), device=codes.device)
    check_tensor("decode: scales", scales, (torch.float32,), num_blocks(codes.numel()), codes.device)
    x = torch.empty_like(codes, dtype=torch.float32) if out is None else out
    check_tensor("decode: out", x, (torch.float32,), codes.numel(), codes.device)
    launch("decode", codes.device, num_blocks(codes.numel()), codes, scales, x, codes.numel(), signed)
    return x


def cast(x: Tensor, dtype: torch.dtype, factor: Tensor | float | None = None) -> Tensor:
    """`(x.float() * factor).to(dtype)` in one pass: fp32, bf16 or fp16 to one of them, ties to even."""
    check_tensor("cast: x", x, GRADIENTS, device=x.device)
    if dtype not in GRADIENTS:
        raise TypeError(f"cast: dtype must be {' or '.join(map(str, GRADIENTS))}, got {dtype}.")
    y = torch.empty_like(x, dtype=dtype)
    launch(
        "cast",
        x.device,
        num_blocks(x.numel()),
        x,
        _NUMBERS[x.dtype],
        _scalar(factor, torch.float32, x.device),
        y,
        _NUMBERS[dtype],
        x.numel(),
    )
    return y


# --- tables on the device ------------------------------------------------------------------------------------------


class Kept:
    """Tables that launches have read, while somebody wants to keep them alive."""

    tables: list[Tensor] | None = None


@contextlib.contextmanager
def tables_kept() -> Iterator[list[Tensor]]:
    """Inside, every table that a launch reads is put on a list: what repeats the launches has to keep it."""
    found = the(Kept).tables = []
    try:
        yield found
    finally:
        the(Kept).tables = None


def _kept(table: Tensor) -> Tensor:
    if (tables := the(Kept).tables) is not None:
        tables.append(table)
    return table


def table_of(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Numbers that are known beforehand, int64 on the device."""
    return _kept(_table_of(device, numbers))


@functools.lru_cache(maxsize=4096)
def _table_of(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)


@functools.lru_cache(maxsize=4096)
def _run_table(
    device: torch.device,
    starts: tuple[int, ...],
    stops: tuple[int, ...],
    rates: tuple[float, ...],
    decays: tuple[float, ...],
) -> Tensor:
    """Runs that are not empty: rows of start, stop, and the bits of the float64 rate and decay; int64 [num, 4]."""
    rows = [row for row in zip(starts, stops, rates, decays, strict=True) if row[0] < row[1]]
    places = torch.tensor([row[:2] for row in rows], dtype=torch.int64).view(-1, 2)
    numbers = torch.tensor([row[2:] for row in rows], dtype=torch.float64).view(-1, 2)
    return torch.cat([places, numbers.view(torch.int64)], 1).to(device)


@functools.lru_cache(maxsize=4096)
def _part_table(
    device: torch.device, starts: tuple[int, ...], stops: tuple[int, ...], chunk: int
) -> tuple[Tensor, int]:
    """Rows of start, stop, and the chunks up to the part's last; int64 [num, 3]; and how many chunks there are."""
    rows, num_chunks = [], 0
    for start, stop in zip(starts, stops, strict=True):
        num_chunks += -(-(stop - start) // chunk)
        rows.append((start, stop, num_chunks))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(device), num_chunks


def _scalar(x: Tensor | float | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """A scalar on the device; `torch.full` takes a number along with its launch, where a copy would wait."""
    if x is None or (isinstance(x, Tensor) and x.device == device):
        return None if x is None else x.to(dtype)
    return torch.full((), float(x) if dtype.is_floating_point else int(x), dtype=dtype, device=device)


# --- CuPy ----------------------------------------------------------------------------------------------------------


def _capability(device: int | None) -> int:
    """80 of an A100, 90 of an H100."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _kernels(device: int) -> dict[str, Callable[..., None]]:
    """The kernels, compiled for the device; one newer than NVRTC knows gets PTX, which the driver translates."""
    from cupy.cuda import Module, nvrtc

    known = [arch for arch in nvrtc.getSupportedArchs() if arch <= _capability(device)]
    exact = _capability(device) in known
    program = nvrtc.createProgram(source(), "cuda.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture={'sm' if exact else 'compute'}_{max(known)}"))
        code = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC does not compile the GPU kernels: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    module = Module()
    module.load(code)
    return {name: module.get_function(f"zf_{name}") for name in KERNELS}


@functools.cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(name: str, device: torch.device, num_warps: int, *arguments: Tensor | float | None) -> None:
    """Run a kernel with work for `num_warps` warps. Tensors go as addresses, None as 0, integers in 64 bits."""
    if reason := missing():
        raise RuntimeError(reason)
    if not num_warps:
        return
    import cupy

    index = device.index
    num = max(1, min(-(-num_warps // _WARPS), 8 * _num_processors(index)))
    with torch.cuda.device(index), cupy.cuda.Device(index):
        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(index))
        _kernels(index)[name]((num,), (32 * _WARPS,), tuple(map(plain, arguments)), stream=stream)


def plain(x: Tensor | float | None) -> int | float:
    """What a kernel is given for it: an address, a 64-bit integer or a double."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    return x if isinstance(x, float) else int(x or 0)

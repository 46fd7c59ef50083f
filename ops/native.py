"""The shared library of `ops/csrc`: whether it is there, its functions, and the threads that they run on.

`ZEROFN_NATIVE=0` leaves the library alone; `ZEROFN_ISA=avx512|avx2|plain` chooses among its instruction sets.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .kernel_args import BLOCK

_VERSION = 11  # ZF_VERSION of the C interface
_PART = 1 << 16  # elements; a thread is not woken for fewer
_FAR = 16 << 20  # bytes of an output that caches do not hold until it is read, or not for long

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "update": ([_P, _N, _N], None),
    "split": ([_P, _P, _P, _N], None),
    "join": ([_P, _P, _P, _N], None),
    "encode": ([_P, _P, _P, _N, _I], None),
    "decode": ([_P, _P, _P, _N, _I], None),
    "to_bf16": ([_P, _P, _N, _N, _I], None),
    "sum_bf16": ([_P, _N, _P, _N, _N, _I], None),
    "norm2_and_extreme": ([_P, _I, _N, _P], None),
    "attention_forward": ([_P, _N, _N], None),
    "attention_backward": ([_P, _N, _N], None),
    "checksum": ([_P, _N], ctypes.c_uint64),
    "wire_encode": ([_P, _P, _P, _N, _N, _N, _I, _I, _I, _P, _N], None),
    "wire_decode": ([_P, _P, _P, _N, _N, _N, _I, _I, _I], None),
    "wire_sum": ([_P, _P, _N, _P, _N, _N, _N, _I, _I], None),
    "sign_mix": ([_P, _N, _N], None),
    "sign_encode": ([_P, _P, _P, _N, _N], None),
    "sign_decode": ([_P, _P, _P, _N, _N], None),
    "update_signs": ([_P, _P, _P, _N, _N], None),
}


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The loaded library, or a sentence why there is none."""
    from . import __path__ as folders  # two where the package is installed editable: the sources, and what was built

    if os.environ.get("ZEROFN_NATIVE") == "0":
        return "The CPU kernels are not used: ZEROFN_NATIVE is 0."
    found = [path for folder in folders if (path := Path(folder) / "libzerofn.so").exists()]
    reason = "it was not built; `pip install .` builds it"
    for path in found:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            reason = f"it does not load: {error}"
            continue
        library.zf_isas.restype = ctypes.c_char_p
        if library.zf_version() == _VERSION:
            return library
        reason = f"{path} is of version {library.zf_version()} and not {_VERSION}; `pip install .` builds it anew"
    return f"The CPU kernels' library libzerofn.so is not used: {reason}."


@functools.cache
def _functions(isa: str) -> dict[str, Callable[..., Any]]:
    library, functions = _library(), {}
    for name, (arguments, result) in _FUNCTIONS.items():
        functions[name] = function = getattr(library, f"zf_{name}_{isa}")
        function.argtypes, function.restype = arguments, result
    return functions


def kernel(name: str) -> Callable[..., Any]:
    """A function of the library, for the instruction set used."""
    return _functions(isa())[name]


def missing() -> str | None:
    """Why the library is not used, as a sentence; None where it is."""
    library = _library()
    return library if isinstance(library, str) else None


def isas() -> list[str]:
    """The library's instruction sets that this machine has, best first; none without the library."""
    library = _library()
    return [] if isinstance(library, str) else library.zf_isas().decode().split()


def isa() -> str:
    """The instruction set used: `avx512`, `avx2` or `plain`; `torch` without the library.

    Raises `ValueError` where `ZEROFN_ISA` names one that the machine does not have.
    """
    if missing():
        return "torch"
    wanted = os.environ.get("ZEROFN_ISA")
    if wanted and wanted not in isas():
        raise ValueError(f"ZEROFN_ISA is {wanted!r}, and this machine has {', '.join(isas())}; name one of them.")
    return wanted or isas()[0]


# --- threads -----------------------------------------------------------------------------------


def elementwise(name: str, size: int, *arrays: tuple[Tensor, float], last: int | None = None) -> None:
    """Call the library's `name` on blocks; an array is a tensor and its bytes an element."""
    function, ends = kernel(name), [] if last is None else [last]

    def part(at: int, end: int) -> None:
        function(*(x.data_ptr() + int(at * width) for x, width in arrays), end - at, *ends)

    in_parts(size, part)


def in_parts(size: int, part: Callable[[int, int], None], grain: int = BLOCK) -> None:
    """`part(at, end)` for all of [0, size), cut between blocks of `grain` elements, each on a thread."""
    num_parts = max(1, min(torch.get_num_threads(), size // _PART))
    num_blocks = -(-size // grain)
    step = -(-num_blocks // num_parts) * grain
    calls = [functools.partial(part, at, min(at + step, size)) for at in range(0, size, max(step, 1))]
    in_parallel(calls, size)


def goes_far(out: Tensor) -> int:
    """Whether an output is so large that the library writes it past the caches. A C int."""
    return int(out.nbytes >= _FAR)


def in_parallel(calls: Sequence[Callable[[], None]], size: int) -> None:
    """Make all calls, some by other threads; `size`: elements altogether, of which few are not worth a thread."""
    num_threads = min(torch.get_num_threads(), len(calls), size // _PART)
    if num_threads <= 1:
        for call in calls:
            call()
        return
    waiting = iter(list(calls))  # a list's iterator: each `next` is one step of the interpreter

    def work() -> None:
        for call in waiting:
            call()

    others: list[concurrent.futures.Future[None]] = []
    with contextlib.suppress(RuntimeError):  # the main thread has ended, after which executors take nothing more
        for _ in range(num_threads - 1):
            others.append(_pool(torch.get_num_threads()).submit(work))
    work()
    for other in others:
        other.result()


@functools.cache
def _pool(num_threads: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(num_threads - 1, thread_name_prefix="zerofn")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads are not forked

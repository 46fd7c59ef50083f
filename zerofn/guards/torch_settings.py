"""Settings of torch that decide which operations a step records: another setting takes another capture.

Those that kernels read while they run, such as the precision of matrix products, determinism, the number of threads
and seeds, take no other capture: a captured step obeys them as an eager one does. Ranks compare the first two, as they
do all others here. Grad mode is not here: a step is captured without it, and `grad` sets its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from .._torch_compat import modes_in_force, num_global_hooks
from ..util.by_identity import ByIdentity
from .tokens import Facts, plain

_cuda, _backends = torch.backends.cuda, torch.backends
_GETTERS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("torch.get_default_dtype()", torch.get_default_dtype),
    ("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled),
    ("torch.is_autocast_enabled('cpu')", lambda: torch.is_autocast_enabled("cpu")),
    ("torch.get_autocast_dtype('cpu')", lambda: torch.get_autocast_dtype("cpu")),
    ("torch.is_autocast_enabled('cuda')", lambda: torch.is_autocast_enabled("cuda")),
    ("torch.get_autocast_dtype('cuda')", lambda: torch.get_autocast_dtype("cuda")),
    ("torch.backends.cuda.flash_sdp_enabled()", _cuda.flash_sdp_enabled),
    ("torch.backends.cuda.mem_efficient_sdp_enabled()", _cuda.mem_efficient_sdp_enabled),
    ("torch.backends.cuda.math_sdp_enabled()", _cuda.math_sdp_enabled),
    ("torch.backends.cuda.cudnn_sdp_enabled()", _cuda.cudnn_sdp_enabled),
    ("torch.backends.mha.get_fastpath_enabled()", _backends.mha.get_fastpath_enabled),
    ("torch.backends.mkldnn.enabled", lambda: _backends.mkldnn.enabled),
    ("torch.backends.cudnn.enabled", lambda: _backends.cudnn.enabled),
    ("hooks of all modules", num_global_hooks),
)


def _precision(operations: Any) -> str:
    """Return a precision; one that nobody has set is full precision."""
    return "ieee" if operations.fp32_precision == "none" else str(operations.fp32_precision)


# Those that kernels read: a capture does not depend on them, but ranks that compute the same need the same.
_OF_KERNELS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("torch.are_deterministic_algorithms_enabled()", torch.are_deterministic_algorithms_enabled),
    ("torch.backends.cudnn.deterministic", lambda: _backends.cudnn.deterministic),
    ("torch.backends.cuda.matmul.fp32_precision", lambda: _precision(_cuda.matmul)),
    ("torch.backends.cudnn.conv.fp32_precision", lambda: _precision(cast(Any, _backends.cudnn).conv)),
    ("torch.backends.mkldnn.matmul.fp32_precision", lambda: _precision(cast(Any, _backends.mkldnn).matmul)),
    (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        lambda: _cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        lambda: _cuda.matmul.allow_fp16_reduced_precision_reduction,
    ),
)


def settings_of_all() -> dict[str, Any]:
    """Return the settings that must be the same on all ranks. A rank may have hooks of its own."""
    return {name: get() for name, get in (*_GETTERS, *_OF_KERNELS) if get is not num_global_hooks}


def settings_now() -> tuple[Any, ...]:
    """Return the values of all settings, and the modes in force: a device's, say."""
    return (*[get() for _, get in _GETTERS], *modes_in_force())


def facts_of(settings: tuple[Any, ...]) -> Facts:
    """Return settings as facts."""
    found: Facts = {name: plain(value) for (name, _), value in zip(_GETTERS, settings, strict=False)}
    for k, mode in enumerate(settings[len(_GETTERS) :]):
        found[f"torch's mode {k}"] = plain(mode) or ("mode", ByIdentity(mode))
    return found

"""What data sheets promise: the bfloat16 (or float16) matrix products of a device a second, without sparsity."""

from __future__ import annotations

import torch

# The first name that is part of the device's counts.
_TERAFLOPS = (
    ("GB200", 2500.0), ("B200", 2250.0), ("B100", 1750.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("GH200", 989.4),
    ("H200", 989.4), ("H100", 989.4), ("H800", 989.4), ("H20", 148.0), ("A100", 312.0), ("A800", 312.0), ("A10G", 70.0),
    ("A10", 125.0), ("A40", 149.7), ("A30", 165.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("V100", 125.0),
    ("T4", 65.0), ("5090", 209.5), ("4090", 165.2), ("3090", 71.0), ("3080", 59.5), ("TITAN RTX", 65.2),
    ("TitanRTX", 65.2), ("MI325X", 1307.4), ("MI300X", 1307.4), ("MI250X", 383.0),
)  # fmt: skip


def peak_of(name: str) -> float | None:
    """Return the operations a second of a device or machine with this in its name; None for an unknown one.

    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("8 x H100-8"), peak_of("my laptop")
    (989400000000000.0, 989400000000000.0, None)
    """
    return next((1e12 * x for part, x in _TERAFLOPS if part.lower() in name.lower()), None)


def peak_flops() -> float | None:
    """Return the peak FLOP/s of this process's GPU by its data sheet, for matrix products in bfloat16 (or float16)
    without sparsity; None without a known GPU. MFU is `step.flops / seconds / zerofn.peak_flops()`.

    >>> peak = peak_flops()
    >>> peak is None or peak > 1e12
    True
    """
    return peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None

"""Scratch space on drives: what a training step reads, changes and writes back while it computes."""

from ...memory.pinned import aligned, locked
from .engine import Request, Statistics
from .files import PAGE, DiskError, pages
from .store import Region, Store, scratch_space

__all__ = [
    "PAGE",
    "DiskError",
    "Region",
    "Request",
    "Statistics",
    "Store",
    "aligned",
    "locked",
    "pages",
    "scratch_space",
]

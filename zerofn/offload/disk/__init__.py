"""Scratch space on drives, which a training step reads, changes and writes back while it computes."""

from ...memory.pinned import aligned, locked
from ...util.errors import DiskError
from ...util.sizes import PAGE, pages
from .engine import Request, Statistics
from .region import Region
from .store import Store, scratch_space

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

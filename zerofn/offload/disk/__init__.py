"""Scratch space on drives, which a training step reads, changes and writes back while it computes.

Words:

- *store*: scratch files, one on each drive, of full size from the start, deleted when the process ends (`store.py`,
  `files.py`).
- *region*: the blocks of one value, spread over all drives of a store (`region.py`).
- *request*: a read or a write under way. It owns its buffer until it is done (`engine.py`).

A few threads per drive carry requests out block by block. `os.preadv` and `os.pwritev` release Python's lock, and so
does the checksum of each block, by which a drive that returns other bytes is noticed. `probe.py` measures the best
block size of a drive once per boot.

Start reading: `store.py`.
"""

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

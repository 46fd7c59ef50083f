"""CRC-32 at the speed of memory: zlib-ng has it in vector instructions, 6 to 13 times as fast as the standard
library's zlib, and with the same results.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:  # a platform without zlib-ng
    from zlib import crc32 as crc32

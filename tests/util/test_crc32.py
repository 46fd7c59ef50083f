"""The fast CRC-32 is the standard library's, bit for bit, and it is there where tests run."""

import random
import zlib

from zerofn.util import crc32


def test_the_checksum_is_that_of_zlib():
    assert crc32.crc32 is not zlib.crc32
    for size in (0, 1, 7, 63, 64, 65, 4096, 1 << 20):
        data = random.Random(size).randbytes(size)
        assert crc32.crc32(data) == zlib.crc32(data)
        assert crc32.crc32(memoryview(data)[3:], 12345) == zlib.crc32(data[3:], 12345)

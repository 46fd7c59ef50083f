"""`zerofn.ops.cuda` without a GPU: its kernels compiled as C++ by `cuda_on_cpu.h`, run thread by thread."""

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

from zerofn.ops import cuda

# As CMakeLists.txt compiles the CPU's; memory is read as words of another type, which C++ has no name for.
FLAGS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w", "-x", "c++", "-"]


def compiler():
    """The C++ compiler of this machine."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert found, "these tests need a C++ compiler: install g++ or clang++, or name one in CXX"
    return found


def build(folder):
    """The library of all kernels."""
    cases = [
        f'if (!strcmp(name, "{name}")) return launch(zf_{name}, kinds, given, num_blocks, num_threads);'
        for name in cuda.KERNELS
    ]
    text = "\n".join(
        [
            Path(__file__).with_name("cuda_on_cpu.h").read_text(),
            cuda.source(),
            'extern "C" int on_cpu(const char *name, const char *kinds, const void *const *given, unsigned num_blocks,',
            "                      unsigned num_threads) {",
            *cases,
            "return 3; }",
        ]
    )
    library = folder / "kernels_on_cpu.so"
    subprocess.run([compiler(), *FLAGS, "-o", library], input=text, text=True, check=True)
    return ctypes.CDLL(str(library))


def launcher(library, most_blocks):
    """A `cuda.launch` that runs them. `most_blocks`: a grid smaller than the work goes over it more than once."""

    def launch(name, device, num_warps, *arguments):
        if not num_warps:
            return
        values = [cuda.plain(x) for x in arguments]
        kinds = "".join("d" if isinstance(x, float) else "i" for x in values)
        cells = [
            ctypes.create_string_buffer(struct.pack(kind.replace("i", "q"), x), 8)
            for kind, x in zip(kinds, values, strict=True)
        ]
        given = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        num_blocks = min(-(-num_warps // 8), most_blocks)
        assert library.on_cpu(name.encode(), kinds.encode(), given, num_blocks, 256) == 0, name

    return launch

"""Systems that move the same bytes of the same file: fio, ZeroFn's engine, DeepSpeed's async_io.

Each has `seconds(work)` for one of `WORKS`. All use the scratch file that ZeroFn's store has open, by its
descriptor's path, since two files on one drive need not be equally fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.processes import BenchmarkError, program, tail

WORKS = ("write", "read", "mixed")  # mixed: half of the bytes read, half written, at the same time
REGION = 32 << 20  # bytes of a region: what a layer's state may have


class Engine:
    """ZeroFn: regions of 32 MiB through four buffers, every block with its checksum."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        from zerofn.offload.disk import Store, aligned

        self.store = Store(folder, nbytes, name="benchmark")
        self.regions = [self.store.allocate(REGION, f"region {k}") for k in range(nbytes // REGION)]
        self.buffers = [aligned(REGION) for _ in range(4)]
        for buffer in self.buffers:
            buffer.view(torch.int64).random_()

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.store._engine.files[0].fd}"

    @property
    def depth(self) -> int:
        return len(self.store._engine._threads)

    def seconds(self, work: str) -> float:
        if work == "mixed":  # others wrote to the file: what is read must be ours
            self.seconds("write")
        half = len(self.regions) // 2
        start, requests = time.perf_counter(), []
        for k, region in enumerate(self.regions):
            reads = work == "read" or work == "mixed" and k % 2 == 0
            if work == "mixed":
                region = self.regions[k // 2 + (0 if reads else half)]
            if k >= len(self.buffers):
                requests[k - len(self.buffers)].wait()
            move = self.store.read if reads else self.store.write
            requests.append(move(region, self.buffers[k % len(self.buffers)]))
        for request in requests:
            request.wait()
        return time.perf_counter() - start

    def close(self) -> None:
        self.store.close()


class Fio:
    """fio with libaio and O_DIRECT, sequentially, `depth` blocks under way.

    `huge`: its memory in huge pages, as ZeroFn's is, which glibc is asked for. `share`: the part that is read where
    both is done.
    """

    def __init__(self, path: str, nbytes: int, block: int, depth: int, *, huge: bool, share: float = 0.5) -> None:
        self.environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})
        options = {"name": "zerofn", "filename": path, "size": nbytes, "bs": block, "iodepth": depth}
        options |= {"direct": 1, "ioengine": "libaio", "fallocate": "none", "output-format": "json"}
        options["rwmixread"] = round(100 * share)
        self.command = ["fio", *(f"--{name}={value}" for name, value in options.items())]

    def seconds(self, work: str) -> float:
        rw = {"write": "write", "read": "read", "mixed": "rw"}[work]
        try:
            done = subprocess.run([*self.command, f"--rw={rw}"], env=self.environment, capture_output=True,
                                  text=True, check=False)  # fmt: skip
        except FileNotFoundError as error:
            raise BenchmarkError("fio is missing; install it: apt-get install fio") from error
        if done.returncode:
            raise BenchmarkError(f"fio ended with code {done.returncode}: {done.stderr.strip()[-400:]}")
        (job,) = json.loads(done.stdout)["jobs"]
        return max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3

    def close(self) -> None:
        pass


class AsyncIO:
    """DeepSpeed's async_io in a process of the peers' environment, one request for the whole file."""

    def __init__(self, python: Path, path: str, nbytes: int, block: int, depth: int) -> None:
        if not python.exists():
            raise BenchmarkError(f"not built: {python} is missing; `make bench` makes it")
        self.log = Path(tempfile.mkstemp(prefix="async_io-")[1])
        arguments = map(str, (path, nbytes, block, depth))
        # Its builder calls ninja by name.
        paths = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
        with self.log.open("w") as log:
            self.child = subprocess.Popen(
                [*program(str(python), "benchmarks.drives.rows"), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"PATH": paths},
            )  # fmt: skip
        try:
            self._answer()
        except BenchmarkError as error:
            raise BenchmarkError(f"not built: {error}") from error

    def seconds(self, work: str) -> float:
        assert self.child.stdin is not None
        self.child.stdin.write(work + "\n")
        self.child.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise BenchmarkError(f"async_io ended with code {self.child.wait()}. {tail(self.log)}")

    def close(self) -> None:
        self.child.communicate()
        self.log.unlink(missing_ok=True)


def serve_async_io(path: str, nbytes: int, block: int, depth: int) -> None:
    """In the peers' environment: a work a line, the seconds it took as the answer."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    library = AsyncIOBuilder().load()
    # DeepSpeed's swapper has a handle for reads and one for writes, each with a thread.
    reader, writer = (library.aio_handle(block, depth, False, True, 1) for _ in range(2))
    memory = writer.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    memory.view(torch.int64).random_()
    print("RESULT 0", flush=True)
    for line in sys.stdin:
        start, half = time.perf_counter(), nbytes // 2
        work, begun = line.strip(), []
        if work != "write":
            part = memory if work == "read" else memory[:half]
            reader.async_pread(part, path, 0)
            begun.append(reader)
        if work != "read":
            part, at = (memory, 0) if work == "write" else (memory[half:], half)
            writer.async_pwrite(part, path, at)
            begun.append(writer)
        if any(handle.wait() != 1 for handle in begun):
            raise BenchmarkError(f"async_io did not complete its {work}")
        print(f"RESULT {time.perf_counter() - start}", flush=True)


if __name__ == "__main__":
    serve_async_io(sys.argv[1], *map(int, sys.argv[2:]))

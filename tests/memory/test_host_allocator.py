import subprocess
import sys

import pytest
import torch

from zerofn.memory.host_allocator import zeros

# malloc is asked itself: not every kernel counts page faults.
PROGRAM = """
import ctypes, torch
from zerofn.memory.host_allocator import keep_freed_memory

class Info(ctypes.Structure):  # struct mallinfo2 of glibc's malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo2 is None:
    print("unknown")
else:
    mallinfo2.restype = Info
    told = {told}
    before = mallinfo2()
    blocks = [torch.ones(16 << 20) for _ in range(3)]
    mapped = mallinfo2().hblkhd - before.hblkhd
    del blocks
    print(told, mapped >> 20, (mallinfo2().fordblks - before.fordblks) >> 20)
"""


def mapped_and_kept(told):
    """-> what was said, MiB that were mapped for three blocks of 64 MiB, MiB that malloc still has of them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{told}", told)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    if done == ["unknown"]:
        pytest.skip("this C library has no mallinfo2")
    return done[0], int(done[1]), int(done[2])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_malloc_keeps_what_was_freed():
    said, mapped, kept = mapped_and_kept("keep_freed_memory()")
    assert said == "True" and mapped == 0 and kept >= 191


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_malloc_gives_it_back_if_it_is_not_told():
    """What the test above would see if nothing had been said."""
    said, mapped, kept = mapped_and_kept("None")
    assert said == "None" and mapped >= 192 and kept <= 1


CREATION = """
import ctypes, torch, zerofn
from zerofn import optim

def now(field):
    return next(int(x.split()[1]) << 10 for x in open("/proc/self/status") if x.startswith(field))

def init():
    torch.manual_seed(0)
    params = {str(k): torch.randn(1 << 21) for k in range(24)}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))

zerofn.skeleton(lambda: torch.nn.Linear(2, 3))
before = now("VmData")
module = zerofn.skeleton(lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 2048) for _ in range(24))))
print(now("VmData") - before)
zerofn.shard(lambda: zerofn.TrainState.create(params={"x": torch.randn(8)}, tx=optim.adamw(1e-3)))
ctypes.CDLL(None).malloc_trim(0)
before = now("RssAnon")
state = zerofn.shard(init, precision="bf16")
print(now("RssAnon") - before, 24 * 12 << 21)
"""


@pytest.mark.whole
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_skeletons_and_new_states_leave_no_holes_in_the_heap():
    done = subprocess.run([sys.executable, "-c", CREATION], capture_output=True, text=True, check=True, timeout=120)
    skeleton, took, needed = map(int, done.stdout.split())
    assert skeleton < 4 << 20 and needed <= took <= 1.01 * needed


@pytest.mark.parametrize("nbytes", [5 << 20, 3 << 10])
def test_zeros_lie_on_the_host_large_or_small(nbytes):
    x = zeros(nbytes // 4, torch.float32, torch.device("cpu"))
    assert x.shape == (nbytes // 4,) and not x.any() and torch.equal(x.add_(1), torch.ones(nbytes // 4))


def test_memory_that_cannot_be_had_is_an_error_of_memory():
    with pytest.raises(MemoryError, match=r"1,125,899,906,842,624 bytes of host memory are not available"):
        zeros(1 << 48, torch.float32, torch.device("cpu"))

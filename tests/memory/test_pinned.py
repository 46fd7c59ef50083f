"""Page-locked memory, with a driver that only notes what it is asked for."""

import contextlib
import types
from pathlib import Path

import pytest
import torch

import zerofn
from zerofn.memory import pinned
from zerofn.memory.pinned import ForCopies, ForDrives, aligned, like, locked, release
from zerofn.util.process import instead, the
from zerofn.util.sizes import PAGE

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.uint8]


class Driver:
    """`locked`: address -> bytes. `refuses`: whether it locks nothing more."""

    def __init__(self):
        self.locked, self.refuses, self.told, self.num_locks = {}, False, [], 0

    def cudaHostRegister(self, address, nbytes, flags):
        if self.refuses:
            return 2
        assert not flags and address % PAGE == 0 and address not in self.locked
        self.locked[address] = nbytes
        self.num_locks += 1
        return 0

    def cudaHostUnregister(self, address):
        self.told.append(("unlock", address))
        del self.locked[address]


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.told.append(("wait", device)))
    monkeypatch.setattr(pinned, "forget_error", lambda: found.told.append("error forgotten"))
    with instead(ForCopies()), instead(ForDrives()):
        yield found
        release()
    assert not found.locked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_cuda", [False, True])
def test_locked_memory_is_no_larger_than_asked_for(request, dtype, has_cuda):
    driver = request.getfixturevalue("driver") if has_cuda else None
    x = locked((1 << 16) + 8, dtype)
    assert not x.any() and x.data_ptr() % PAGE == 0 and x.untyped_storage().nbytes() == x.nbytes
    assert driver is None or list(driver.locked.values()) == [-(-x.nbytes // PAGE) * PAGE]
    assert torch.equal(x.fill_(3), torch.full_like(x, 3)) and locked(0, dtype).numel() == 0


def test_memory_is_locked_once_and_unlocked_after_the_copies_of_its_device(driver):
    """Not those of the current device, which may be another one."""
    for device, index in ((torch.device("cuda", 3), 3), (None, 0)):
        x = locked(5000, torch.float32, device)
        address, view = x.data_ptr(), x[10:]
        del x
        assert driver.locked == {address: 5 * PAGE} and not view.any()
        del view
        assert driver.told == [("wait", index), ("unlock", address)]
        driver.told.clear()


def test_what_comes_and_goes_is_locked_once(driver):
    """And takes no more than its pages, where torch's allocator would take 128 KiB."""
    pool = the(ForDrives)
    for turn in range(3):
        lent = [aligned(17 * PAGE), aligned(17 * PAGE), aligned(100)]
        assert driver.num_locks == 3 and pool.nbytes == sum(driver.locked.values()) == 35 * PAGE
        assert len({x.data_ptr() for x in lent}) == 3 and not any(x.data_ptr() % PAGE for x in lent)
        for k, x in enumerate(lent):
            x.fill_(10 * turn + k)
        assert [int(x[-1]) for x in lent] == [10 * turn + k for k in range(3)]
        del lent, x
    view = aligned(17 * PAGE)[:PAGE].view(torch.float32).fill_(1)
    others = [aligned(17 * PAGE).zero_() for _ in range(3)]
    assert view.eq(1).all() and driver.num_locks == 5 and not any(x.any() for x in others)


def test_each_device_has_its_own(driver):
    """Streams of one device do not wait for those of another."""
    pool = the(ForDrives)
    first = pool.take(PAGE, torch.device("cuda", 1)).data_ptr()
    assert pool.take(PAGE).data_ptr() != first == pool.take(PAGE, torch.device("cuda", 1)).data_ptr()


def test_drives_get_nothing_that_a_device_may_still_copy(driver):
    """A stream orders copies of one device, and no drive."""
    address = like(torch.ones(PAGE // 4), torch.device("cuda", 0)).data_ptr()
    assert aligned(PAGE).data_ptr() != address == like(torch.ones(PAGE // 4), torch.device("cuda", 0)).data_ptr()
    assert the(ForCopies).nbytes == the(ForDrives).nbytes == PAGE


def test_what_is_being_read_is_kept(driver):
    pool, copy = the(ForDrives), types.SimpleNamespace(done=False)
    x = aligned(PAGE)
    address = x.data_ptr()
    pool.keep(x, copy)
    pool.keep(torch.zeros(3), copy)  # not its own
    del x
    assert aligned(PAGE).data_ptr() != address
    copy.done = True
    found = [aligned(PAGE), aligned(PAGE)]
    assert address in [x.data_ptr() for x in found] and driver.num_locks == 2


def test_a_program_that_is_captured_unlocks_what_others_left(driver, monkeypatch):
    """Its values have other sizes."""
    kept, gone = aligned(PAGE), aligned(3 * PAGE)
    del gone
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = zerofn.shard({"params": {"w": torch.ones(3)}})
    zerofn.compile(lambda state, batch: zerofn.gather(state["params"])["w"].sum())(state, {})
    assert list(driver.locked) == [kept.data_ptr()] and the(ForDrives).nbytes == PAGE


def test_a_lock_that_fails_leaves_no_error_behind(driver, monkeypatch):
    """CUDA's last error would otherwise be raised by the next launch of a kernel. torch locks in another way."""
    asked = []
    monkeypatch.setattr(pinned, "_by_torch", lambda nbytes: asked.append(nbytes) or torch.ones(nbytes).byte())
    driver.refuses = True
    assert aligned(5).shape == (PAGE,) and not locked(1025, torch.float32).any()
    assert asked == [PAGE, 2 * PAGE] and driver.told == ["error forgotten"] * 2 and not the(ForDrives).nbytes


def test_without_memory_what_is_free_is_unlocked_first(driver, monkeypatch):
    mapped = pinned.in_huge_pages

    def scarce(kind, nbytes):
        if driver.locked:
            raise MemoryError
        return mapped(kind, nbytes)

    monkeypatch.setattr(pinned, "in_huge_pages", scarce)
    x = aligned(PAGE)
    del x
    x = aligned(2 * PAGE)
    assert list(driver.locked.values()) == [2 * PAGE] and the(ForDrives).nbytes == 2 * PAGE
    with contextlib.suppress(MemoryError):
        aligned(PAGE)
    assert x.data_ptr() in driver.locked


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3, 2)])
def test_copies_have_the_strides_of_what_they_copy(driver, dtype, shape):
    x = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape).permute(tuple(reversed(range(len(shape)))))
    found = like(x, torch.device("cuda", 0))
    found.copy_(x)
    assert found.stride() == x.stride() and found.dtype == x.dtype and torch.equal(found, x)


def test_one_place_locks_memory():
    names = ("cudaHostRegister", "pin_memory")
    folder = Path(zerofn.__file__).parent
    found = {x.name for x in folder.rglob("*.py") if any(name in x.read_text() for name in names)}
    assert found == {"pinned.py"}

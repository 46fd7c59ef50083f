"""What is written comes back: all sizes, several drives, many requests at a time, in the order of calls."""

import gc
import os
import random
import threading
import time
import weakref

import pytest
import torch

from tests.support.disk_stores import BLOCK, behind_its_back, files_of, filled, small_store, written
from zerofn.offload.disk import PAGE, DiskError, Store, aligned, checksum, pages

pytestmark = pytest.mark.filterwarnings("ignore:.*O_DIRECT")


@pytest.fixture(params=[1, 3], ids=["one drive", "three drives"])
def folders(request, tmp_path):
    made = [tmp_path / str(k) for k in range(request.param)]
    for folder in made:
        folder.mkdir()
    return made


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, BLOCK, BLOCK + 1, 7 * BLOCK - 3, 1_000_003])
def test_round_trip(folders, nbytes):
    with small_store(*folders) as store:
        store.allocate(5, "before")
        region, data = written(store, nbytes)
        found = aligned(nbytes).fill_(7)
        store.read(region, found).wait()
        assert torch.equal(found, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_buffers_of_other_dtypes(tmp_path, dtype):
    n = 3 * PAGE
    with small_store(tmp_path) as store:
        region = store.allocate(n * dtype.itemsize, "w")
        data = aligned(2 * PAGE + n * dtype.itemsize)[2 * PAGE :].view(dtype)
        expected = torch.randn(n).mul(100).to(dtype)
        data.copy_(expected)
        store.write(region, data).wait()
        found = aligned(region.nbytes)
        store.read(region, found).wait()
        assert torch.equal(found[: region.nbytes].view(dtype), expected)


def test_blocks_lie_on_all_drives(folders):
    with small_store(*folders, nbytes=12 * BLOCK) as store:
        _, data = written(store, 12 * BLOCK)
        found = []
        for drive in range(len(folders)):
            with behind_its_back(store, drive) as fd:
                found.append(os.pread(fd, 12 * BLOCK, 0)[: 12 * BLOCK // len(folders)])
        blocks = [data[k * BLOCK : (k + 1) * BLOCK].numpy().tobytes() for k in range(12)]
        assert found == [b"".join(blocks[drive :: len(folders)]) for drive in range(len(folders))]


def test_space_is_taken_at_once_and_given_back(folders):
    nbytes = 3 << 20
    store = small_store(*folders, nbytes=nbytes)
    taken = [os.fstat(file.fd).st_blocks * 512 for file in files_of(store)]
    assert min(taken) >= nbytes // len(folders)
    descriptors = [f"/proc/self/fd/{file.fd}" for file in files_of(store)]
    assert all(str(folder) in os.readlink(d) for folder, d in zip(folders, descriptors, strict=True))
    assert [os.listdir(folder) for folder in folders] == [[]] * len(folders)
    store.close()
    assert not any(os.path.exists(d) for d in descriptors)


@pytest.mark.parametrize("seed", range(4))
def test_against_a_model_in_memory(folders, seed):
    draw = random.Random(seed)
    sizes = [draw.choice([1, 4096, 5000, BLOCK + 7, 6 * BLOCK - 100, 100_000]) for _ in range(12)]
    with small_store(*folders, nbytes=sum(map(pages, sizes))) as store:
        regions = [store.allocate(size, f"region {k}") for k, size in enumerate(sizes)]
        model = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        under_way = []
        for step in range(400):
            k = draw.randrange(len(regions))
            if draw.random() < 0.5:
                buffer = filled(sizes[k], seed=step)
                model[k] = buffer[: sizes[k]].clone()
                under_way.append((store.write(regions[k], buffer), None, None))
            else:
                buffer = aligned(sizes[k]).fill_(9)
                under_way.append((store.read(regions[k], buffer), buffer[: sizes[k]], model[k]))
            while len(under_way) > draw.randrange(30):
                request, found, expected = under_way.pop(draw.randrange(len(under_way)))
                request.wait()
                assert found is None or torch.equal(found, expected)


def test_not_written_is_zeros_and_no_transfer(folders):
    with small_store(*folders) as store:
        region, found = store.allocate(50_000, "fresh"), aligned(50_000).fill_(7)
        store.read(region, found).wait()
        assert not found.any()
        assert store.statistics.bytes_read == 0


def slowly(monkeypatch, name, seconds=0.05):
    """Let `os.preadv` or `os.pwritev` begin late."""
    move = getattr(os, name)

    def late(*arguments):
        time.sleep(seconds)
        return move(*arguments)

    monkeypatch.setattr(os, name, late)


def test_a_read_comes_after_the_writes_before_it(tmp_path, monkeypatch):
    with small_store(tmp_path, depth=8) as store:
        region, _ = written(store, 3 * BLOCK, seed=1)
        slowly(monkeypatch, "pwritev")
        first, second, found = filled(3 * BLOCK, seed=2), filled(3 * BLOCK, seed=3), aligned(3 * BLOCK)
        store.write(region, first)
        store.write(region, second)
        store.read(region, found).wait()
        assert torch.equal(found, second)


def test_a_write_comes_after_the_reads_before_it(tmp_path, monkeypatch):
    with small_store(tmp_path, depth=8) as store:
        region, old = written(store, 3 * BLOCK, seed=1)
        slowly(monkeypatch, "preadv")
        one, two, found = aligned(3 * BLOCK), aligned(3 * BLOCK), aligned(3 * BLOCK)
        reads = [store.read(region, one), store.read(region, two)]
        write = store.write(region, filled(3 * BLOCK, seed=2))
        last = store.read(region, found)
        write.wait()
        assert all(read.done for read in reads)
        last.wait()
        assert torch.equal(one, old) and torch.equal(two, old)
        assert torch.equal(found, filled(3 * BLOCK, seed=2))


def test_reads_of_one_region_run_together(tmp_path, monkeypatch):
    with small_store(tmp_path, depth=2) as store:
        region, data = written(store, 100)
        meet, move = threading.Barrier(2), os.preadv
        monkeypatch.setattr(os, "preadv", lambda *a: meet.wait(10) is None or move(*a))
        buffers = [aligned(100), aligned(100)]
        for request in [store.read(region, buffer) for buffer in buffers]:
            request.wait()
        assert all(torch.equal(buffer, data) for buffer in buffers)


@pytest.mark.parametrize("depth", [1, 4])
def test_as_many_transfers_as_asked_are_under_way_on_each_drive(folders, monkeypatch, depth):
    most, now, lock, move = {}, {}, threading.Lock(), os.pwritev

    def counted(fd, *rest):
        with lock:
            now[fd] = now.get(fd, 0) + 1
            most[fd] = max(now[fd], most.get(fd, 0))
        time.sleep(0.01)
        with lock:
            now[fd] -= 1
        return move(fd, *rest)

    monkeypatch.setattr(os, "pwritev", counted)
    with small_store(*folders, depth=depth) as store:
        written(store, 30 * BLOCK)
        assert most == {file.fd: depth for file in files_of(store)}


def test_requests_from_many_threads(folders):
    with small_store(*folders, nbytes=1 << 20) as store:
        wrong = []

        def work(k):
            region = store.allocate(20_000, f"thread {k}")
            for turn in range(10):
                data, found = filled(20_000, seed=100 * k + turn), aligned(20_000)
                store.write(region, data)
                store.read(region, found).wait()
                if not torch.equal(found, data):
                    wrong.append((k, turn))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_statistics_and_words(tmp_path):
    with small_store(tmp_path) as store:
        region, _ = written(store, 10_000)
        store.read(region, aligned(10_000)).wait()
        counts = store.statistics
        assert (counts.bytes_read, counts.bytes_written) == (pages(10_000), pages(10_000))
        assert 0 < counts.seconds_busy < 5 and 0 < counts.seconds_waited < 5
        assert str(tmp_path) in store.describe() and "0.001 GB" in store.describe()


def test_a_store_that_nobody_holds_is_closed(tmp_path):
    before = threading.active_count()
    store = small_store(tmp_path)
    region, data = written(store, 10_000)
    descriptor, gone = f"/proc/self/fd/{files_of(store)[0].fd}", weakref.ref(store)
    found = aligned(10_000)
    request = store.read(region, found)
    del store, region
    request.wait()  # what is under way keeps it
    assert torch.equal(found, data)
    del request
    end = time.monotonic() + 10  # a thread may still have it in hand for a moment
    while (gone() or os.path.exists(descriptor) or threading.active_count() > before) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None and not os.path.exists(descriptor)
    assert threading.active_count() == before


def test_closing_ends_what_is_under_way(tmp_path, monkeypatch):
    store = small_store(tmp_path, depth=1)
    region = store.allocate(30 * BLOCK, "w")
    slowly(monkeypatch, "pwritev", 0.02)
    requests = [store.write(region, filled(30 * BLOCK)), store.read(region, aligned(30 * BLOCK))]
    start = time.perf_counter()
    store.close()
    store.close()
    assert time.perf_counter() - start < 0.4
    for request in requests:
        with pytest.raises(DiskError, match="^moments: this store is closed"):
            request.wait()
    with pytest.raises(DiskError, match="^moments: this store is closed"):
        store.read(region, aligned(30 * BLOCK))


# --- buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 1_000_000])
def test_aligned(nbytes):
    buffer = aligned(nbytes)
    assert (buffer.dtype, buffer.numel(), buffer.data_ptr() % PAGE) == (torch.uint8, pages(nbytes), 0)
    buffer.fill_(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="buffers are CUDA's, which chooses their pages")
@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without them")
def test_buffers_ask_for_huge_pages():
    buffer = aligned(3 << 20).fill_(1)
    inside, flags = False, ""
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in (first := line.split()[0]) and not first.endswith(":"):
                low, high = (int(end, 16) for end in first.split("-"))
                inside = low <= buffer.data_ptr() < high
            elif inside and first == "VmFlags:":
                flags = line
    assert " hg" in flags and buffer.data_ptr() % (2 << 20) == 0


# --- what cannot be asked ---------------------------------------------------------------------


def test_more_than_there_is_room_for(folders):
    with small_store(*folders, nbytes=5 * PAGE) as store:
        store.allocate(3 * PAGE + 1, "layers.0 exp_avg")
        with pytest.raises(ValueError, match=r"^moments: layers.1 exp_avg needs 8,192 bytes, but 4,096 of 20,480 are"):
            store.allocate(PAGE + 1, "layers.1 exp_avg")
        store.allocate(PAGE, "layers.2 exp_avg")


@pytest.mark.parametrize("sizes", [[1, 1, 1, BLOCK], [BLOCK, 1, 7 * BLOCK], [5 * BLOCK + 1, 1, BLOCK - 1, 3 * BLOCK]])
def test_every_region_lies_in_space_that_was_taken(folders, sizes):
    with small_store(*folders, nbytes=sum(map(pages, sizes))) as store:
        places = set()
        for size in sizes:
            region = store.allocate(size, "w")
            for block in region.blocks:
                assert block.offset + block.nbytes <= files_of(store)[block.drive].nbytes
                places |= {(block.drive, block.offset + at) for at in range(0, block.nbytes, PAGE)}
        assert len(places) * PAGE == store.allocated == store.nbytes


def test_wrong_arguments(tmp_path):
    for arguments, said in [
        ({"paths": [], "nbytes": 1}, "paths must be one or more folders"),
        ({"paths": tmp_path, "nbytes": 0}, "nbytes must be 1 or more, not 0"),
        ({"paths": tmp_path, "nbytes": 1, "block": 1000}, "block must be a multiple of 4096 bytes, not 1000"),
        ({"paths": tmp_path, "nbytes": 1, "depth": 0}, "depth must be 1 or more, not 0"),
    ]:
        with pytest.raises(ValueError, match=f"^moments: {said}"):
            Store(**arguments, name="moments")


def test_wrong_buffers(tmp_path):
    with small_store(tmp_path) as store, small_store(tmp_path, name="other") as other:
        region = store.allocate(10_000, "w")
        for buffer, said in [
            (aligned(12_000)[:10_000], "has 10,000 bytes, but whole pages .* 12,288"),
            (aligned(20_000)[1:], "begin at a multiple of 4096"),
            (aligned(80_000)[::2], "must be contiguous"),
            (torch.empty(20_000, device="meta"), "in host memory"),
        ]:
            with pytest.raises(ValueError, match=f"^moments: the buffer for w .*{said}"):
                store.write(region, buffer)
        with pytest.raises(ValueError, match="^other: w belongs to another store, moments"):
            other.read(region, aligned(10_000))
        with pytest.raises(ValueError, match="^moments: w must have 1 byte or more, not 0"):
            store.allocate(0, "w")


def test_checksums_tell_bytes_and_places_apart():
    data = filled(BLOCK)
    sums = {checksum.checksum(data.data_ptr(), BLOCK)}
    for k in (0, 1, 8, 4095, BLOCK - 1):
        data[k] ^= 1
        sums.add(checksum.checksum(data.data_ptr(), BLOCK))
        data[k] ^= 1
    data[:64], data[64:128] = data[64:128].clone(), data[:64].clone()
    sums.add(checksum.checksum(data.data_ptr(), BLOCK))
    assert len(sums) == 7 and min(sums) >= 0

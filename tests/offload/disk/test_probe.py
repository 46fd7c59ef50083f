"""What is measured of a drive, what is chosen from it, and that it is measured once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.disk_stores import written
from zerofn.offload.disk import DiskError, Store, probe

pytestmark = pytest.mark.filterwarnings("ignore:.*O_DIRECT")
MB, GB = 1e6, 1e9


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(monkeypatch, folder, rate):
    """What is chosen if `rate(block, depth, writes)` is what trials find."""
    monkeypatch.setattr(probe, "_trial", lambda file, memory, block, depth, writes: rate(block, depth, writes))
    return probe.measure(folder)


def test_the_least_under_way_that_is_fast_enough(monkeypatch, tmp_path):
    def saturating(block, depth, writes):  # latency of 0.1 ms, 3 GB/s at most
        return min(3 * GB, depth * block / (1e-4 + block / (1 * GB))) / (2 if writes else 1)

    drive = measured(monkeypatch, tmp_path, saturating)
    best = saturating(8 << 20, 8, False)
    tried = [(b, d) for b in probe.BLOCKS for d in probe.DEPTHS if b * d <= probe.SPACE]
    enough = [b * d for b, d in tried if saturating(b, d, False) >= 0.95 * best]
    assert drive.block * drive.depth == min(enough) == 4 << 20
    assert (drive.read, drive.write, drive.rate) == pytest.approx((3 * GB, 1.5 * GB, 2 * GB))
    for rate, chosen in [(0.96, (1 << 20, 2)), (0.94, (2 << 20, 2))]:
        drive = measured(monkeypatch, tmp_path, lambda b, d, writes, rate=rate: rate if b * d == (2 << 20) else 1.0)
        assert (drive.block, drive.depth) == chosen
    flat = measured(monkeypatch, tmp_path, lambda *_: 1 * GB)
    assert (flat.block, flat.depth) == (1 << 20, 2)
    deep = measured(monkeypatch, tmp_path, lambda block, depth, writes: block * depth)
    assert deep.block * deep.depth == probe.SPACE


def test_one_disturbed_trial_decides_nothing(monkeypatch, tmp_path):
    trials = []

    def rate(block, depth, writes):
        trials.append((block, depth, writes))
        if (block, depth) == (8 << 20, 2) and trials.count(trials[-1]) == 1:
            return 50 * GB
        return 1 * GB

    drive = measured(monkeypatch, tmp_path, rate)
    assert (drive.block, drive.depth) == (1 << 20, 2)


def test_a_slow_drive_does_not_take_long(monkeypatch, tmp_path):
    def rate(block, depth, writes):
        time.sleep(0.3)
        return 100 * MB

    start = time.monotonic()
    assert measured(monkeypatch, tmp_path, rate).depth == 2
    assert time.monotonic() - start < 3


def test_this_drive(tmp_path):
    start = time.monotonic()
    drive = probe.probe(tmp_path)
    assert time.monotonic() - start < 5
    assert drive.block in probe.BLOCKS and drive.depth in probe.DEPTHS
    assert 1 * MB < drive.write < 1e3 * GB and 1 * MB < drive.read < 1e3 * GB
    assert f"with {drive.depth} blocks of {drive.block >> 20} MiB under way" in drive.describe()
    with Store([tmp_path, tmp_path], 100_000, name="moments") as store:
        written(store, 100_000)
        assert store.block == drive.block and store.describe().count(drive.describe()) == 2


@pytest.mark.slow
def test_measured_once_for_all_processes(monkeypatch, tmp_path):
    drive = measured(monkeypatch, tmp_path, lambda *_: 1 * GB)
    assert probe.probe(tmp_path) == drive
    monkeypatch.setattr(probe, "measure", pytest.fail)
    assert probe.probe(tmp_path) == drive
    monkeypatch.setattr(probe, "_known", {})
    assert probe.probe(tmp_path) == drive
    code = "import sys, pathlib; from zerofn.offload.disk import probe; print(probe.probe(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.strip() == str(drive)


@pytest.mark.parametrize("name, other", [("_boot", lambda: "later"), ("function", lambda: test_this_drive)])
def test_another_start_of_the_machine_or_checksum_is_another_drive(monkeypatch, tmp_path, name, other):
    drive = measured(monkeypatch, tmp_path, lambda *_: 1 * GB)
    probe.probe(tmp_path)
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(probe, name, other)
    monkeypatch.setattr(probe, "_trial", lambda *_, writes: 2 * GB)
    assert probe.probe(tmp_path).read == 2 * drive.read
    assert len(json.loads((tmp_path / "cache/zerofn/drives.json").read_text())) == 2


KEPT = '{"%s": {"block": 1048576, "depth": 2, "read": 2e9, "write": 2e9, "direct": true}}'
FLIPPED = [("1048576", "0"), ("1048576", "1048577"), ('h": 2', 'h": -2'), ('h": 2', 'h": true'), ("2e9", "NaN"),
           ("2e9", "2e999"), ("2e9", "0.0"), ("true", "1")]  # fmt: skip


@pytest.mark.parametrize(
    "content", ["", '{"65024-', "[1]", "[" * 10**6, '{"%s": {"block": 1}}', *(KEPT.replace(*x) for x in FLIPPED)]
)
def test_a_cache_that_cannot_be_used(monkeypatch, tmp_path, content):
    cache = tmp_path / "cache/zerofn/drives.json"
    cache.parent.mkdir(parents=True)
    cache.write_text(content.replace("%s", probe._key(tmp_path)))
    monkeypatch.setattr(probe, "_trial", lambda *_, writes: 1 * GB)
    assert probe.probe(tmp_path) == probe.Drive(1 << 20, 2, 1 * GB, 1 * GB, True)
    assert len(json.loads(cache.read_text())) == 1


def test_without_a_cache_folder(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(probe, "_trial", lambda *_, writes: 1 * GB)
    assert probe.probe(tmp_path).read == 1 * GB


def test_a_drive_that_fails_meanwhile(monkeypatch, tmp_path):
    def fails(fd, *_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fails)
    with pytest.raises(DiskError, match=f"^{tmp_path}: this drive cannot be measured: Input/output error"):
        Store(tmp_path, 1, name="moments")

"""`zerofn report`: every line is measured here; shortages say what they cost and what to type."""

import re
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch

from zerofn import cli
from zerofn.launch import report


@pytest.mark.whole
@pytest.mark.slow
def test_a_whole_report(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(report, "_TRAINING", 0.5)
    assert cli.main(["report", "--ranks", "2", "--folder", str(tmp_path)]) == 0
    shown, warned = capfd.readouterr()
    assert "draws from" not in warned  # the ranks' weights are the same
    assert re.search(r"versions +python 3.*zerofn \d.*torch 2", shown)
    for line in (
        r"processors +\d+ of \d+ usable",
        r"GPUs? ",
        r"matrix products +float32 [\d,]+ GFLOP/s.*of each of 2 ranks at once",
        r"memory bandwidth +\d+\.\d GB/s of each rank",
        r"between ranks +\d+\.\d\d GB/s, \d+ us a transfer",
        r"drive of .* +reads \d+\.\d\d GB/s, writes",
        r"AdamW's kernel +\d+\.\d GB/s, \d+% of the memory bandwidth",
        r"training on 2 ranks +\d+ steps in \d\.\d s at stage 3, the loss from \d\.\d+ to \d\.\d+",
    ):
        assert re.search(line, shown), (line, shown)
    assert "failed" not in shown and "does not learn" not in shown


def test_shortages_say_what_they_cost_and_what_to_type(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    advice = {x.what: x.advice for x in report._limits()}
    assert advice["open files"].endswith("ulimit -n 4096") and "--shm-size=8g" in advice["/dev/shm"]


def test_a_kernel_with_all_threads_is_compared_with_the_bandwidth_of_all_ranks(monkeypatch):
    rates = {"flops": {}, "memory_rate": 10e9, "link": 1e9, "latency": 1e-5, "slowest": 1.0}
    monkeypatch.setattr(report, "run", lambda *args, ranks: SimpleNamespace(**rates))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for update, share, slow in ((20e9, "100%", False), (6e9, "30%", True)):
        monkeypatch.setattr(report, "_update_rate", lambda update=update: update)
        found = list(report._measured(None, 2))[-1]
        assert found.value.endswith(f"{share} of the memory bandwidth") and bool(found.advice) == slow


def test_a_training_that_fails_is_a_finding(monkeypatch):
    def fails(seconds):
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(report, "_train", fails)
    (found,) = report._training(1)
    assert found.value == "failed: RuntimeError: NCCL error" and found.advice
    monkeypatch.setattr(report, "_train", lambda seconds: (1.0, 2.0, 10, 1.0))
    (found,) = report._training(1)
    assert "does not learn" in found.advice

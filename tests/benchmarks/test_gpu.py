"""benchmarks/gpu/gpu.py goes through all its parts without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.whole
@pytest.mark.timeout(1200)  # of which it takes 4 minutes on two idle cores
def test_every_part_runs_on_the_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.gpu", "--dry-run", "--minutes", "30", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: part["why"] for name, part in run["parts"].items()} == dict.fromkeys(run["parts"], ""), done.stdout
    assert len(run["parts"]) == 11 and all(part["rows"] for part in run["parts"].values())
    held = {check["what"]: check["kept"] for check in run["must_hold"]}
    assert all(kept for what, kept in held.items() if "resident twice" in what or ": optimizer=" in what)
    ranks = [what for what in held if " over gloo: " in what]
    assert len(ranks) == 28 and all(map(held.__getitem__, ranks))  # of two and four ranks, and on meshes
    assert held["t5-large, 24 GiB, offload: 50 / largest batch"] and held["t5-3b, exact Adam: last loss / first"]
    assert "published, not run" in done.stdout


@pytest.mark.whole
def test_the_decoder_with_grouped_heads_runs_on_the_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.attention", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "attention_gpu.json").read_text())
    assert found["heads_of_keys"] == [2] and found["masks_of_all_pairs"] == 0
    assert sum(found["operations"].values()) == 4 and found["zerofn"]["ms"] > 0 and found["torch"]["ms"] > 0

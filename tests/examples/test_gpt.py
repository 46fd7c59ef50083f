"""The GPT example: its numbers alone and on two ranks, its baseline, and that going on is not going back."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs_of_examples import module, run, run_here

TINY = [
    *("--layers", 2, "--heads", 2, "--width", 32, "--context", 16, "--vocab", 300, "--megabytes", 0.2),
    *("--batch", 8, "--eval-batches", 2, "--eval-every", 3, "--sample", 4, "--steps", 6),
]  # fmt: skip


def listed(name, pyproject):
    """The names of the packages in a list of pyproject.toml."""
    found = re.search(rf'^{name} = \[((?:"[^"]*"|[^]"])*)\]', pyproject, re.M)[1]
    return set(re.findall(r'"([A-Za-z_-]+)[^"]*"', found))


def test_make_demo_installs_what_it_imports_and_no_more():
    root = Path(__file__).resolve().parents[2]
    pyproject = (root / "pyproject.toml").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", (root / "examples/gpt.py").read_text(), re.M))
    installed = listed("dependencies", pyproject) | {"zerofn"}
    asked_for = (listed("demo", pyproject) | listed("plots", pyproject)) - {"zerofn"}
    assert imported - installed - sys.stdlib_module_names == asked_for
    assert "$(VENV)/demo.stamp" in re.search(r"^demo: (.*)$", (root / "Makefile").read_text(), re.M)[1]


def losses(folder):
    """The validation losses of a run, in order."""
    log = json.loads((folder / "runs/gpt/log.json").read_text())
    return [r["validation"] for r in log if "validation" in r]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(what it printed, its folder): one process."""
    folder = tmp_path_factory.mktemp("alone")
    return run_here("gpt.py", *TINY, folder=folder), folder


def test_it_learns_shows_and_compares(alone):
    printed, folder = alone
    model, bigram = map(float, re.search(r"validation loss ([\d.]+), add-k bigram model ([\d.]+)", printed).groups())
    found = losses(folder)
    assert len(found) == 2 and found[1] < found[0] < math.log(300) + 0.1
    assert model == pytest.approx(found[-1], abs=6e-4) and 2 < bigram < math.log(300)
    assert "Sharded: 28 leaves" in printed and "def read(self, size=-1):" in printed
    assert (folder / "runs/gpt/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.whole
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_train_alike(alone, stage, tmp_path):
    if stage == 3:  # in two parts
        printed = run("gpt.py", *TINY, "--stop-at", 3, folder=tmp_path, num_ranks=2)
        assert "stopped after step 3; start it again to resume" in printed
    printed = run("gpt.py", *TINY, "--stage", stage, folder=tmp_path, num_ranks=2)
    assert losses(tmp_path) == pytest.approx(losses(alone[1]), rel=1e-5)
    assert f"stage {stage}, rank 0 of 2" in printed and re.search(r"rss \d+\+\d+ MB", printed)


@pytest.mark.whole
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Dropout, schedule and loader included; on other numbers of ranks it goes on too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    run("gpt.py", *TINY, "--dropout", 0.1, folder=whole, num_ranks=2)
    printed = run("gpt.py", *TINY, "--dropout", 0.1, "--stop-at", 4, folder=parts, num_ranks=2)
    assert "stopped after step 4; start it again to resume" in printed
    printed = run("gpt.py", *TINY, "--dropout", 0.1, folder=parts, num_ranks=2)
    assert "resuming after step 4 (delete runs/gpt to start over)" in printed
    logs = [json.loads((f / "runs/gpt/log.json").read_text()) for f in (whole, parts)]
    assert logs[0] == logs[1] and len(logs[0]) == 8
    for rank in range(2):
        ours, theirs = (
            load_file(*(f / "runs/gpt/checkpoints/step-00000006").glob(f"rank-{rank:05}-of-00002.*"))
            for f in (whole, parts)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    printed = run("gpt.py", *TINY, "--stage", 0, "--steps", 6, folder=parts)  # nothing is left to do
    assert f"validation loss {logs[0][-1]['validation']:.3f}" in printed


def test_the_bigram_model_is_counted_right():
    train = torch.tensor([0, 1, 0, 1, 0, 2, 1])
    batch = {"x": torch.tensor([[0, 1]]), "y": torch.tensor([[1, 0]])}
    loss, k = module("gpt").bigram_loss(train, [batch], vocab=3)
    by_hand = -(math.log((2 + k) / (3 + 3 * k)) + math.log((2 + k) / (2 + 3 * k))) / 2
    assert loss == pytest.approx(by_hand, rel=1e-12) and k == 0.01

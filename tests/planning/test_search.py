"""A search over meshes of a deep model: estimates first, and plans of what may be the fastest."""

import dataclasses
import json

import pytest

from zerofn.cli import main
from zerofn.cost.machine import KNOWN
from zerofn.planning.plan_row import Config, Estimate, Needs, Row
from zerofn.planning.search import Search

pytestmark = pytest.mark.slow  # whole tables of meshes

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 10,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip


@pytest.fixture
def planned(tmp_path, capsys):
    """What `zerofn plan --mesh auto` prints, and writes, with more options."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def run(*more):
        options = ["--context", "32", "--machine", "A100-8", "--world", "2", "--json", str(tmp_path / "p.json")]
        status = main(["plan", str(tmp_path), *options, "--mesh", "auto", "--wide", *more])
        return status, capsys.readouterr().out, json.loads((tmp_path / "p.json").read_text())

    return run


@pytest.mark.whole
def test_the_fastest_is_planned_with_all_layers(planned):
    status, out, found = planned()
    assert status == 0
    best, estimated = found["rows"][found["best"]], [row for row in found["rows"] if "estimate" in row]
    assert best["plan"]["total"] == best["device"] and best["call"] in out
    assert estimated and all(row["estimate"]["speed"] <= best["speed"] for row in estimated)
    assert all(row["estimate"]["few"] == 3 and row["estimate"]["more"] == 6 for row in estimated)
    assert {tuple(row["mesh"].items()) for row in found["rows"]} == {(("data", 2),), (("tensor", 2),)}
    assert "left out: ~ is an estimate, from plans of 3 and of 6 of the 10 layers" in out
    assert sum("~ " in line for line in out.splitlines() if "left out" not in line) == len(estimated)


def row(expert, device, seconds, lacks=""):
    config = Config(1, None, None, None, 1, mesh=(("expert", expert),))
    estimate = None if seconds is None else Estimate(3, 6, seconds, {}, "computing", 8)
    return Row(config, Needs(device, 0, 0), lacks, None, 100, "tokens", estimate)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1, 50, 9.0), row(8, 90, 2.0, "10 B"), row(16, 85, 3.0, "5 B"), row(32, 170, 1.0, "90 B")], [1, 8]),
        ([row(1, 50, 1.0), row(8, 90, 2.0, "10 B"), row(16, 85, None, "5 B")], [1]),
        ([row(1, 190, 1.0, "110 B"), row(8, 180, 2.0, "100 B"), row(16, 175, None, "95 B")], [16]),
    ],
)
def test_what_lacks_less_than_half_is_tried_beside_other_axes(rows, expected):
    """A slow row that fits does not end the search along the others."""
    search = Search(None, dataclasses.replace(KNOWN["H100-8"], memory=80), "")
    search.rows = rows
    assert search.promising("expert") == expected

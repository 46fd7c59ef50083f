"""What a table of plans looks like: its verdict, 80 columns, and the code to write."""

import ast
import dataclasses

import pytest

from zerofn.cost.machine import KNOWN
from zerofn.planning.narrow_table import WIDTH, code_of
from zerofn.planning.plan_row import Config, Estimate, Needs, Row
from zerofn.planning.table import Table

GB = 10**9
H100 = dataclasses.replace(KNOWN["H100-8"], memory=80 * GB)


def row(stage, gigabytes, seconds, lacks="", tokens=36_000, **config):
    """A row whose 8 ranks take a step of so many seconds on 36,000 tokens each; estimated, so that it needs no plan."""
    found = None if seconds is None else Estimate(1, 2, seconds, {"data": GB}, "computing", 8)
    config = Config(stage, config.pop("offload", None), config.pop("precision", "bf16"), config.pop("remat", None), 4,
                    machine="'H100-8'", **config)  # fmt: skip
    return Row(config, Needs(int(gigabytes * GB), 0, 0), lacks, None, tokens, "tokens", found)


def table(*rows, best=0):
    """A table that recommends the row with this number, though it is an estimate."""
    out = Table(rows, H100, 8, "train_step")
    out.__dict__["_best"] = None if best is None else rows[best]
    return out


def test_the_verdict_says_what_is_left_and_what_a_billion_tokens_take():
    """8 ranks of 36,000 tokens a second: 3,472 s, on 8 GPUs 7.72 hours."""
    found = table(row(3, 30, 1.0), row(3, 20, 1.5, offload="cpu"))
    assert found.verdict() == (
        "Fits with 50 GB to spare; 7.72 GPU-hours per billion tokens; nothing planned here is faster."
    )
    assert "7.72 GPU-hours (23.1 at 3 each) per billion tokens" in found.verdict(price=3)
    assert found.text(price=3).replace("\n", " ").startswith(found.verdict(price=3))


@pytest.mark.parametrize(("other", "said"), [
    (row(1, 42, 0.99), "the next alternative: stage 1, about 1.0% faster, needs 12 GB more."),
    (row(0, 90, 0.5, "10 GB of device memory too little"),
     "the next alternative: stage 0, about 2.00 times as fast, but 10 GB of device memory too little."),
    (row(0, 90, None, "10 GB of device memory too little for the state alone"), "nothing planned here is faster."),
])  # fmt: skip
def test_the_verdict_names_what_is_faster(other, said):
    assert table(row(3, 30, 1.0), other).verdict().endswith(said)


def test_a_faster_row_is_named_by_what_it_leaves_out():
    best = row(3, 30, 1.0, offload="cpu", remat="full")
    assert "the next alternative: no offload cpu, no remat full, about 2.00" in table(best, row(3, 50, 0.5)).verdict()


def test_where_nothing_fits_the_verdict_says_what_the_nearest_lacks():
    near = row(3, 85, 1.0, "5 GB of device memory too little")
    found = table(near, row(1, 95, 1.0, "15 GB of device memory too little"), best=None)
    assert found.verdict() == "Nothing fits. The nearest: stage 3, bf16, 4 rows, 5 GB of device memory too little."
    assert found.text().startswith("Nothing fits.") and "state = zerofn.shard(init_state, stage=3" in found.text()


def test_a_table_has_80_columns_whatever_its_rows():
    meshes = [{"replicate": 4, "data": n, "expert": 8, "context": 2, "tensor": 128 // n} for n in (2, 4, 64)]
    long = "12.3 GB of device memory too little, 45.6 GB of host memory too little"
    rows = [row(3, 30, 1.0, offload=x, remat=how, mesh=tuple(mesh.items()), wire="gather=int4,reduce=int8")
            for mesh in meshes for x in (None, "cpu", "nvme") for how in (None, "auto", "full")]  # fmt: skip
    for found in (table(*rows), table(row(3, 30, 1.0, long), row(0, 96, None, f"{long} for the state alone"))):
        assert max(map(len, found.text().splitlines())) <= WIDTH, found.text()
        assert max(map(len, found.text(wide=True).splitlines())) > WIDTH


def test_what_all_rows_share_is_in_the_title_and_what_differs_in_columns():
    same = table(row(3, 30, 1.0), row(1, 40, 1.0)).text()
    assert "train_step on 8 ranks of H100-8, 80 GB each; bf16; 4 rows a rank" in same and "  precision  " not in same
    several = table(row(3, 30, 1.0), row(3, 40, 1.0, precision=None, own="fp32", remat="auto")).text()
    head = next(x for x in several.splitlines() if "stage" in x and "device" in x)
    assert head.split() == ["stage", "precision", "remat", "device", "step", "tokens/s"]
    assert "fp32" in several and "remat auto: selective recomputation" in several and "offload" not in head
    assert [x for x in several.splitlines() if x.startswith("*")] == [x for x in several.splitlines() if " bf16 " in x]


def test_long_code_has_lines_of_its_own_for_arguments():
    mesh = {"replicate": 4, "data": 16, "context": 2, "tensor": 8}
    config = Config(3, None, "bf16", "auto", 1, machine="'16 x H100-8'", mesh=tuple(mesh.items()),
                    cuts="zerofn.parallel.tensor(model, mesh) | zerofn.moe.experts(model, mesh)")  # fmt: skip
    code = code_of(config)
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(config.call()))
    assert max(map(len, code.splitlines())) <= WIDTH and "    stage=3,\n" in code
    assert code.splitlines()[0] == "mesh = zerofn.Mesh.make(replicate=4, data=16, context=2, tensor=8)"

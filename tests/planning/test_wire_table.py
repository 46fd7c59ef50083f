"""The table of docs/wire.md of what goes together: each cell is planned, or refused where it says "no"."""

import re
from pathlib import Path

import pytest

import zerofn
from tests.support.small_steps import batch_of, build, layers_on_stages, train_step_of
from zerofn import optim
from zerofn.comm.mesh import Mesh

DOCS = Path(__file__).resolve().parents[2] / "docs" / "wire.md"
COLUMNS = {
    '`wire="int8"`': {"wire": "int8"},
    '`rounding="stochastic"`': {"wire": zerofn.Wire("int8", "int8", rounding="stochastic")},
    "`feedback=True`": {"wire": zerofn.Wire("int8", "int4", feedback=True)},
    "`optim.onebit_adam`": {"tx": optim.onebit_adam(1e-2, freeze_step=9)},
    "`zerofn.diloco`": {"every": 4},
}
ROWS = {
    **{f"stage {k}": {"stage": k} for k in range(4)},
    "`zerofn.accumulate`": {"microbatches": 2},
    **{f'`precision="{x}"`': {"precision": x} for x in ("bf16", "fp16", "fp8")},
    **{f'`offload="{x}"`': {"offload": x} for x in ("cpu", "nvme")},
    "`replicate`": {"mesh": {"replicate": 2, "data": 2}},
    "`replicate`, `hpz=True`": {"mesh": {"replicate": 2, "data": 2}, "hpz": True},
    **{f"`{x}`": {"mesh": {"data": 2, x: 2}} for x in ("tensor", "context")},
    "`pipe`": {"mesh": {"pipe": 2, "data": 2}, "microbatches": 4},
}


def planned(mesh=None, microbatches=1, tx=None, every=0, hpz=False, **options):
    sizes = {"data": 4} if mesh is None else mesh
    if every:
        sizes = {"replicate": 2, **sizes}
    grid, module = Mesh.planned(sizes), zerofn.skeleton(lambda: build(4))
    cuts = layers_on_stages(4, 2) if "pipe" in sizes else None
    if "tensor" in sizes:
        cuts = zerofn.parallel.tensor(module, grid, {"0": "colwise", "3": "rowwise"})
    step = train_step_of(module, microbatches)
    init = lambda: zerofn.TrainState.create(params=dict(build(4).named_parameters()), tx=tx or optim.adamw(1e-2))  # noqa: E731
    options = {"machine": "H100-8", "stage": 3, "offload": None, "precision": None, "remat": None, **options}
    step = zerofn.diloco(step, every=every) if every else step
    return zerofn.plan(step, init, batch_of(0), mesh=grid, cuts=cuts, hpz=hpz, **options)[0]


def table():
    """row -> column -> cell"""
    lines = re.findall(r"^\|(.*)\|$", DOCS.read_text().split("## What goes together")[1].split("\n## ")[0], re.M)
    head, _, *body = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


def test_the_table_has_every_way():
    assert list(table()) == list(ROWS) and all(list(cells) == list(COLUMNS) for cells in table().values())


def can_be(row, column):
    """Whether it can be planned; why not, else."""
    try:
        planned(**ROWS[row], **COLUMNS[column])
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "yes"


@pytest.mark.part(row=["stage 3", "`pipe`"])
@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_says_can_be_planned_and_no_more(row):
    found = {column: can_be(row, column) for column in COLUMNS}
    said = table()[row]
    assert {k: x for k, x in found.items() if (x == "yes") != said[k].startswith("yes")} == {}

"""What a plan says: in words, numbers, a picture; and that it is what happens."""

import json

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.small_steps import batch_of, build, captures_of, state_of, train_step_of
from zerofn import Offload, optim
from zerofn.comm import transport
from zerofn.cost.op_cost import READ, SENT, WRITTEN
from zerofn.job.in_flight import pending
from zerofn.offload.disk import Store

NORMED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))


def plan_of(stage=3, num_microbatches=1, **options):
    module = build(6)
    step = zerofn.compile(train_step_of(module, num_microbatches))
    return step, state_of(module, stage, NORMED, **options)


def sent_bytes(stage, num_microbatches, precision):
    """(planned, counted) bytes that this rank sends in a step that is not the first."""
    step, state = plan_of(stage, num_microbatches, precision=precision)
    batch = batch_of(dist.get_rank())
    plan = step.lower(state, batch)
    for _ in range(2):
        state, _ = step(state, batch)
    pending().wait_for_all()
    counted, point_to_point = [], transport.point_to_point

    def counting(group, sends, receives):
        counted.extend(x.nbytes for x in sends.values())
        return point_to_point(group, sends, receives)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "point_to_point", counting)
        state, _ = step(state, batch)
        pending().wait_for_all()
    return plan.sent, sum(counted)


ALL = [(stage, *how) for stage in range(4) for how in ((1, None), (2, "bf16"))]
SOME = [(0, 2, "bf16"), (3, 1, None)]


@pytest.mark.part(size=[2], cases=[SOME])
@pytest.mark.parametrize("cases", [SOME, ALL])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bytes_on_the_wire_are_exact(ranks, size, cases):
    for case in cases:
        for planned, counted in ranks(size, sent_bytes, *case):
            assert planned == counted, case
            assert (planned > 0) == (size > 1)


@pytest.mark.parametrize("tiers", [{"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}])
def test_bytes_of_drives_are_exact(tmp_path, monkeypatch, tiers):
    step, state = plan_of(offload=Offload(**tiers, path=tmp_path))
    plan = step.lower(state, batch_of())
    state, _ = step(state, batch_of())
    counted = {READ: 0, WRITTEN: 0}
    begin = Store._begin

    def counting(self, region, buffer, writes):
        counted[WRITTEN if writes else READ] += region.nbytes
        return begin(self, region, buffer, writes)

    monkeypatch.setattr(Store, "_begin", counting)
    state, _ = step(state, batch_of())
    torch.manual_seed(0)
    planned = {how: sum(x.nbytes * n for x, n in plan.transfers().items() if x.how == how) for how in counted}
    assert planned == counted and all(counted.values())
    assert plan.memory().disk > 0 and "on drives" in plan.text()


def described():
    step, state = plan_of()
    plan = step.lower(state, batch_of(dist.get_rank()))
    return plan.text(), json.dumps(plan.json()), [tuple(x) for x in plan.collectives()], plan._repr_html_()


def test_in_words_and_numbers(ranks):
    (text, numbers, collectives, page), _ = ranks(2, described)
    found = json.loads(numbers)
    assert text.startswith("train_step on 2 ranks\n  memory of a rank: ") and "sent by a rank in a step: " in text
    assert found["total"] == sum(found["peak"].values()) and found["ranks"] == 2
    assert {x["unit"] for x in found["transfers"]} == {"", "0", "3", "6", "9", "12", "15"}
    assert (SENT, "all_gather", "0", 2048 * 4, "data") in collectives
    assert "train_step on 2" in page and "white-space:pre" in page and "<svg" in page


def test_a_picture(tmp_path):
    step, state = plan_of()
    step.lower(state, batch_of()).picture(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_what_was_planned_is_what_runs():
    """No second capture."""
    step, state = plan_of()
    plan = step.lower(state, batch_of())
    step(state, batch_of())
    assert len(captures_of(step)) == 1 and captures_of(step)[0].program is plan.program


def units_in_their_forms():
    """Units with a leaf that is large enough are coded."""
    step, state = plan_of(wire=zerofn.Wire("int4", "int8", smallest=200))
    text = step.lower(state, batch_of()).text()
    assert "    gathered as int4 in blocks of 256: " in text and "    reduced as int8 in blocks of 256: " in text
    assert "as they are" not in text
    step, state = plan_of(wire=zerofn.Wire("int4", "int8"))
    assert "in blocks" not in step.lower(state, batch_of()).text()


def test_a_plan_says_which_units_are_sent_in_which_form(ranks):
    ranks(2, units_in_their_forms)

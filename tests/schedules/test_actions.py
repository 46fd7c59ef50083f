"""Actions, placements and the text of schedules, which torch reads and writes."""

import pytest

from benchmarks.pipe import torch_orders
from zerofn.schedules import Action, Placement, Schedule, make

STYLES = [("line", 1), ("loop", 1), ("loop", 3), ("v", 2), ("v", 3)]


def test_an_action_has_torchs_text():
    from torch.distributed.pipelining.schedules import _Action

    for text in ("2F0", "1I3", "10W12", "3B1"):
        theirs, ours = _Action.from_str(text), Action.parse(text)
        assert str(ours) == str(theirs) == text
        assert ours == (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 1", "SEND_F"])
def test_other_texts_are_no_actions(text):
    with pytest.raises(ValueError, match="is not an action. Write stage, kind and microbatch, such as 2F0"):
        Action.parse(text)


def test_what_an_action_reads():
    def reads(text):
        return {str(x) for x in Action.parse(text).reads(num_stages=3)}

    assert reads("0F1") == set() and reads("2F1") == {"1F1"}
    assert reads("1I1") == reads("1B1") == {"1F1", "2I1"} and reads("2B1") == {"2F1"}
    assert reads("1W1") == {"1I1"}
    assert [str(Action.parse(x).makes) for x in ("1F0", "1B0", "1I0", "1W0")] == ["1F0", "1I0", "1I0", "1W0"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("style, chunks", STYLES)
def test_each_stage_is_on_one_rank(style, chunks, ranks):
    placement = Placement(style, ranks, chunks)
    by_rank = [placement.stages_of(r) for r in range(ranks)]
    assert sorted(s for stages in by_rank for s in stages) == list(range(ranks * chunks))
    assert {len(stages) for stages in by_rank} == {chunks}
    assert all(placement.rank_of(s) == r for r, stages in enumerate(by_rank) for s in stages)


def test_a_v_turns_round_on_one_rank():
    v = Placement("v", 3, 3)
    assert [v.rank_of(s) for s in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]


@pytest.mark.parametrize("arguments, text", [
    (("ring", 2), "placement 'ring': expected 'line', 'loop' or 'v'"),
    (("loop", 0), "at least 1 rank and 1 chunk, got 0 and 1"),
    (("line", 2, 2), "placement 'line' has one stage per rank, got chunks=2. Write 'loop' or 'v'"),
])  # fmt: skip
def test_other_placements_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Placement(*arguments)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "interleaved-zb", "zbv"])
def test_a_text_is_read_back(name):
    schedule = make(name, ranks=3, microbatches=5)
    read = Schedule.from_csv(str(schedule), name)
    assert read == schedule


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb", "zbv"])
def test_torch_reads_what_is_written(name, tmp_path):
    schedule = make(name, ranks=2, microbatches=6)
    (tmp_path / "order.csv").write_text(schedule.to_csv())
    runtime = torch_orders.build(name, ranks=2, microbatches=6)
    runtime._load_csv(tmp_path / "order.csv")  # raises for one that is incomplete, or that gets stuck
    read = [[str(x) for x in runtime.pipeline_order[r]] for r in range(2)]
    assert read == [[str(x) for x in order] for order in schedule.orders]


def test_idle_cells_and_torchs_transfers_are_left_out():
    rows = [",0UNSHARD,0F0,0SEND_F0,,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1,0REDUCE_GRAD", "1RECV_F0,1F0,1B0,1F1,1B1"]
    schedule = Schedule.from_csv("\r\n".join(rows) + "\r\n")
    assert str(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"  # stage 0's backward pass is one
    assert schedule.placement == Placement("line", 2) and schedule.microbatches == 2


@pytest.mark.parametrize("text, said", [
    ("", "csv has no actions. Write one line for each rank, such as 0F0,0B0"),
    ("0F0,0B0\n1F0,1X0", "csv, line 2, cell 2: '1X0' is not an action"),
    ("0F0,0B0,3F0,3B0\n1F0,1B0,2F0,2B0,4F0,4B0", "does not support .* stages to ranks: line 1: 0, 3; line 2: 1, 2, 4"),
])  # fmt: skip
def test_texts_of_no_schedule_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Schedule.from_csv(text)

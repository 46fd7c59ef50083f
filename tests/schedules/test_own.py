"""Schedules of one's own, as `pipe` and `compile` take them: how they may be written, and what is refused."""

import pytest

import zerofn
from tests.parallel.test_pipe import cuts_of
from tests.support.pipe_steps import trained, uncut
from tests.support.same import assert_same_trees
from zerofn.geometry.cuts import Pipeline
from zerofn.graph.nested import runs_once
from zerofn.passes import after
from zerofn.schedules import Placement, make
from zerofn.schedules.own import as_given

MINE = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1I1", "1W1"]]  # GPipe, with one W that could wait


def test_a_schedule_is_given_as_lists_as_text_or_as_itself():
    found = as_given(MINE, "compile")
    assert [list(map(str, order)) for order in found.orders] == MINE
    assert found.placement == Placement("line", 2) and found.microbatches == 2
    assert as_given(found.to_csv(), "compile") == as_given(found.orders, "compile") == as_given(found, "") == found
    assert as_given("zb-h1", "compile") == "zb-h1"


@pytest.mark.parametrize(("schedule", "sentence"), [
    ("1f1", "compile: schedule='1f1' is not known; did you mean '1f1b'"),
    ([MINE[0], MINE[1][:-1]], "compile: schedule 'own': stage 1 has 1I1 but no 1W1; add 1W1 to rank 1, or write 1B1"),
    ([MINE[0], ["1B0", *MINE[1][:2], *MINE[1][3:]]], "compile: schedule 'own': no rank can continue; these wait:"),
    ("0F0,0B0\n2F0,2B0", "compile: own: ZeroFn does not support .* to ranks: line 1: 0; line 2: 2."),
    ("0F0,0X0", "compile: own, line 1, cell 2: '0X0' is not an action. Write stage, kind and microbatch, such as 2F0"),
    (make("zbv", 2, 2).orders[:1], "compile: own: ZeroFn does not support this assignment of stages to ranks"),
])  # fmt: skip
def test_what_cannot_run_is_refused(schedule, sentence):
    with pytest.raises(ValueError, match=sentence):
        zerofn.compile(lambda state, batch: state, schedule=schedule)


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="compile: schedule must be a name, .*, got a int."):
        zerofn.compile(lambda state, batch: state, schedule=3)


def test_a_schedule_goes_with_stages_where_they_lie():
    line, mine = Pipeline(Placement("line", 2), "1f1b"), as_given(MINE, "compile")
    assert line.by(mine).of(2).orders == mine.orders
    one_a_rank = Pipeline(Placement("loop", 2, 1), "interleaved").by(mine).of(2)  # lies as a line does
    assert one_a_rank.orders == mine.orders and one_a_rank.placement == Placement("loop", 2, 1)
    with pytest.raises(
        ValueError, match="the schedule is for a V of 2 ranks with 2 stages each, but the cuts are for a"
    ):
        line.by(make("zbv", 2, 4))
    with pytest.raises(
        ValueError, match="schedule is for 2 microbatches, but the step has 4. Write zerofn.accumulate.v"
    ):
        line.by(mine).of(4)


def calls_and_values():
    """The pieces that a rank runs by `MINE`, and what training has then, beside the same step uncut."""
    order = []

    def note(program):
        order.extend(str(x.args[0].target).removesuffix("_adds") for x in program.gm.graph.nodes if runs_once(x))

    by_mine = trained("1f1b", 2, 1, schedule_of_step=MINE, passes=after("cut_stages", zerofn.Pass(note, name="note")))
    return order, by_mine, trained("1f1b", 2, 1, passes=uncut)


def test_a_step_follows_its_schedule(ranks):
    first, last = ranks(2, calls_and_values)
    assert last[0] == [f"stage_1_{kind}" for kind in "FFIWIW"]
    assert first[0] == [f"stage_0_{kind}" for kind in "FFWW"]
    for _, (losses, state), (uncut_losses, uncut_state) in (first, last):
        assert losses == uncut_losses
        assert_same_trees(state, uncut_state, "by a schedule of one's own")


@pytest.mark.whole
def test_pipe_balances_for_the_stages_of_a_schedule():
    own, named = cuts_of("llama", 2, schedule=make("zbv", 2, 4).to_csv()), cuts_of("llama", 2, schedule="zbv")
    assert own.stages == named.stages and "a V of 2 ranks with 2 stages each, schedule 'own' (" in repr(own)
    assert own.pipeline.of(4).orders == named.pipeline.of(4).orders
    with pytest.raises(ValueError, match="pipe: the schedule has actions for 3 ranks, but the mesh has pipe=2"):
        cuts_of("llama", 2, schedule=make("1f1b", 3, 4))
    with pytest.raises(ValueError, match="pipe: chunks=3, but the schedule has 2 stages per rank. Leave chunks out"):
        cuts_of("llama", 2, schedule=make("zbv", 2, 4), chunks=3)

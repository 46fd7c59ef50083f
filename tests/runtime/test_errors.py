"""What a person sees of a step that cannot be captured: a sentence, and the frames of their own code."""

import json
import traceback

import pytest
import torch

import zerofn
from zerofn.runtime import errors
from zerofn.util.user_line import OURS


def branches(state, x):
    if x.sum() > 0:
        return x * state["w"]
    return x


def indexes(state, x):
    return state["w"] * x.shape[3]


def writes(state, x):
    return json.dumps(x), state


def frames(step, method="__call__"):
    """The error of a step, and the functions and files of its traceback below the caller's."""
    with pytest.raises((RuntimeError, IndexError, TypeError)) as caught:
        getattr(zerofn.compile(step), method)({"w": torch.ones(2)}, torch.ones(2))
    rows = traceback.extract_tb(caught.value.__traceback__)
    rows = rows[1 + max(k for k, row in enumerate(rows) if row.name == "frames") :]
    return caught.value, [row.name for row in rows if not row.filename.startswith(OURS)], len(rows)


@pytest.mark.parametrize("method", ["__call__", "lower"])
@pytest.mark.parametrize("step", [branches, indexes, writes])
def test_an_error_of_capture_has_the_users_frames(step, method):
    error, names, number = frames(step, method)
    assert names == [step.__name__] and number == 2  # and the call's own
    assert error.__suppress_context__ or error.__context__ is None


def test_all_frames_are_there_on_demand(monkeypatch):
    monkeypatch.setenv("ZEROFN_TRACEBACK", "full")
    error, names, number = frames(branches)
    assert "branches" in names and number > 15
    shown = error._render_traceback_()
    assert any("capture.py" in x for x in shown)


def test_a_notebook_shows_the_sentence_first():
    first, *rest = frames(branches)[0]._render_traceback_()
    assert first.startswith("CaptureError: the step asks for the value of a tensor while it is captured at ")
    assert "in branches" in "".join(rest) and "capture.py" not in "".join(rest)


def test_a_fault_of_our_own_has_all_frames():
    def _entry_for():
        errors.explain(None, None, "", None, None, None)  # no error to explain

    with pytest.raises(AttributeError) as caught:
        errors.users_frames("_entry_for")(lambda: _entry_for())()
    assert [row.name for row in traceback.extract_tb(caught.value.__traceback__)][-2:] == ["explain", "failed_node"]


def test_an_error_of_a_step_that_runs_keeps_its_frames():
    step = zerofn.compile(lambda state, x: x.index_select(0, state["w"]))
    with pytest.raises(IndexError) as caught:
        step({"w": torch.tensor([7])}, torch.ones(2))
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 4

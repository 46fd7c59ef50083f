"""What a terminal shows while a step is captured; the log lines are in compile/test_signatures.py."""

import io
import sys
import time

import pytest
import torch

import zerofn
from zerofn.runtime import capture_log


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(capture_log, "SOON", 0.05)
    monkeypatch.setattr(capture_log, "_AGAIN", 0.05)


def slow_step(state, batch):
    time.sleep(0.3)  # while it is captured, and never after
    return state, (state["w"] * batch).sum()


def test_a_long_capture_is_shown_and_then_gone(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    step = zerofn.compile(slow_step)
    state, _ = step({"w": torch.ones(2)}, torch.ones(2))
    shown = terminal.getvalue()
    assert shown.count("capturing slow_step: 0 s") >= 2 and shown.endswith(" \r")
    step(state, torch.ones(2))
    assert terminal.getvalue() == shown


def test_it_ends_with_an_error_too(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    def fails(state, batch):
        time.sleep(0.2)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        zerofn.compile(fails)({"w": torch.ones(2)}, torch.ones(2))
    shown = terminal.getvalue()
    time.sleep(0.15)
    assert terminal.getvalue() == shown and shown.endswith(" \r")


@pytest.mark.parametrize("why", ["no terminal", "another rank", "a short capture"])
def test_nothing_is_shown(monkeypatch, why):
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO() if why == "no terminal" else Terminal())
    if why == "another rank":
        monkeypatch.setenv("RANK", "1")
    elif why == "a short capture":
        monkeypatch.setattr(capture_log, "SOON", 30.0)
    capture_log.while_capturing(slow_step_of)(type("Step", (), {"__name__": "step"})())
    assert terminal.getvalue() == ""


def slow_step_of(step):
    time.sleep(0.15)

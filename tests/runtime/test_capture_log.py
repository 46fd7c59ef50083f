"""What a terminal shows while a step is captured; the log lines are in compile/test_signatures.py."""

import io
import logging
import sys
import time

import pytest
import torch

import zerofn
from zerofn.runtime import capture_log
from zerofn.util import sign_of_life


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(sign_of_life, "SOON", 0.05)
    monkeypatch.setattr(sign_of_life, "_AGAIN", 0.05)


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
        monkeypatch.setattr(sign_of_life, "SOON", 30.0)
    capture_log.while_capturing(slow_step_of)(type("Step", (), {"__name__": "step"})())
    assert terminal.getvalue() == ""


def slow_step_of(step):
    time.sleep(0.15)


@pytest.mark.parametrize(("native", "level"), [("", "WARNING"), ("0", "INFO")])
def test_missing_kernels_are_one_warning_unless_they_are_switched_off(monkeypatch, caplog, native, level):
    monkeypatch.setenv("ZEROFN_NATIVE", native)
    monkeypatch.setattr(capture_log.cpu, "missing", lambda: "The CPU kernels are gone.")
    capture_log._tell_of_kernels.cache_clear()
    caplog.set_level(logging.INFO, "zerofn")
    for _ in range(2):
        zerofn.compile(lambda state, x: (state["w"] * x).sum())({"w": torch.ones(2)}, torch.ones(2))
    capture_log._tell_of_kernels.cache_clear()
    told = [(x.levelname, x.getMessage()) for x in caplog.records if "kernels" in x.getMessage()]
    assert told == [(level, "The CPU kernels are gone. torch's operations do the same, more slowly.")]


# --- parameters that no loss uses


def used_by_turns(name):
    """A step whose loss uses one of two heads."""

    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: ((x * p["body"]) @ p[name]).sum())(x)
        return state.apply_gradients(grads), loss

    return zerofn.compile(step)


def heads(number=2):
    params = {"body": torch.ones(3)} | {f"head{k}": torch.ones(3) for k in range(number)}
    return zerofn.TrainState.create(params=params, tx=zerofn.optim.adamw(0.1, weight_decay=0.5))


def told(caplog):
    return [x.getMessage() for x in caplog.records if "no loss uses" in x.getMessage()]


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_parameters_without_a_gradient_are_named_once_and_still_decay(stage, caplog):
    state, step, x = heads(9), used_by_turns("head0"), torch.ones(3)
    state = state if stage is None else zerofn.shard(state, stage=stage)
    with caplog.at_level(logging.WARNING, "zerofn"):
        state, _ = step(state, x)
        state, _ = step(state, torch.ones(2, 3))  # captured again
    (line,) = told(caplog)
    assert line.startswith(
        "step: no loss uses 'head1', 'head2', 'head3', 'head4', 'head5' and 3 more parameters. The gradients of"
    )
    decayed = 1.0 * (1 - 0.1 * 0.5) ** 2
    torch.testing.assert_close(zerofn.unshard(state.params)["head5"], torch.full((3,), decayed))


def test_a_parameter_that_one_of_two_losses_uses_is_not_named(caplog):
    def step(state, x):
        whole, grads = state.value_and_grad(lambda p, x: (x * p["body"] * p["head0"]).sum())(x)
        part, of_head = zerofn.value_and_grad(lambda p, x: (p * x).sum())(state.params["head1"], x)
        return state.apply_gradients(grads | {"head1": of_head}), whole + part

    with caplog.at_level(logging.WARNING, "zerofn"):
        zerofn.compile(step)(heads(), torch.ones(3))
    assert len(told(caplog)) == 1  # a leaf alone has no name

    def named(state, x):
        whole, grads = state.value_and_grad(lambda p, x: (x * p["body"] * p["head0"]).sum())(x)
        part, of_head = zerofn.value_and_grad(lambda p, x: (p["head1"] * x).sum())({"head1": state.params["head1"]}, x)
        return state.apply_gradients(grads | of_head), whole + part

    caplog.clear()
    with caplog.at_level(logging.WARNING, "zerofn"):
        zerofn.compile(named)(heads(), torch.ones(3))
    assert told(caplog) == []


def test_frozen_parameters_and_evaluations_are_not_named(caplog):
    state = zerofn.TrainState.create(
        params={"body": torch.ones(3), "head0": torch.ones(3)}, tx=zerofn.optim.sgd(0.1), frozen=lambda n: n == "head0"
    )
    step = zerofn.compile(lambda s, x: (lambda loss, g: (s.apply_gradients(g), loss))(*s.value_and_grad(
        lambda p, x: (p["body"] * x).sum())(x)))  # fmt: skip
    evaluate = zerofn.compile(lambda s, x: s.value_and_grad(lambda p, x: p["body"].sum())(x)[0])
    with caplog.at_level(logging.WARNING, "zerofn"):
        step(zerofn.shard(state), torch.ones(3))
        evaluate(zerofn.shard(heads()), torch.ones(3))
    assert told(caplog) == []

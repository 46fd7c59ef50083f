"""Accesses of captured steps to memory: those that conflict are ordered by what the runtime waits for."""

from contextlib import suppress

import pytest
import torch

import zerofn
from tests.support.happens_before import Order, ordered, thread
from tests.support.tiered_steps import CASES, DEFECTS, broken, steps
from zerofn.comm import channels
from zerofn.comm.transport import wait_
from zerofn.util.errors import DiskError


def checked(folder, *cases):
    """How many accesses each case has."""
    found = []
    for case in cases:
        with ordered() as order:
            steps(**case, folder=folder)
        found.append(order.num_accesses)
    return found


@pytest.mark.part(case=CASES[5:22:8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank(tmp_path, case):
    assert checked(tmp_path, case)[0] > 100


@pytest.mark.whole
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, CASES[::16]), (2, CASES[8::16]), (3, CASES[1::8])], ids=str)
def test_several_ranks(ranks, tmp_path, num_ranks, cases):
    for found in ranks(num_ranks, checked, tmp_path, *cases):
        assert min(found) > 100


SAID = r"(reads|writes) bytes .* while"


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(tmp_path, defect):
    """Though the step may fail before its end, where a checksum tells what the defect does."""
    with broken(defect) as tier, pytest.raises(AssertionError, match=SAID), ordered(), suppress(DiskError):
        steps(stage=3, tier=tier, folder=tmp_path)


def unawaited(folder):
    with broken("nobody waits for what drives read"), pytest.raises(AssertionError, match="a transfer from rank"):
        checked(folder, {"stage": 3, "tier": "device"})
    return True


def test_a_transfer_that_nobody_waits_for_is_found(ranks, tmp_path):
    assert all(ranks(2, unawaited, tmp_path))
    ranks.stop()


def messages(forgotten):
    """A pair of messages, of which one end is used before it was waited for."""
    axis, x = zerofn.Mesh.make(pipe=2).axis("pipe"), torch.ones(3)
    with ordered() as order:
        token = channels.send_start(x, 1 - axis.rank, axis.group, "x")
        out = channels.receive_start((3,), (1,), 1 - axis.rank, axis.group, "x", dtype=x.dtype, device=x.device)
        for what, used, waits_for in (("sent", x, token), ("received", out, out)):
            if what == forgotten:
                order.access(thread(), used, True, "overwrites")
            wait_(waits_for)
            order.access(thread(), used, True, "overwrites")
        said, order.found[:] = list(order.found), []
    return said


@pytest.mark.parametrize("forgotten", ["sent", "received", ""])
def test_a_message_is_used_behind_its_wait(ranks, forgotten):
    for said in ranks(2, messages, forgotten):
        assert len(said) == bool(forgotten) and all("overwrites" in x and "a message" in x for x in said)


def test_clocks():
    order, x = Order(), torch.zeros(4)
    one, other = ("one", 0), ("other", 0)
    order.access(one, x, True, "fills")
    order.hears(other, order.told(one))
    order.access(other, x[1:], False, "sums")
    assert not order.found
    order.access(one, x[:1], True, "starts again")  # nobody else looked there
    assert not order.found
    order.access(one, x[2:], True, "starts again")
    assert len(order.found) == 1 and "starts again (one) writes" in order.found[0] and "sums (other)" in order.found[0]

"""`backend="auto"`: eager, then compiled, at one call of all ranks."""

import time
from pathlib import Path

import pytest
import torch

import zerofn
from tests.lowering.test_plans import NBYTES, SLOW, a_region_of_two
from tests.support.captured_steps import rank
from tests.support.outlined_steps import step_of
from tests.support.same import assert_same_trees
from tests.support.small_steps import captures_of
from zerofn.cost.simulator import roofline
from zerofn.graph.nested import REGION
from zerofn.lowering import aside, auto, regions
from zerofn.util.process import instead, the

FEW = 6


def until_taken(steps, worth=True, start=aside.start):
    """(the call at which regions are taken, 0 for none; the parameters after each call)."""
    with pytest.MonkeyPatch.context() as patch, instead(regions.Compiled()):
        patch.setattr(auto, "FIRST", FEW)
        patch.setattr(auto, "EVERY", 2)
        patch.setattr(auto, "STEPS", 1e9 if worth else 0)
        patch.setattr(auto, "start", start)
        step, state, rows = step_of("blocks", backend="auto")
        states = []
        for k in range(1, steps):
            state, _ = step(state, rows)
            (entry,) = captures_of(step)
            states.append(zerofn.unshard(state.params))
            if k == 1:  # nothing is there of earlier tests
                gms = auto._unique(entry.program.gm)
                for path in (aside.done_file(gms), *map(regions.file_of, gms)):
                    path.unlink(missing_ok=True)
            if entry.runner.taken:
                assert len(the(regions.Compiled).regions) == len(gms)
                return k, states
            if worth and k > FEW:
                time.sleep(0.5)
        return 0, states


def eager(steps):
    step, state, rows = step_of("blocks")
    for _ in range(steps):
        state, _ = step(state, rows)
    return zerofn.unshard(state.params)


def at_once(gms):
    """What the other process does."""
    for gm in gms:
        regions.compiled(gm)
    aside.done_file(gms).touch()


def near(a, b):
    for x, y in zip(zerofn.tree.leaves(a), zerofn.tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


@pytest.mark.whole  # a minute of compiling, as the one on ranks
def test_regions_are_taken_when_they_are_there():
    at, states = until_taken(3 * FEW, start=at_once)
    assert at == FEW
    assert_same_trees(states[FEW - 2], eager(FEW - 1))
    near(states[-1], eager(at))


def test_nothing_is_compiled_that_would_not_pay(caplog):
    caplog.set_level("INFO", "zerofn")
    at, states = until_taken(3 * FEW, worth=False, start=None)
    assert at == 0 and "step is not compiled: compiling would save" in caplog.text
    assert_same_trees(states[-1], eager(3 * FEW - 1))


def on_rank():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "_made", None)  # another process compiles
        at, states = until_taken(400)
    assert_same_trees(states[at - 2], eager(at - 1))
    near(states[-1], eager(at))
    return at, states[-1]


@pytest.mark.whole
def test_ranks_take_regions_of_another_process_at_one_call(ranks):
    (at, params), other = ranks(2, on_rank, timeout=300.0)
    assert at > FEW and other[0] == at
    assert_same_trees(other[1], params)


def lacking_on_one():
    """On a rank: (whether regions are taken, those that are, those left out), where rank 1 lacks one."""
    dist_rank, seen = rank(), []

    def known(gm):
        name = gm.meta[REGION]
        seen.append(name)
        return None if dist_rank == 1 and name == seen[0] else regions.Region(lambda inputs: gm(*inputs))

    with pytest.MonkeyPatch.context() as patch, instead(regions.Compiled()):
        for name, value in {"FIRST": 2, "EVERY": 1, "STEPS": 1e9, "known": known, "missing": lambda gm: ""}.items():
            patch.setattr(auto, name, value)
        patch.setattr(auto, "done_file", lambda gms: Path(__file__))
        step, state, rows = step_of("blocks", backend="auto")
        for _ in range(40):
            state, _ = step(state, rows)
            (entry,) = captures_of(step)
            if entry.runner.taken:
                break
        return entry.runner.taken, sorted(entry.backend.agreed), len(auto._unique(entry.program.gm))


def test_a_region_that_one_rank_lacks_is_taken_by_none(ranks):
    (taken, names, num), other = ranks(2, lacking_on_one)
    assert taken and 0 < len(names) < num and other == (taken, names, num)


def test_what_is_saved_are_passes_over_memory():
    assert auto._saved(a_region_of_two(), roofline(SLOW)) == pytest.approx(4 * NBYTES / 1e3)

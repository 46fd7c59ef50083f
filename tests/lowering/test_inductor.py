"""Regions that are compiled: to rounding of the eager step, with the same bits at every stage."""

from pathlib import Path

import pytest
import torch

import zerofn
from tests.lowering.test_cuda_graphs import same
from tests.lowering.test_regions import sum_of_two
from tests.lowering.test_segments import Recorded
from tests.support.captured_steps import rank
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn import optim
from zerofn.lowering import cuda_graphs, inductor, regions
from zerofn.util.process import instead, the

pytestmark = pytest.mark.slow  # Inductor compiles

NEAR = 1e-6


def small(stage=3, **options):
    """What two steps of a few layers leave."""
    module = build(2)
    state = state_of(module, stage, optim.sgd(0.1))
    step, losses = zerofn.compile(train_step_of(module), **options), []
    for k in range(2):
        state, aux = step(state, batch_of(rows=8, seed=k))
        losses.append(aux["loss"])
    return losses, zerofn.unshard(state.params)


@pytest.fixture(autouse=True)
def of_its_own():
    """A process that has compiled nothing."""
    with instead(regions.Compiled()):
        yield


@pytest.mark.whole  # test_compiled_bits.py has another model
def test_compiled_is_near_eager_and_the_same_at_every_stage(caplog):
    near, found = small(), [small(stage, backend="inductor") for stage in range(4)]
    assert "operation by operation" not in caplog.text
    for each in found[1:]:
        assert_same_trees(each, found[0])
    for a, b in zip(zerofn.tree.leaves(found[0]), zerofn.tree.leaves(near), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=NEAR)


def test_a_region_that_does_not_compile_runs_as_it_is(monkeypatch, caplog):
    def fails(*args):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(regions, "_read", lambda path: None)
    monkeypatch.setattr(regions, "compile_graph", fails)
    assert_same_trees(small(backend="inductor"), small())
    assert (
        "runs operation by operation: RuntimeError: no such instruction" in caplog.text
        and "and more" not in caplog.text
    )


def test_without_a_compiler_a_step_is_eager(monkeypatch, caplog):
    monkeypatch.setattr(inductor, "missing", lambda gm: "There is no compiler.")
    assert_same_trees(small(backend="inductor"), small())
    assert caplog.text.count("There is no compiler. Regions run operation by operation.") == 1


def test_shapes_that_change_at_every_step_are_compiled_a_few_times(monkeypatch, caplog):
    """As many as a step may have before it warns of its captures."""
    seen = []

    def compiled(gm):
        seen.append(gm)
        return regions.Region(lambda inputs: gm(*inputs), [])

    monkeypatch.setattr(inductor, "compiled", compiled)
    monkeypatch.setattr(inductor, "known", lambda gm: None)
    module = build(2)
    state = state_of(module, 3, optim.sgd(0.1))
    step = zerofn.compile(train_step_of(module), backend="inductor")
    for rows in range(1, 12):
        state, _ = step(state, batch_of(rows=rows))
        if rows == inductor.MANY:
            compiled_until_then = len(seen)
    assert len(seen) == compiled_until_then
    assert caplog.text.count("regions were compiled for each") == 1


def added(gm, fakes, mode, options):
    """A compiler whose regions are off by one."""

    def run(inputs):
        results = gm(*inputs)
        inputs.clear()
        return [x + 1 for x in results]

    return run, b""


def test_a_region_that_takes_more_memory_than_planned_runs_as_it_is(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(regions, "_folder", lambda: tmp_path)
    monkeypatch.setattr(regions, "compile_graph", added)
    monkeypatch.setattr(regions, "bytes_taken", lambda run: 10**9)
    assert_same_trees(small(backend="inductor"), small())
    assert "runs operation by operation: MemoryError: the compiled region needs 1 GB, but its operations" in caplog.text


def test_what_a_region_takes_is_measured(monkeypatch, tmp_path):
    def wasteful(gm, fakes, mode, options):
        def run(inputs):
            more = torch.empty(10**6)
            return gm(*inputs) if len(more) else []

        return run, b""

    monkeypatch.setattr(regions, "_folder", lambda: tmp_path)
    monkeypatch.setattr(regions, "compile_graph", wasteful)
    gm = sum_of_two(3.0)
    with pytest.raises(MemoryError, match="region needs 4 MB, but its operations need only 6"):
        regions.compiled(gm)
    monkeypatch.setattr(regions, "LEAST", 4 * 10**6)
    assert regions.compiled(gm).most == 4 * 10**6 + 2 * 4 * 16 and regions.known(gm)


def left_out(folder, fails_at):
    """On a rank: (the results, which regions are left out), where rank 1 fails to compile from its n-th region on."""
    seen = []

    def compiles(gm, *more):
        seen.append(gm)
        if rank() == 1 and len(seen) >= fails_at:
            raise RuntimeError("no space left on device")
        return added(gm, *more)

    with pytest.MonkeyPatch.context() as patch, instead(regions.Compiled()):
        patch.setattr(regions, "_folder", lambda: Path(folder))
        patch.setattr(regions, "compile_graph", compiles)
        found = small(backend="inductor")
        assert fails_at > 1 or same(found, small()) and len(seen) > 1
        return found, sorted(the(regions.Compiled).left_out), len(seen)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_what_one_rank_cannot_compile_no_rank_runs_compiled(ranks, tmp_path, fails_at):
    (a, names, num), (b, others, _) = ranks(2, left_out, str(tmp_path), fails_at)
    assert names == others and len(names) == num - fails_at + 1 > 0
    assert_same_trees(a[1], b[1])


def test_the_log_says_what_was_compiled(monkeypatch, caplog, tmp_path):
    caplog.set_level("INFO", "zerofn")
    monkeypatch.setattr(regions, "_folder", lambda: tmp_path)
    monkeypatch.setattr(regions, "compile_graph", added)
    small(backend="inductor")
    (said,) = [x for x in caplog.messages if "distinct regions" in x]
    num = len(the(regions.Compiled).regions)
    assert said.startswith(f"train_step: {num} distinct regions in ")
    assert said.endswith(f"{num} compiled here, 0 read from the disk, 0 run operation by operation.")


def test_segments_run_their_regions_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(regions, "_folder", lambda: tmp_path)
    monkeypatch.setattr(regions, "compile_graph", added)
    monkeypatch.setattr(cuda_graphs, "WARM_UP", 1)
    expected = small(backend="inductor")
    found = small(backend=cuda_graphs.Graphs(inductor.Inductor(), Recorded(), "cpu"))
    assert_same_trees(found, expected)
    assert not same(found, small())

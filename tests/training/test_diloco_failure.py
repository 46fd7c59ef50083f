"""A replica that dies ends the job, which goes on from its last save."""

import functools
import os
import shutil
import signal

import pytest

import zerofn
from tests.support.diloco_runs import STEPS, run, seen, started
from tests.support.same import assert_same_trees
from zerofn.comm.mesh import Mesh

SAVED = 5  # behind a meeting, in the middle of a round


def job(folder, steps=STEPS, killed=None, **options):
    """A run with saves. Returns the step that it goes on from, the state there, and the one at its end."""
    mesh = Mesh.make(replicate=-1)
    step, state = started(mesh, **options)
    saves = zerofn.Checkpoints(folder, every=SAVED, async_=False)
    state, compiled = saves.restore_or(state), zerofn.compile(step)
    first, begin = saves.step, (seen(state), zerofn.unshard(state.opt_state))
    for k in range(first, steps):
        if k == killed and mesh.axis("replicate").rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state, _ = run(mesh, compiled, state, k, k + 1)
        saves.after_step(state)
    saves.close()
    return first, begin, (seen(state), zerofn.unshard(state.opt_state))


@pytest.mark.slow
@pytest.mark.part(options=[{"tau": 2, "fragments": 3, "after": 1}])
@pytest.mark.parametrize("options", [{"tau": 2, "fragments": 3, "after": 1}, {"tau": 0}], ids=str)
def test_a_replica_that_is_killed_is_named_and_the_job_goes_on_from_its_last_save(ranks, tmp_path, options):
    with pytest.raises(RuntimeError, match="rank 1 of 2 was killed by SIGKILL"):
        zerofn.run(job, tmp_path / "two", ranks=2, killed=7, **options)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    job_of = functools.partial(job, **options)
    first, begin, end = ranks(2, job_of, tmp_path / "two")[0]
    assert first == SAVED
    assert_same_trees(end, ranks(2, job_of, tmp_path / "undisturbed")[0][2])
    alone, ((anchor, own), outer), _ = ranks(1, job_of, tmp_path / "one")[0]
    assert alone == SAVED
    (params, replicas), moments = begin
    assert_same_trees((anchor, outer, own), (params, moments, replicas[:1]))

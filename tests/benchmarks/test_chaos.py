"""Five faults of `benchmarks.checkpoint.chaos`: the run comes back each time, and ends with the bits of an undisturbed
one. (Frozen ranks take longer: tests/job/test_heartbeat.py.)
"""

import pytest

from benchmarks.checkpoint import chaos

FAULTS = ["a rank is killed", "the disk is full", "a bit flips", "the job is killed", "a signal ends it"]


@pytest.mark.parametrize("faults", [FAULTS[::4], pytest.param(FAULTS, marks=pytest.mark.whole)], ids=len)
@pytest.mark.whole
def test_a_run_with_faults_is_the_run_without(tmp_path, faults):
    result = chaos.run(tmp_path, faults, seed=3)
    assert result["different"] == [] and [x["fault"] for x in result["faults"]] == faults
    assert result["steps_done"] >= result["last_step"] > 20 * len(faults)
    assert {x["ranks"] for x in result["faults"]} > {2}
    for each in result["faults"]:  # beside other tests it takes longer than alone, where the limit holds
        assert 0 < each["seconds"] <= 2 * chaos.LIMIT and each["steps"] <= (0 if "signal" in each["fault"] else 75)
    assert "a signal ends it" in str(chaos.table(result).columns[0]._cells)


def test_each_kind_comes_about_as_often():
    found = list(chaos.kinds(20, 0))
    assert {found.count(kind) for kind in chaos.Chaos.FAULTS} == {2, 3} and found != list(chaos.kinds(20, 1))

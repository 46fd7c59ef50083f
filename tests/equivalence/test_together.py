"""Features together: a cover of all pairs of them beside plain torch, the pairs that are refused, and their page."""

import pytest

from tests.support import features_page
from tests.support.library import ROOT
from tests.support.together import (
    EXACT,
    FEATURES,
    REFUSED,
    Case,
    by_torch,
    cover,
    covered,
    distance,
    limit,
    pairs_of,
    trained,
)

# A case for `make test`; the others take minutes.
FEW = [x for x in cover() if x.num_ranks == 4 and x.backend == "graphs" and "tensor" in x.sizes][:1]
PIPELINE = Case("pipe", 0, accumulate=True, backend="graphs")


def on_ranks(case, folder):
    return distance(trained(case, folder), by_torch())


@pytest.mark.slow
@pytest.mark.part(case=FEW)
@pytest.mark.parametrize("case", cover(), ids=str)
def test_features_together_train_as_plain_torch(ranks, tmp_path, case):
    found = ranks(case.num_ranks, on_ranks, case, str(tmp_path))
    assert len(set(found)) == 1  # all ranks have the same parameters
    assert found[0] < limit(case)


@pytest.mark.slow
def test_a_recorded_pipeline_trains_as_plain_torch(ranks):
    """Its pieces run for several microbatches in turns, and the later ones add to what the first has returned."""
    assert max(ranks(2, on_ranks, PIPELINE, None)) < EXACT


def test_the_cases_have_all_pairs_but_those_that_are_refused():
    every = pairs_of(FEATURES)
    tested = set().union(*map(covered, cover())) & every
    assert tested.isdisjoint(REFUSED) and set(REFUSED) <= every
    assert len(every - tested - set(REFUSED)) < len(every) / 10


def test_the_page_of_what_goes_together_is_todays():
    """Its sentences are those that `shard` says."""
    told = "write `python -m tests.support.features_page docs/together.md`"
    assert (ROOT / "docs/together.md").read_text() == features_page.page(), told

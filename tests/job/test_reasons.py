"""Why a rank does what all must do."""

import zerofn
from zerofn.job.reasons import reason


def test_the_innermost_reason_counts_and_has_its_line():
    assert reason() == ""
    with zerofn.because("the outer one"):
        with zerofn.because("the inner one."):
            assert reason().startswith(f"At {__file__}:")
            assert reason().endswith('(with zerofn.because("the inner one."):): the inner one.')
        assert reason().endswith("the outer one")
    assert reason() == ""

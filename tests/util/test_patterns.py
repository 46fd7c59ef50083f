"""Patterns against names: a star is one component, and all else is itself."""

from zerofn.util.patterns import matches, pattern_of


def test_a_star_is_one_component():
    assert matches("layers.*.q", "layers.11.q") and matches("layers.*.q", "layers.x.q")
    assert not matches("layers.*.q", "layers.1.2.q") and not matches("layers.*.q", "layers.1.qq")


def test_all_else_is_itself():
    assert matches("a+b", "a+b") and not matches("a.b", "a_b")


def test_a_name_is_matched_by_its_pattern():
    for name in ("layers.0.mlp.experts.11.w1", "h.3", "conv2d.weight", "3.weight"):
        assert matches(pattern_of(name), name)
    assert pattern_of("layers.0.mlp.experts.11.w1") == "layers.*.mlp.experts.*.w1"
    assert pattern_of("conv2d.weight") == "conv2d.weight"

"""Which parameters get no gradient: those that none of a step's losses uses, by their names."""

from zerofn.capture.unused import note_gradients, noted_gradients, unused


def test_a_parameter_is_used_if_one_loss_uses_it():
    with noted_gradients() as seen:
        note_gradients(lambda: [("a", True), ("b", False), ("c", False)])
        note_gradients(lambda: [("a", False), ("b", True)])
    note_gradients(lambda: 1 / 0)  # outside a capture nothing is asked
    assert unused(seen) == ["c"]


def test_a_name_under_a_prefix_is_the_one_without_it():
    assert unused({"gen.0.w": False, "gen.0.b": False, "0.w": True}) == ["gen.0.b"]

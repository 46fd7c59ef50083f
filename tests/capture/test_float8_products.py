"""What is noted of weights while a step is captured."""

from zerofn.capture.float8_products import float8_of, none_is_float8, note_products, noted_products, of_calls


def test_a_weight_is_float8_if_it_is_so_in_one_loss():
    note_products({"outside": ""})
    with noted_products() as noted:
        assert float8_of(noted) is None
        note_products({"a": "odd", "b": ""})
        note_products({"a": "", "b": "odd", "c": "odd"})
    assert float8_of(noted) == {"a": "", "b": "", "c": "odd"}


def test_a_weight_that_is_float8_in_some_calls_is_told_apart():
    some = of_calls(["odd", ""])
    assert some == of_calls(["", "odd", "empty"]) == "in some calls: odd"
    assert float8_of([{"a": some, "b": "odd", "c": some}, {"a": "", "b": some, "c": "odd"}]) == {
        "a": "",
        "b": some,
        "c": some,
    }
    assert none_is_float8({"a": "odd"}) and not none_is_float8({"a": some})
    assert not none_is_float8({"a": "odd", "b": ""})

"""What is noted of weights while a step is captured."""

from zerofn.capture.float8_products import float8_of, note_products, noted_products


def test_a_weight_is_float8_if_it_is_so_in_one_loss():
    note_products({"outside": ""})
    with noted_products() as noted:
        assert float8_of(noted) is None
        note_products({"a": "odd", "b": ""})
        note_products({"a": "", "b": "odd", "c": "odd"})
    assert float8_of(noted) == {"a": "", "b": "", "c": "odd"}

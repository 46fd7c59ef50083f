"""Fields of JSON: each has the type and the range that was asked for, or the sentence says which it should have."""

import math

import pytest

from zerofn.checkpoint.json_fields import Field, as_number

DOCUMENT = {"name": "w", "sizes": [3, 0], "is": True, "rate": 0.5, "none": None, "dtype": "F32", "far": 1 << 63}
METHODS = {
    "object": lambda x: x.object(), "each": lambda x: x.each(), "text": lambda x: x.text(), "flag": lambda x: x.flag(),
    "count": lambda x: x.count(), "number": lambda x: x.number(), "word": lambda x: x.word({"F32": 4, "I8": 1}),
}  # fmt: skip
RIGHT = {
    "name": {"text": "w"}, "sizes": {"each": 2}, "is": {"flag": True}, "rate": {"number": 0.5}, "none": {},
    "dtype": {"text": "F32", "word": 4}, "far": {"number": 1 << 63},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DOCUMENT)
def test_a_field_is_of_the_kind_that_was_asked_for_or_told(name, method):
    field = Field(DOCUMENT)[name]
    if method not in RIGHT[name]:
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
            METHODS[method](field)
        return
    found = METHODS[method](field)
    assert (len(found) if method == "each" else found) == RIGHT[name][method]


def test_ranges_places_and_what_is_not_there():
    with pytest.raises(ValueError, match=r"^sizes\[1\]: expected a whole number of 1 or more, got 0$"):
        Field(DOCUMENT)["sizes"].each()[1].count(1)
    with pytest.raises(ValueError, match=r"^sizes\[0\]: expected a whole number of 0 or more, and 2 at most, got 3$"):
        Field(DOCUMENT)["sizes"].each()[0].count(most=2)
    with pytest.raises(ValueError, match="^the JSON object has no 'names'$"):
        Field(DOCUMENT)["names"]
    with pytest.raises(ValueError, match=r"^name: expected an object, got 'w'$"):
        Field(DOCUMENT)["name"]["x"]
    assert Field(DOCUMENT).get("names", 7).count() == 7 and Field(DOCUMENT)["none"].is_null()
    with pytest.raises(ValueError, match="a list of 3"):
        Field(DOCUMENT)["sizes"].several(3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5, 3])
def test_numbers_come_back_whatever_json_lacks(value):
    found = Field(as_number(value)).number()
    assert found == value or (math.isnan(found) and math.isnan(value))

"""Figures on the pages are those of the result files: a generator writes them, and this says where they differ."""

import pytest

from docs import figures, results
from tests.support.library import ROOT


@pytest.mark.parametrize("page", figures.KEYS)
def test_figures_on_a_page_are_those_of_the_result_files(page):
    text = (ROOT / page).read_text()
    new = results.filled(text, figures.KEYS[page]).split("\n")
    changed = [
        f"is {old!r}, should be {line!r}" for old, line in zip(text.split("\n"), new, strict=True) if old != line
    ]
    assert changed == [], "write `python -m docs.figures`"


@pytest.mark.parametrize("page", figures.KEYS)
def test_another_figure_is_noticed_in_each_piece(page):
    """Every number that a piece has a key for is written, whatever it was."""
    text = (ROOT / page).read_text()
    for piece, keys in figures.KEYS[page]:
        other = results.filled(text, [(piece, [results.Made("flips", lambda _, x=x: x.value + 3) for x in keys])])
        assert other != text
        assert results.filled(other, [(piece, keys)]) == text


def test_a_piece_that_is_not_on_the_page_is_an_error():
    with pytest.raises(ValueError, match="'takes {:.0f} ms' is 0 times on the page"):
        results.filled("It takes long.", [("takes {:.0f} ms", [results.of("attention_gpu", "zerofn", "ms")])])


def test_rounds_of_two_rows_are_divided_one_by_one(monkeypatch):
    monkeypatch.setattr(results, "results", lambda _: {"a": [2.0, 9.0, 8.0], "b": [{"ms": 1.0}, {"ms": 3.0}]})
    assert results.Key("x", ("a",), ("b", "ms")).value == 2.5
    assert results.of("x", "a", unit=4).value == 2.0

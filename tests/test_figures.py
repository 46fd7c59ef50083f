"""Figures on the pages are those of the result files: a generator writes them, and this says where they differ, and
where a page has a figure that nothing writes."""

import pytest

from docs import figures, results
from docs.figures.without_key import WRITTEN, without_key
from tests.support.library import ROOT

ALL = sorted(str(x.relative_to(ROOT)) for x in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))


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
        other = results.filled(text, [(piece, [results.Worked(lambda x=x: x.value + 3) for x in keys])])
        assert other != text
        assert results.filled(other, [(piece, keys)]) == text


@pytest.mark.parametrize("page", [page for page in ALL if page not in WRITTEN | {"CHANGELOG.md"}])
def test_every_figure_on_a_page_has_a_key(page):
    text = (ROOT / page).read_text()
    found = without_key(text, results.places(text, figures.KEYS.get(page, [])))
    assert [f"{page}:{line}: {figure}" for line, figure in found] == [], (
        "give each of these figures a key in docs/figures, which names where a result file has it; or leave it out"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 1.25 s, and 3,000.5 MB.\n\nIt ends at 0.58.", [(1, "1.25"), (1, "3,000.5"), (3, "0.58")]),
        ("A Llama of 29.5 M parameters with torch 2.13 and timm 1.0.31", []),
        ("`x = 1.5`, [a paper](https://arxiv.org/abs/2102.02888)\n\n```text\nloss 2.5\n```\n", []),
        ("With `capacity=1.5`, 1.5 times as many of 2.5", [(1, "2.5")]),
        ("| tokens | of DDP's time | ms |\n|---|---:|---:|\n| 512 | 1.00 | **814** |", [(3, "1.00"), (3, "814")]),
        ("| mesh | device |\n|---|---:|\n| 8 | ~ 16 GB |\n\n| ranks | rows |\n|---|---|\n| 2 | 16 |", [(3, "16")]),
    ],
)
def test_figures_without_a_key_are_found(text, found):
    assert without_key(text, []) == found


def test_a_figure_with_a_key_is_not_found():
    text = "It takes 1.5 ms. It takes 2.5 s."
    keys = [("takes {:.1f} ms", [results.of("attention_gpu", "zerofn", "ms")])]
    assert without_key(text, results.places(text, keys)) == [(1, "2.5")]


def test_a_piece_that_is_not_on_the_page_is_an_error():
    with pytest.raises(ValueError, match="'takes {:.0f} ms' is 0 times on the page"):
        results.filled("It takes long.", [("takes {:.0f} ms", [results.of("attention_gpu", "zerofn", "ms")])])


def test_rounds_of_two_rows_are_divided_one_by_one(monkeypatch):
    monkeypatch.setattr(results, "results", lambda _: {"a": [2.0, 9.0, 8.0], "b": [{"ms": 1.0}, {"ms": 3.0}]})
    assert results.Key("x", ("a",), ("b", "ms")).value == 2.5
    assert results.of("x", "a", unit=4).value == 2.0

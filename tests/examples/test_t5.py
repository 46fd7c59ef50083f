"""The T5 example: its parser against gettext's, its numbers against themselves on other ranks."""

import gettext
import re
from pathlib import Path

import django
import pytest

from tests.support.runs_of_examples import module, run

TINY = [
    *("--width", 32, "--heads", 2, "--layers", 1, "--length", 16, "--vocab", 300),
    *("--steps", 30, "--batch", 12, "--held-out", 21, "--show", 2, "--eval-every", 15),
]  # fmt: skip


@pytest.fixture(scope="module")
def t5():
    return module("t5")


def losses(printed):
    """(before, after, beside another's English) of validation, as the last line says."""
    found = re.search(r"validation loss ([\d.]+) before, ([\d.]+) after; ([\d.]+) beside", printed)
    return [float(x) for x in found.groups()]


def test_catalogues_are_parsed_as_gettext_has_them(t5):
    folder = Path(django.__file__).parent / "contrib/admin/locale/ro/LC_MESSAGES"
    with open(folder / "django.mo", "rb") as file:
        compiled = gettext.GNUTranslations(file)
    pairs = t5.catalogue((folder / "django.po").read_text(encoding="utf-8"))
    found = [compiled.gettext(source) for source, _ in pairs]
    known = [(pair, text.strip()) for pair, text in zip(pairs, found, strict=True) if text != pair[0]]
    assert len(known) > 0.9 * len(pairs) > 100
    assert [pair for pair, text in known if pair[1] != text] == []


def test_catalogue_entries():
    text = (
        'msgid ""\nmsgstr "Language: ro"\n\n'
        '# said\n#: x.py:3\nmsgctxt "month"\nmsgid "May \\"5\\""\nmsgstr "Mai \\"5\\""\n\n'
        'msgid ""\n"two "\n"lines"\nmsgstr ""\n"două "\n"rânduri"\n\n'
        'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "%d zi"\nmsgstr[1] "%d zile"\n\n'
        '#, fuzzy\nmsgid "maybe"\nmsgstr "poate"\n\n'
        'msgid "untold"\nmsgstr ""\n'
    )
    assert module("t5").catalogue(text) == [
        ('May "5"', 'Mai "5"'),
        ("two lines", "două rânduri"),
        ("%d day", "%d zi"),
        ("%d days", "%d zile"),
    ]


def test_held_out_sentences_are_not_learned(t5):
    train, held_out = t5.sentences(30, seed=0)
    assert len(held_out) == 30 and len(train) > 500
    assert not {x.lower() for x, _ in train} & {x.lower() for x, _ in held_out}
    assert (train, held_out) == t5.sentences(30, seed=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process without dropout."""
    return run("t5.py", *TINY, "--dropout", 0, folder=tmp_path_factory.mktemp("alone"))


@pytest.mark.whole
def test_it_learns_and_translates(alone):
    before, after, _ = losses(alone)
    assert after < before - 0.5
    assert "by the model" in alone


@pytest.mark.whole
def test_ranks_and_microbatches_weigh_tokens_alike(alone, tmp_path):
    """Shares of different numbers of tokens have the losses of the one batch."""
    options = ("--stage", 3, "--accumulate", 2)
    printed = run("t5.py", *TINY, "--dropout", 0, *options, folder=tmp_path, num_ranks=2)
    assert losses(printed) == pytest.approx(losses(alone), abs=0.0021)  # three digits are printed


@pytest.mark.whole
def test_dropout_and_bf16_on_two_ranks(tmp_path):
    options = ("--precision", "bf16", "--stage", 1)
    before, after, _ = losses(run("t5.py", *TINY, *options, folder=tmp_path, num_ranks=2))
    assert after < before - 0.5


def test_a_batch_that_cannot_be_cut_is_refused(t5, monkeypatch):
    monkeypatch.setattr("sys.argv", ["t5.py", "--batch", "12", "--accumulate", "5"])
    with pytest.raises(SystemExit, match="--batch 12 is not divisible by 1 ranks times 5"):
        t5.main()

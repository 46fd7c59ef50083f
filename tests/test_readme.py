"""README is short and true: its script runs as it stands and prints what README shows, and its links lead to files."""

import os
import re
import subprocess
import sys

import pytest

import zerofn
from docs.address import address, addressed
from docs.assemble import blocks
from tests.support.library import ROOT

README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs/index.md").read_text()
MOST_WORDS = 900  # a page that one reads to its end
NUMBER = r"-?\d+(?:\.\d+)?"


def outputs(page):
    """The blocks of a page that show what was printed."""
    return re.findall(r"(?ms)^```text\n(.*?)^```", page)


def test_readme_has_at_most_900_words_outside_of_code():
    prose = re.sub(r"(?ms)^```.*?^```$", "", README)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # a link's words are read, its target is not
    assert len([word for word in prose.split() if re.search(r"\w", word)]) <= MOST_WORDS


def test_links_of_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#\s]+)", addressed(README, ""))
    assert [x for x in links if not x.startswith("http") and not (ROOT / x).exists()] == []


def test_readme_has_the_address_that_pyproject_has():
    assert README == addressed(README, address((ROOT / "pyproject.toml").read_text()))


def test_an_address_makes_links_absolute_and_an_empty_one_makes_them_relative():
    page = (
        "pip install .  # in a clone, in an environment that has torch\n"
        "![time](a/step.png) [plans](docs/plans.md#a) [below](#a) [torch](https://pytorch.org)\n"
    )
    filled = addressed(page, "https://example.org/zerofn")
    assert "![time](https://example.org/zerofn/raw/HEAD/a/step.png)" in filled
    assert "[plans](https://example.org/zerofn/blob/HEAD/docs/plans.md#a)" in filled
    assert 'pip install "zerofn @ git+https://example.org/zerofn"  # in an environment that has torch' in filled
    assert "[below](#a) [torch](https://pytorch.org)" in filled
    assert addressed(filled, "") == page


def test_the_sites_first_page_shows_the_script_of_readme_and_its_outputs():
    assert blocks(INDEX)[0] == blocks(README)[0]
    assert outputs(INDEX)[:2] == outputs(README)[:2]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/features.md", "docs/notebook.md"])
def test_names_on_the_first_pages_exist(page):
    text = (ROOT / page).read_text()
    missing = []
    for name in set(re.findall(r"\b((?:zerofn|optim)(?:\.[A-Za-z]\w*)+)", text)):
        value, (first, *rest) = zerofn, name.split(".")
        if rest[0] == "integrations":  # imports transformers or lightning
            continue
        for part in rest if first == "zerofn" else ["optim", *rest]:
            value = getattr(value, part, None)
        missing += [name] if value is None else []
    assert missing == []


def printed(code, folder, *launch):
    """What a file with this code prints, under the given launcher."""
    (folder / "train.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, "train.py"], cwd=folder, env=environment, text=True, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def number(text):
    """The number that a text begins with."""
    return float(re.match(NUMBER, text)[0])


def losses(text):
    return [float(x) for x in re.findall(rf"loss ({NUMBER})", text)]


@pytest.mark.slow
def test_the_blocks_of_readme_run_one_after_the_other_and_print_what_it_shows(tmp_path):
    shown = printed("\n".join(blocks(README)), tmp_path)
    assert losses(shown) == pytest.approx(losses(outputs(README)[0]), abs=0.02)  # other processors round otherwise
    budgets = re.findall(r"(?m)^budget .*$", "".join(outputs(README)))
    assert len(budgets) == 3 and budgets == re.findall(r"(?m)^budget .*$", shown)
    product = next(x for x in outputs(README) if x.startswith("v·Hv"))
    assert number(shown.split("v·Hv = ")[1]) == pytest.approx(number(product.split("= ")[1]), rel=0.05)


@pytest.mark.whole
@pytest.mark.slow
def test_the_script_of_readme_prints_on_two_ranks_what_it_shows(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shown = printed(blocks(README)[0], tmp_path, *launch)
    assert losses(shown) == pytest.approx(losses(outputs(README)[1]), abs=0.02)


@pytest.mark.whole
@pytest.mark.slow
def test_the_plan_that_readme_shows_is_todays():
    command = re.search(r"(?m)^zerofn (plan .*)$", README)[1]
    done = subprocess.run(
        [sys.executable, "-m", "zerofn.cli", *command.split()], cwd=ROOT, text=True, timeout=280, capture_output=True,
    )  # fmt: skip
    assert done.stdout == next(x for x in outputs(README) if "H100-8" in x), done.stderr


def long_or_odd(page):
    """The lines of a page's code that do not fit, or speak to a linter."""
    code = re.findall(r"(?ms)^```(?:python|py|sh)[^\n]*\n(.*?)^```", page)
    return [line for block in code for line in block.splitlines() if len(line) > 88 or "# noqa" in line]


def test_code_on_the_sites_pages_is_at_most_88_characters_wide_and_speaks_to_no_linter():
    pages = sorted((ROOT / "docs").rglob("*.md"))
    found = {str(page): lines for page in pages if (lines := long_or_odd(page.read_text()))}
    assert pages and found == {}
    formatted = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "88", *map(str, pages)]
    done = subprocess.run(formatted, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert long_or_odd(f"```python\nx = 1  # noqa\n{'x' * 89}\n{'x' * 88}\n```") == ["x = 1  # noqa", "x" * 89]

"""The notebooks run from top to bottom, on the two ranks that they start."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.library import ROOT

FOLDER = ROOT / "examples/notebooks"
NOTEBOOKS = sorted(p.stem for p in FOLDER.glob("*.ipynb"))
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.whole
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_shows_figures(name, tmp_path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # figures are shown, as in a notebook
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "clear the outputs; the site has them"
    NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [out["data"] for cell in book.cells for out in cell.get("outputs", []) if "data" in out]
    assert any("image/png" in x or re.search("<(img|svg)", x.get("text/html", "")) for x in shown)

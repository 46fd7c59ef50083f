"""The notebooks run from top to bottom, on the two ranks that they start."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.library import ROOT

NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # figures are shown, as in a notebook
    book = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "clear the outputs; the site has them"
    NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [out for cell in book.cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs)

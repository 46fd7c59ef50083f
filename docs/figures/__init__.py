"""The figures in README and on the site, each named by its key in a file of `benchmarks/results`.

    python -m docs.figures      # writes the figures of today's result files into the pages

Each module has pieces of the text of some pages. Where a piece has a gap, such as `{:.2f}`, the page has the figure of
the next key; a piece is short, so that a sentence can be reworded around it. Tests compare the pages with the result
files, and find figures without a key (`without_key.py`).
"""

from __future__ import annotations

from docs.figures import beside, gpu, layouts, meshes, pipelines, plans, states, wires
from docs.results import ROOT, Piece, filled

KEYS: dict[str, list[Piece]] = {
    "README.md": [*beside.of_readme()],
    "docs/performance.md": [*beside.of_performance(), *meshes.of_meshes(), *meshes.of_planned(), *gpu.of_gpu()],
    "docs/lasting.md": [*states.of_chaos()],
    "docs/pipelines.md": [*pipelines.of_pipelines()],
    "docs/glossary.md": [*pipelines.of_glossary()],
    "docs/wire.md": [*wires.of_wires()],
    "docs/long_rows.md": [*layouts.of_layouts(), *layouts.of_rings()],
    "docs/offload.md": [*states.of_offload()],
    "docs/features.md": [*states.of_features()],
    "docs/plans.md": [*plans.of_plans()],
    "docs/fast.md": [*plans.of_fast()],
}


def main() -> None:
    """Write the figures into the pages."""
    for page, pieces in KEYS.items():
        path = ROOT / page
        path.write_text(filled(path.read_text(), pieces))

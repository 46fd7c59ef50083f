"""Each recipe learns on two ranks; where nothing is drawn, two ranks are one with twice the rows."""

import importlib
import sys

import numpy as np
import pytest
import torch

from tests.sparse.dense import attended
from tests.support.library import ROOT
from tests.support.some import some_of

DRAWS = ("diffusion", "gan", "policy")  # on every rank something else
RECIPES = sorted(p.stem for p in (ROOT / "examples/recipes").glob("*.py") if p.stem != "digits")
RUN = some_of(RECIPES, "contrastive", "diffusion", "ema", "lora")
STEPS, ROWS = 26, 32
pytestmark = pytest.mark.slow


def all_of(rows, names):
    sys.path.insert(0, str(ROOT / "examples/recipes"))
    try:
        return {name: importlib.import_module(name).main(steps=STEPS, rows=rows) for name in names}
    finally:
        sys.path.remove(str(ROOT / "examples/recipes"))


@pytest.fixture(scope="module")
def losses(ranks):
    """Recipe -> losses on two ranks, and on one where they are to be those."""
    (two, _), one = ranks(2, all_of, ROWS // 2, RUN), all_of(ROWS, [x for x in RUN if x not in DRAWS])
    return {name: (two[name], *([one[name]] if name in one else [])) for name in RUN}


def test_all_are_there():
    assert RECIPES == ["contrastive", "diffusion", "distillation", "ema", "gan", "learned_blocks", "lora", "policy"]
    for name in RECIPES:
        assert len((ROOT / f"examples/recipes/{name}.py").read_text().splitlines()) <= 100


@pytest.mark.parametrize("name", RUN)
def test_it_learns(losses, name):
    for found in losses[name]:
        assert len(found) == STEPS and np.isfinite(found).all()
        assert np.mean(found[-5:]) < 0.95 * np.mean(found[:5]), found


@pytest.mark.parametrize("name", [x for x in RUN if x not in DRAWS])
def test_two_ranks_are_one_with_twice_the_rows(losses, name):
    np.testing.assert_allclose(*losses[name], rtol=2e-3)


def test_blocks_that_are_learned_are_a_dense_mask():
    recipe = importlib.import_module("examples.recipes.learned_blocks")
    torch.manual_seed(0)
    layer, x = recipe.Layer(16, 2).double(), torch.randn(3, 8 * recipe.BLOCK, 16, dtype=torch.float64)
    q, k, v = layer.qkv(layer.norm(x)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    blocks = torch.arange(8).expand(3, 2, 8, 8)
    named = (recipe.best_blocks(q, k)[..., None] == blocks[:, :, :, None]).any(3)
    assert named.sum(3).unique().tolist() == [1, 2, 3]  # the first blocks have fewer before them
    mask = named.repeat_interleave(recipe.BLOCK, 2).repeat_interleave(recipe.BLOCK, 3).tril()
    expected = x + layer.out(attended(q, k, v, mask)[0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)

"""Regions as another process gets them."""

import pickle

import pytest
import torch

from tests.support.outlined_steps import OUTLINED, trained
from zerofn.lowering import aside


@pytest.mark.parametrize("name", ["blocks", "t5"])
def test_regions_survive_being_written_to_a_file(name):
    for call in trained(name, passes=OUTLINED)[2]:
        written = aside._described(call.body)
        made = aside._made_of(pickle.loads(pickle.dumps(written)))
        assert aside._described(made) == written
        given = [x.meta["val"] for x in call.body.graph.nodes if x.op == "placeholder"]
        inputs = [
            torch.ones(x.shape, dtype=x.dtype).as_strided(x.shape, x.stride()) for x in given if x.is_contiguous()
        ]
        if len(inputs) == len(given):
            assert all(map(torch.equal, made(*inputs), call.body(*inputs)))

import pytest
import torch

from zerofn.random import key
from zerofn.random.noise import BLOCK, normal_leaf, normal_shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 7, 15, 16, 1000, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_a_part_is_that_part_of_the_whole(dtype, numel):
    like = torch.empty(numel, dtype=dtype)
    whole = normal_leaf(key(3), like, 2)
    for start, stop in [(0, numel), (numel // 3, numel), (0, numel // 2), (numel // 3, 2 * numel // 3)]:
        part = normal_shard(
            key(3), torch.empty(stop - start + 4, dtype=dtype), [2], [numel], [start], [2], [2 + stop - start]
        )
        assert torch.equal(part[2:-2], whole[start:stop])
        assert not part[:2].any() and not part[-2:].any()


def test_it_is_standard_normal_and_leaves_and_blocks_differ():
    x = normal_leaf(key(0), torch.empty(20 * BLOCK), 0)
    assert abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 1) < 0.01
    assert abs(float(x.double().pow(4).mean()) - 3) < 0.05
    blocks = x.view(-1, BLOCK)
    assert (torch.corrcoef(blocks) - torch.eye(20)).abs().max() < 0.05
    other = normal_leaf(key(0), torch.empty(BLOCK), 1)
    assert abs(float(torch.corrcoef(torch.stack([blocks[0], other]))[0, 1])) < 0.05

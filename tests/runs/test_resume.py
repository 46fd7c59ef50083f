"""A run that was saved and loaded goes on as if it had not been."""

from pathlib import Path

import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from zerofn import optim


def init() -> zerofn.TrainState:
    torch.manual_seed(3)
    params = {"0.w": torch.randn(200, 400) / 20, "1.w": torch.randn(400, 200) / 20}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-2))


def loss_fn(params, x):
    return (torch.tanh(x @ params["0.w"]) @ params["1.w"] - x).square().mean()


def train_step(state, x):
    loss, grads = state.value_and_grad(loss_fn)(x)
    return state.apply_gradients(grads), loss


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randn(4, 200, generator=generator)


def resume(path: Path, stage: int) -> list[list[str]]:
    step = zerofn.compile(train_step)
    state = zerofn.shard(init, stage=stage)
    for k in range(2):
        state, _ = step(state, batch(k))
    zerofn.save(path, state)
    given = state
    for k in range(2, 4):
        state, _ = step(state, batch(k))
    for like in (zerofn.shard(init, stage=stage), given):  # the second has given its memory away
        loaded = zerofn.load(path, like=like)
        for k in range(2, 4):
            loaded, _ = step(loaded, batch(k))
        assert_same_trees(zerofn.unshard(loaded), zerofn.unshard(state), f"stage {stage}")


def test_compiled_and_resumed(ranks, tmp_path):
    for stage in (0, 1, 3):
        ranks(2, resume, tmp_path / str(stage), stage)

"""Steps that tests compile, and what comes out of them, captured and eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of
from zerofn import optim, tree

TX = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))


def rank() -> int:
    """This rank, 0 where there are none."""
    return dist.get_rank() if dist.is_initialized() else 0


def run(step: Callable[..., Any], state: Any, batches: Sequence[Any], compiled: bool = True, **options: Any) -> Any:
    """What comes out of some steps, as a tree: the final state, whole, and the aux values of each step."""
    call = zerofn.compile(step, **options) if compiled else step
    out = []
    for batch in batches:
        state, aux = call(state, batch)
        out.append(tree.tree_map(torch.clone, aux))
    return {"state": zerofn.unshard(state), "aux": out}


def assert_captured_is_eager(
    step: Callable[..., Any], make_state: Callable[[], Any], batches: Sequence[Any], what: str = ""
) -> None:
    """A compiled step against the same step run eagerly, bit for bit."""
    ours, theirs = run(step, make_state(), batches), run(step, make_state(), batches, compiled=False)
    assert_same_trees(ours, theirs, what, equal_nan=True)


def masked_step(module: torch.nn.Module, n: int) -> Callable[..., Any]:
    """Dropout, a mask, clipping, accumulation and a (sum, weight) loss."""

    def loss_fn(params, batch):
        x = batch["x"].to(params["0.weight"].dtype)
        gap = (functional_call(module, params, (x,)) - batch["y"]).square().mean(1)
        return (gap * batch["mask"]).sum(), batch["mask"].sum()

    def step(state, batch):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, n) if n > 1 else vg)(batch)
        return state.apply_gradients(grads), {"loss": loss, "norm": zerofn.global_norm(grads)}

    return step


def masked_batch(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """This rank's batch, with weights of its rows."""
    batch = batch_of(rank(), rows=rows, seed=seed)
    return {**batch, "mask": (batch["y"][:, 0] > -0.7).float() + 0.5}


def tiny_gpt2() -> torch.nn.Module:
    """Two layers with dropout, seeded."""
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    return hf.GPT2LMHeadModel(config).train()

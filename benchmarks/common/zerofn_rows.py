"""ZeroFn's rows, on its public contract alone: the same model, tokens and AdamW as the peers'."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import measure
from benchmarks.common.peers import Row
from benchmarks.common.processes import HERE
from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, SEED, WEIGHT_DECAY, Workload

if importlib.util.find_spec("zerofn") is None:  # not installed: the checkout this file lies in
    sys.path.append(str(HERE.parent))


NUM_MICROBATCHES = 2


def train_step(work: Workload, num_microbatches: int = 1) -> tuple[Callable, Callable]:
    """`(init_state, train_step)` as a user writes them for this workload."""
    import zerofn

    model = zerofn.skeleton(work.module)

    def init_state() -> zerofn.TrainState:
        params = dict(work.module().named_parameters())
        tx = zerofn.optim.adamw(LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY)
        return zerofn.TrainState.create(params=params, tx=tx)

    def loss_fn(params, tokens):
        inputs = {"input_ids": tokens, "labels": tokens}
        return torch.func.functional_call(model, params, (), inputs).loss

    def step(state, batch):
        vg = state.value_and_grad(loss_fn)
        if num_microbatches > 1:
            vg = zerofn.accumulate(vg, num_microbatches)
        loss, grads = vg(batch)
        return state.apply_gradients(grads), {"loss": loss}

    return init_state, step


class Compiled:
    """A sharded state and its compiled step: `compiled(tokens)` trains once, returns the loss."""

    def __init__(self, work: Workload, stage: int, num_microbatches: int = 1, **how: Any) -> None:
        """`how`: what else `zerofn.compile` is told."""
        import zerofn

        init_state, step = train_step(work, num_microbatches)
        torch.manual_seed(SEED)
        self.state, self.compiled = zerofn.shard(init_state, stage=stage), zerofn.compile(step, **how)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.state, metrics = self.compiled(self.state, tokens)
        return metrics["loss"]

    def state_tensors(self) -> list[torch.Tensor]:
        """All the state keeps alive: shards, moments, the gathered copies of stages 1 and 2."""
        return measure.reachable_tensors(self.state)


def zerofn_row(stage: int, num_microbatches: int = 1, **how: Any) -> Callable[[Workload, int, int], Row]:
    def build(work: Workload, rank: int, world: int) -> Row:
        compiled = Compiled(work, stage, num_microbatches, **how)
        return Row(compiled, compiled.state_tensors)

    return build


ROWS: dict[str, Callable[[Workload, int, int], Row]] = {
    **{f"ZeroFn {k}": zerofn_row(k) for k in range(4)},
    "ZeroFn 3, compiled": zerofn_row(3, backend="inductor"),
}
# The batch in microbatches: for what they send, which grows with their number, by stage.
ACCUMULATING: dict[str, Callable[[Workload, int, int], Row]] = {
    f"ZeroFn {k} of {NUM_MICROBATCHES} microbatches": zerofn_row(k, NUM_MICROBATCHES) for k in (1, 2, 3)
}

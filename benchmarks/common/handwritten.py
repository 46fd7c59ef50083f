"""The loop a person would write by hand: functional_call, autograd.grad, one fused AdamW call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Workload

Step = Callable[[torch.Tensor], torch.Tensor]


class Handwritten:
    """One process, no ranks. `step(tokens)` trains on `tokens` (batch, seq), returns the loss."""

    def __init__(self, work: Workload) -> None:
        self.model = work.build()
        self.params = {n: p.detach().requires_grad_() for n, p in self.model.named_parameters()}
        for parameter in self.model.parameters():  # the call replaces them: no second copy
            parameter.data = torch.empty(0)
        self.leaves = list(self.params.values())
        self.first = [torch.zeros_like(p) for p in self.leaves]
        self.second = [torch.zeros_like(p) for p in self.leaves]
        self.counts = [torch.zeros(()) for _ in self.leaves]

    def gradients(self, tokens: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        inputs = {"input_ids": tokens, "labels": tokens}
        out = torch.func.functional_call(self.model, self.params, (), inputs)
        return out.loss.detach(), torch.autograd.grad(out.loss, self.leaves)

    @torch.no_grad()
    def update(self, grads: tuple[torch.Tensor, ...]) -> None:
        torch.ops.aten._foreach_add_.Scalar(self.counts, 1)
        torch.ops.aten._fused_adamw_.default(
            self.leaves, list(grads), self.first, self.second, [], self.counts,
            lr=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], weight_decay=WEIGHT_DECAY, eps=EPS,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        loss, grads = self.gradients(tokens)
        self.update(grads)
        return loss

    def on_global_batch(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """A step on the mean of all ranks' parts: what every data-parallel row must equal."""
        pairs = [self.gradients(part) for part in parts]
        columns = zip(*(grads for _, grads in pairs), strict=True)
        self.update(tuple(torch.stack(column).mean(0) for column in columns))
        return torch.stack([loss for loss, _ in pairs]).mean()

    def state_tensors(self) -> list[torch.Tensor]:
        return self.leaves + self.first + self.second

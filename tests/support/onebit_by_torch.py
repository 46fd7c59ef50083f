"""1-bit optimizers by plain torch, after the papers: workers and a server in one process, no file of ZeroFn's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCK = 2048  # elements with one scale


@dataclass(frozen=True)
class Place:
    """Where leaves lie in a flat buffer, in which blocks have a scale each: name -> (offset, shape)."""

    offsets: dict[str, tuple[int, torch.Size]]
    size: int

    def flat(self, leaves: dict[str, Tensor]) -> Tensor:
        """One buffer with the leaves, and zeros between them."""
        out = torch.zeros(self.size, dtype=next(iter(leaves.values())).dtype)
        for name, (offset, shape) in self.offsets.items():
            out[offset : offset + shape.numel()] = leaves[name].detach().reshape(-1)
        return out

    def leaves(self, flat: Tensor) -> dict[str, Tensor]:
        """The leaves of a buffer."""
        return {name: flat[a : a + shape.numel()].view(shape) for name, (a, shape) in self.offsets.items()}


def places_of(layout: Any) -> list[Place]:
    """The places of a state's parameters, for which blocks are cut."""
    each = [({x.name: (x.offset, torch.Size(x.whole)) for x in unit.leaves}, unit.size) for unit in layout.units]
    return [Place(*x) for x in each]


def signs(x: Tensor, place: Place) -> Tensor:
    """Plus or minus the mean magnitude of a block, as bfloat16 has it; what lies between leaves stays zero."""
    inside = place.flat({name: torch.ones(shape) for name, (_, shape) in place.offsets.items()}).view(-1, BLOCK)
    blocks = x.view(-1, BLOCK)
    scale = (blocks.abs() * inside).sum(1, keepdim=True) / inside.sum(1, keepdim=True).clamp(min=1)
    scale = scale.float().bfloat16().to(x.dtype)
    return (torch.where(blocks < 0, -scale, scale) * inside).view(-1)


@dataclass
class OneBitAdam:
    """Algorithm 1 of Tang et al. 2021 for a flat buffer, with a warm-up of Adam, bias correction and decoupled decay;
    with other exact steps that of Lu et al. 2022, if all workers meet in every step.

    Workers' parts are divided by their number before they are compressed, so that the server adds them.
    """

    place: Place
    num: int
    rate: float
    exact: Callable[[int], bool]  # whether the step behind so many updates sends gradients as they are
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    count: int = 0
    values: dict[str, Any] = field(default_factory=dict)

    def step(self, x: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """The next parameters, of the gradients of workers, each of its own mean loss."""
        if not self.values:
            zeros = torch.zeros_like(x)
            self.values = {"m": zeros, "v": zeros, "server": zeros, "workers": [zeros] * self.num, "updates of v": 0}
        now, place = self.values, self.place
        self.count += 1
        if self.exact(self.count - 1):
            now["updates of v"] += 1
            g = sum(gradients) / self.num
            now["m"] = self.b1 * now["m"] + (1 - self.b1) * g
            now["v"] = self.b2 * now["v"] + (1 - self.b2) * g * g
        else:
            if self.num > 1:  # all go on from signs, as they are but behind an exact step
                coded = signs(now["m"], place)
                now["server"] = now["server"] + self.b1 * (now["m"] - coded)
                now["m"] = coded
            self._compressed(gradients)
        m = now["m"] / (1 - self.b1**self.count)
        v = now["v"] / (1 - self.b2 ** now["updates of v"])
        update = torch.where(now["v"] > 0, m / (v.sqrt() + self.eps), 0.0)
        return x - self.rate * (update + self.decay * x)

    def _compressed(self, gradients: Sequence[Tensor]) -> None:
        now, place = self.values, self.place
        parts = [(self.b1 * now["m"] + (1 - self.b1) * g) / self.num for g in gradients]
        if self.num == 1:
            now["m"] = parts[0]
            return
        sent = [part + error for part, error in zip(parts, now["workers"], strict=True)]
        arrived = [signs(x, place) for x in sent]
        now["workers"] = [x - y for x, y in zip(sent, arrived, strict=True)]
        total = sum(arrived) + now["server"]
        now["m"] = signs(total, place)
        now["server"] = total - now["m"]


def trained(
    model: torch.nn.Module,
    layout: Any,
    optimizer: Callable[[Place], Any],
    gradients: Callable[[torch.nn.Module, int], list[tuple[Tensor, list[Tensor]]]],
    steps: int,
) -> tuple[list[Tensor], dict[str, Tensor], list[Any]]:
    """(Mean losses, parameters, optimizers) of a run. `gradients(model, step)`: (loss, gradients) of each worker."""
    names = [name for name, _ in model.named_parameters()]
    optimizers = [optimizer(place) for place in places_of(layout)]
    losses = []
    for k in range(steps):
        found = gradients(model, k)
        losses.append(sum(loss for loss, _ in found) / len(found))
        with torch.no_grad():
            now = dict(model.named_parameters())
            for each in optimizers:
                grads = [each.place.flat(dict(zip(names, g, strict=True))) for _, g in found]
                for name, x in each.place.leaves(each.step(each.place.flat(now), grads)).items():
                    now[name].copy_(x)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, optimizers


@dataclass
class OneBitLamb(OneBitAdam):
    """Algorithm 1 of Li et al. 2021 on top, without scaled momenta."""

    def step(self, x: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """The next parameters."""
        exact = self.exact(self.count)
        before = self.values.get("m", torch.zeros_like(x))
        super().step(x, gradients)
        now, averages = self.values, self.values.setdefault("averages", {})
        if exact:
            now["fresh"] = now["v"]
        else:
            implied = (now["m"] - self.b1 * before) / (1 - self.b1)
            now["fresh"] = self.b2 * now["fresh"] + (1 - self.b2) * implied * implied
        frozen = (now["v"] / (1 - self.b2 ** now["updates of v"])).sqrt() + self.eps
        fresh = (now["fresh"] / (1 - self.b2**self.count)).sqrt() + self.eps
        seen = now["v"] > 0
        direction = torch.where(seen, now["m"] / (1 - self.b1**self.count) / frozen, 0.0)
        leaves = [self.place.leaves(y) for y in (x, direction, torch.where(seen, frozen / fresh, 0.0))]
        out = x.clone()
        for name, (p, d, ratio) in {k: [y[k] for y in leaves] for k in leaves[0]}.items():
            u = d + self.decay * p
            average, last = averages.get(name, (0.0, 1.0))
            if exact:
                coefficient = float((p.norm() / u.norm()).clamp(0.01, 10.0))
                averages[name] = 0.9 * average + 0.1 * coefficient, 1.0
            else:
                share = min(1.0, float(d.norm() / u.norm()))
                r = min(max(float(ratio.max()) * share + 1 - share, 0.5), 4.0)
                r = min(max(r, last * 0.9), last * 1.1)
                averages[name] = average, r
                coefficient = r * average / (1 - 0.9 ** now["updates of v"])
            self.place.leaves(out)[name].sub_(self.rate * coefficient * u)
        return out

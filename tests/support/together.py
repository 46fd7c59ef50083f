"""One training with any features together, beside plain torch: which cases there are, and what each one trains.

The cases are a cover: any two features that go together are in one of them. `features_page.py` makes a page of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.func import functional_call

import zerofn
from tests.support.replayed import replayed
from tests.support.small_steps import apart, fake_ranks
from zerofn import optim

STEPS, ROWS, TOKENS, RATE, MOMENTUM = 2, 8, 16, 0.1, 0.9
AXES = ("data", "replicate", "context", "tensor", "expert", "pipe")
SHARDING = {"data", "context", "expert"}  # the axes over which units are cut into shards
SENDING = {"data", "replicate", "context", "expert"}  # along which gradients travel, in the form of `wire`
SMALL_WIRE = {"block": 128, "smallest": 0}  # this model's leaves are small


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained with. None and False are what nobody has asked for. `optimizer`, `params`: their tiers.

    `axes`: of two ranks each, as one text, so that a case is one line in a log.
    """

    axes: str
    stage: int
    optimizer: str | None = None
    params: str | None = None
    hpz: bool = False
    precision: str | None = None
    accumulate: bool = False
    remat: str | None = None
    wire: str | None = None
    backend: str = "eager"

    @property
    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.axes.split(), 2)

    @property
    def num_ranks(self) -> int:
        return 2 ** len(self.sizes)

    @property
    def features(self) -> list[Feature]:
        """All that the case has. On a mesh without shards all stages are the same, so that none counts."""
        found = [Feature("mesh", axis) for axis in self.sizes]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default and (field.name != "stage" or SHARDING & set(self.sizes)):
                found.append(Feature(field.name, field.name if value is True else str(value)))
        return found

    def __str__(self) -> str:
        return ", ".join(map(str, self.features))


class Feature(NamedTuple):
    """A value of one of a case's fields."""

    group: str
    value: str

    def __str__(self) -> str:
        return self.value if self.value == self.group else f"{self.group} {self.value}"


VALUES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "optimizer": (None, "cpu", "nvme"),
    "params": (None, "cpu", "nvme"),
    "hpz": (False, True),
    "precision": (None, "bf16", "fp16", "fp8"),
    "accumulate": (False, True),
    "remat": (None, "full", "auto"),
    "wire": (None, "bf16", "fp8", "int8", "feedback"),
    "backend": ("eager", "inductor", "graphs"),
}
WIRES: dict[str, Any] = {
    "bf16": "bf16",
    "fp8": zerofn.Wire(gather="fp8", reduce="fp8", **SMALL_WIRE),
    "int8": zerofn.Wire(gather="int8", reduce="int8", **SMALL_WIRE),
    "feedback": zerofn.Wire(reduce="int8", feedback=True, **SMALL_WIRE),
}
# How far parameters may be from plain torch's, see `distance`: about twice what was seen. A sum that is left out, or
# done twice, is at 0.3 and more.
EXACT = 1e-6
ROUNDS = {
    Feature("precision", "fp16"): 0.002,
    Feature("precision", "bf16"): 0.02,
    Feature("precision", "fp8"): 0.08,
    Feature("wire", "bf16"): 0.01,
    Feature("wire", "fp8"): 0.08,
    Feature("wire", "int8"): 0.02,
    Feature("wire", "feedback"): 0.02,
}
FEATURES = [
    *(Feature("stage", str(x)) for x in VALUES["stage"]),
    *(Feature("mesh", axis) for axis in AXES),
    *(Feature(k, k if x is True else str(x)) for k, xs in VALUES.items() if k != "stage" for x in xs[1:]),
]


# --- the training ---------------------------------------------------------------------------------


def build() -> Any:
    """A Mixtral whose tokens use all experts: rounding cannot choose other ones."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=2, num_experts_per_tok=2, max_position_embeddings=TOKENS,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return transformers.MixtralForCausalLM._from_config(config, attn_implementation="eager")


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 64, (ROWS, TOKENS), generator=draw) for _ in range(STEPS)]
    return [{"input_ids": x, "labels": x} for x in rows]


class Trained(NamedTuple):
    losses: list[float]
    params: dict[str, Tensor]


@cache
def by_torch() -> Trained:
    """Plain torch on the global batch, in float32."""
    model, losses = build(), []
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {k: x.detach() for k, x in model.named_parameters()})


def trained(case: Case, folder: str | None = None) -> Trained:
    """The same training with the features of a case; every rank calls it. `folder`: for what lies on drives."""
    with contextlib.ExitStack() as inside:
        if case.backend == "graphs":  # no GPU records here: a stand-in repeats calls with their addresses and numbers
            inside.enter_context(replayed())
            case = dataclasses.replace(case, backend="eager")
        if "cpu" in (case.optimizer, case.params):  # no GPU either: the host's memory counts as apart from the model's
            apart(inside.enter_context(pytest.MonkeyPatch.context()), 0.5)
        return _trained(case, folder)


def _trained(case: Case, folder: str | None) -> Trained:
    mesh, model = zerofn.Mesh.make(**case.sizes), zerofn.skeleton(build)
    cuts = zerofn.parallel.tensor(model, mesh) if "tensor" in case.sizes else {}
    if "expert" in case.sizes:
        cuts |= zerofn.moe.experts(model, mesh)
    if "context" in case.sizes:
        zerofn.parallel.context(model, mesh)

    def own(batch: Any) -> Any:
        rows = {k: x.chunk(mesh.rows.size)[mesh.rows.rank] for k, x in batch.items()}
        return zerofn.parallel.split_sequence(rows, mesh) if "context" in case.sizes else rows

    def loss_fn(params: Any, batch: Any) -> Any:
        return functional_call(model, params, (), batch).loss

    def train_step(state: Any, batch: Any) -> Any:
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, 2) if case.accumulate else vg)(batch)
        return state.apply_gradients(grads), loss

    mine = [own(batch) for batch in batches()]
    if "pipe" in case.sizes:
        cuts = zerofn.parallel.pipe(model, mesh, loss_fn, mine[0], schedule="1f1b", cuts=cuts)
    state = zerofn.shard(init_state, mesh=mesh, cuts=cuts or None, **options(case, folder))
    step, losses = zerofn.compile(train_step, remat=case.remat, backend=case.backend), []
    for batch in mine:
        state, loss = step(state, batch)
        losses.append(loss.item())
    return Trained(losses, zerofn.unshard(state).params)


def init_state() -> Any:
    scale = zerofn.StaticLossScale(2.0**10)  # one of fp16's own could leave a step out
    return zerofn.TrainState.create(
        params=dict(build().named_parameters()), tx=optim.sgd(RATE, MOMENTUM), loss_scale=scale
    )


def options(case: Case, folder: str | None = None) -> dict[str, Any]:
    """What `shard` is asked for."""
    on_drives = folder if "nvme" in (case.optimizer, case.params) else None
    offload = zerofn.Offload(case.optimizer, case.params, on_drives) if case.optimizer or case.params else None
    wire = WIRES.get(case.wire or "")
    return {"stage": case.stage, "precision": case.precision, "offload": offload, "hpz": case.hpz, "wire": wire}


def limit(case: Case) -> float:
    """How far a case may be from plain torch."""
    return sum((ROUNDS.get(x, 0.0) for x in case.features), EXACT)


def distance(found: Trained, expected: Trained) -> float:
    """How far parameters are from the expected ones, relative to how far those have moved: 1 if nothing was trained."""
    start = dict(build().named_parameters())
    gap = sum((found.params[k] - x).square().sum() for k, x in expected.params.items())
    moved = sum((start[k].detach() - x).square().sum() for k, x in expected.params.items())
    return float((gap / moved).sqrt())


# --- the cases ------------------------------------------------------------------------------------


def goes_together(case: Case) -> bool:
    """Whether a case is none of those that are refused, and all that it asks for has an effect."""
    axes = set(case.sizes)
    return (
        (case.accumulate or "pipe" not in axes)  # a pipeline runs microbatches
        and (not case.hpz or case.stage == 3 and "replicate" in axes and bool(axes & SHARDING))
        and (not case.params or case.stage not in (1, 2) and not case.hpz)  # there a copy of them is gathered
        and (not case.wire or bool(axes & SENDING))
        and (case.wire != "feedback" or "expert" not in axes)
        and (case.hpz or len(axes) == 2)
    )


def drawn(draw: random.Random) -> Case:
    """A case that goes together, with two axes, or three with hpz, which needs two itself."""
    while True:
        axes = " ".join(draw.sample(AXES, draw.choice((2, 2, 3))))
        case = Case(axes, **{k: draw.choice(xs) for k, xs in VALUES.items()})
        if goes_together(case):
            return case


Pair = frozenset[Feature]


def pairs_of(features: Iterable[Feature]) -> set[Pair]:
    """Any two of the features that may be together: two axes, or values of different fields."""
    return {frozenset(x) for x in itertools.combinations(features, 2) if x[0].group != x[1].group or "mesh" in x[0]}


def covered(case: Case) -> set[Pair]:
    """The pairs that a case is counted for. What computes and sends float32 is one more feature: each of the others is
    also compared without the rounding of half precision, under which small errors could hide.
    """
    exact = [Feature("exact", "exact")] if case.precision is case.wire is None else []
    return pairs_of([*case.features, *exact])


def cost(case: Case) -> float:
    """How long a case takes beside others."""
    return case.num_ranks * (2 if case.backend == "inductor" else 1)


@cache
def cover() -> tuple[Case, ...]:
    """A few cases, in which all pairs are that any case has: always the one with most new pairs for what it costs."""
    draw, number, found = random.Random(0), {}, []
    masks = {
        case: sum(1 << number.setdefault(pair, len(number)) for pair in covered(case))
        for case in (drawn(draw) for _ in range(1500))
    }
    left = (1 << len(number)) - 1
    while left:
        found.append(max(masks, key=lambda case: (left & masks[case]).bit_count() / cost(case)))
        left &= ~masks[found[-1]]
    return tuple(found)


# Of each pair that is refused a case, with the features that it needs otherwise.
REFUSED: dict[Pair, Case] = {
    frozenset((FEATURES[stage], Feature("hpz", "hpz"))): Case("replicate data", stage, hpz=True) for stage in (0, 1, 2)
}
REFUSED |= {
    frozenset((other, Feature("params", tier))): Case("replicate data", stage, params=tier, hpz=stage == 3)
    for tier in ("cpu", "nvme")
    for stage, other in ((1, FEATURES[1]), (2, FEATURES[2]), (3, Feature("hpz", "hpz")))
}
REFUSED[frozenset((Feature("mesh", "expert"), Feature("wire", "feedback")))] = Case("expert", 3, wire="feedback")


def refusal(case: Case) -> str:
    """What `shard` says, on ranks that need not be there."""
    with fake_ranks(case.num_ranks):
        try:
            zerofn.shard(init_state, mesh=zerofn.Mesh.make(**case.sizes), **options(case))
        except (ValueError, NotImplementedError) as error:
            return str(error)
    raise AssertionError(f"{case} is not refused")

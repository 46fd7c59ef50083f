"""What is measured on throttled links: by ZeroFn with and without codecs, and by the systems beside it.

A builder takes `(work, rank, world)` and returns a `Row`, whose step takes this rank's own tokens. To add a row, add it
to `PEERS` or `ZEROFN`: all else follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.peers import Row, adamw, ddp, deepspeed, fsdp2, state_of, train_once
from benchmarks.common.workload import SEED, Workload
from benchmarks.common.zerofn_rows import Compiled, train_step
from benchmarks.wire.curves import PLAIN, POWER_SGD, RANK_OF_MATRICES, SIGNS, SIGNS_AFTER_INT8

Builder = Callable[[Workload, int, int], Row]
Ddp = torch.nn.parallel.DistributedDataParallel

FIRST_COMPRESSED = 2  # the first step that its hook takes, 1-bit Adam, and DiLoCo; training takes more as they are


def in_ddp(module: torch.nn.Module) -> Ddp:
    """DDP as its documentation says."""
    return Ddp(module, gradient_as_bucket_view=True)


def in_bf16(module: torch.nn.Module) -> Ddp:
    """DDP whose hook sends gradients in bfloat16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return bf16_compress_hook(group, bucket)  # under its own name DDP refuses it for gloo, which can sum bfloat16

    hook.__annotations__.clear()  # these are texts here, and DDP compares them with types
    model = in_ddp(module)
    model.register_comm_hook(dist.group.WORLD, hook)
    return model


def in_power_sgd(module: torch.nn.Module, first: int = FIRST_COMPRESSED) -> Ddp:
    """DDP whose hook sends matrices of low rank, from step `first` on."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    # In one bucket: each bucket has three transfers in a row, which several buckets start in an order of their own on
    # each rank, and gloo then takes one for another.
    model = Ddp(module, gradient_as_bucket_view=True, bucket_cap_mb=1 << 14)
    how = {"matrix_approximation_rank": RANK_OF_MATRICES, "start_powerSGD_iter": first}
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **how), powerSGD_hook.powerSGD_hook)
    return model


def hooked(wrap: Callable[[torch.nn.Module], Ddp]) -> Builder:
    """DDP with a communication hook."""

    def build(work: Workload, rank: int, world: int) -> Row:
        model = wrap(work.build())
        optimizer = adamw(model.parameters())
        return Row(train_once(model, optimizer), lambda: state_of(model, optimizer))

    return build


PEERS: dict[str, Builder] = {
    PLAIN: ddp,
    "DDP, bf16 hook": hooked(in_bf16),
    POWER_SGD: hooked(in_power_sgd),
    "FSDP2": fsdp2(True),
    "DeepSpeed ZeRO++": deepspeed(3, zero_quantized_weights=True, zero_quantized_gradients=True),
}


@dataclass(frozen=True)
class Way:
    """How ZeroFn's ranks send. `wire`: what `shard` is told, a word or the arguments of a `zerofn.Wire`. `every`: after
    how many steps ranks that train apart meet, by `zerofn.diloco`; 0 where they train together. `signs`: whether AdamW
    is 1-bit Adam.
    """

    stage: int = 3
    wire: str | dict[str, Any] | None = None
    every: int = 0
    signs: bool = False

    def applied(self, init_state: Any, train_step: Any, first: int) -> tuple[Callable[[], Any], Any]:
        """What makes the state, and the step to compile. `init_state`: what `zerofn.shard` takes. `first`: the step
        from which on 1-bit Adam sends signs, and replicas train apart.
        """
        import zerofn

        wire = zerofn.Wire(**self.wire) if isinstance(self.wire, dict) else self.wire
        if self.every:
            shard = partial(zerofn.shard, stage=self.stage, mesh=zerofn.Mesh.make(replicate=dist.get_world_size()))
            step = zerofn.diloco(train_step, every=self.every, after=first, wire=wire)
            return lambda: step.init(shard(init_state)), step
        init = partial(_by_signs, init_state, first) if self.signs else init_state
        return partial(zerofn.shard, init, stage=self.stage, wire=wire), train_step

    def planned(self, plan: Any) -> float:
        """The bytes that a rank sends in a step, on average where ranks meet seldom."""
        return sum(plan.sent_along.values()) / self.every if self.every else plan.sent


def _by_signs(init_state: Callable[[], Any], freeze_step: int) -> Any:
    """A state whose AdamW, perhaps the last in a chain, has become 1-bit Adam."""
    from zerofn import optim

    state = init_state()
    last = state.tx.about.args[-1] if state.tx.about.name == "chain" else state.tx
    tx = optim.onebit_adam(*last.about.args[:-1], freeze_step=freeze_step)
    if last is not state.tx:
        tx = optim.chain(*state.tx.about.args[:-1], tx)
    return state.replace(tx=tx, opt_state=tx.init(state.params))


ZEROFN = {
    "ZeroFn 3": Way(),
    "ZeroFn 3, bf16": Way(wire="bf16"),
    "ZeroFn 3, fp8": Way(wire="fp8"),
    "ZeroFn 3, int8": Way(wire="int8"),
    "ZeroFn 3, int4 / int8": Way(wire={"gather": "int4", "reduce": "int8"}),
    "ZeroFn 1, int8": Way(stage=1, wire="int8"),
    SIGNS: Way(stage=0, signs=True),
    "ZeroFn, DiLoCo 10": Way(every=10),
    "ZeroFn, DiLoCo 50": Way(every=50),
}
# And what only quality.py trains
WAYS = ZEROFN | {SIGNS_AFTER_INT8: Way(stage=1, wire="int8", signs=True)}


class Coded(Compiled):
    """A row of ZeroFn's."""

    def __init__(self, name: str, work: Workload) -> None:
        import zerofn

        init_state, step = train_step(work)
        begin, step = ZEROFN[name].applied(init_state, step, FIRST_COMPRESSED)
        torch.manual_seed(SEED)
        self.state, self.compiled = begin(), zerofn.compile(step)


def every_of(row: str) -> int:
    """After how many steps a row's ranks meet; 0 where they train together."""
    return ZEROFN[row].every if row in ZEROFN else 0

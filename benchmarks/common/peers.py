"""One function a system: the same model, tokens and AdamW, set up as its documentation says.

Each takes `(work, rank, world)` and returns a `Row`. torch.distributed is initialised already.
Imports stand inside the functions because no environment holds every system. A trial run finds
out what each imports, and the measured runs import it before memory is first read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.common.handwritten import Handwritten, Step
from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Workload


@dataclasses.dataclass(frozen=True)
class Row:
    """`step(tokens)` trains once and returns the loss; `state()` lists the persistent tensors."""

    step: Step
    state: Callable[[], Iterable[torch.Tensor]]


ADAMW = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "fused": True}


def adamw(params: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **ADAMW)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, what the optimizer updates (masters, where it has its own) and its moments.

    Gradients and communication buffers are not counted, for no system. Storages are counted once,
    so parameters that the optimizer updates directly are not counted twice.
    """
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [value for entry in optimizer.state.values() for value in entry.values()]
    return [*model.parameters(), *updated, *filter(torch.is_tensor, entries)]


def train_once(model: torch.nn.Module, optimizer: Any, clear: Any = None) -> Step:
    """The usual loop body; gradients are dropped by `clear`, else by the optimizer."""
    owner = clear or optimizer

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        owner.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def one_process(work: Workload, rank: int, world: int) -> Row:
    loop = Handwritten(work)
    return Row(loop, loop.state_tensors)


def ddp(work: Workload, rank: int, world: int) -> Row:
    # gradient_as_bucket_view spares a copy of every gradient; it is DDP's lean setting.
    model = torch.nn.parallel.DistributedDataParallel(work.build(), gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())
    return Row(train_once(model, optimizer), lambda: state_of(model, optimizer))


def zero_redundancy(work: Workload, rank: int, world: int) -> Row:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(work.build(), gradient_as_bucket_view=True)
    params = model.parameters()
    optimizer = ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW, **ADAMW)
    return Row(train_once(model, optimizer), lambda: state_of(model, optimizer.optim))


def shard_layers(work: Workload, model: torch.nn.Module, mesh: Any, **how: Any) -> None:
    """Wrap the layers one by one, and the model, as FSDP2's users do. `how`: what the layers are told."""
    from torch.distributed.fsdp import fully_shard

    for layer in work.blocks(model):
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(model, mesh=mesh)


def fsdp2(reshard: bool, compiled: bool = False) -> Callable[[Workload, int, int], Row]:
    """With `reshard_after_forward` of the layers, which is true by default; the root keeps its own until it ends.
    `compiled`: layer by layer, before they are wrapped, as torchtitan does.
    """

    def build(work: Workload, rank: int, world: int) -> Row:
        from torch.distributed.device_mesh import init_device_mesh

        model = work.build()
        for layer in work.blocks(model) if compiled else ():
            layer.compile()
        shard_layers(work, model, init_device_mesh("cpu", (world,)), reshard_after_forward=reshard)
        optimizer = adamw(model.parameters())
        return Row(train_once(model, optimizer), lambda: state_of(model, optimizer))

    return build


def fairscale(work: Workload, rank: int, world: int) -> Row:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    inner = work.build()
    optimizer = OSS(inner.parameters(), optim=torch.optim.AdamW, **ADAMW)
    model = ShardedDataParallel(inner, optimizer)
    # The wrapper must clear: gradients it buckets are views, which the optimizer would cut off.
    return Row(train_once(model, optimizer, clear=model), lambda: state_of(inner, optimizer.optim))


def deepspeed(stage: int, **more: Any) -> Callable[[Workload, int, int], Row]:
    """`more`: keys beside the stage."""

    def build(work: Workload, rank: int, world: int) -> Row:
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": work.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # its default of 1.0 would be other arithmetic than the rest
            "zero_optimization": {"stage": stage} | more,
            "steps_per_print": 10**9,
        }
        model = work.build()
        optimizer = adamw(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()

        def state() -> list[torch.Tensor]:
            # At stage 3 a parameter's shard hangs on it, and the optimizer's groups point at a
            # sub-group of the masters only while it is updated.
            shards = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
            masters = list(getattr(engine.optimizer, "fp32_partitioned_groups_flat", ()))
            return shards + masters + state_of(engine.module, engine.optimizer.optimizer)

        return Row(step, state)

    return build


PEERS: dict[str, Callable[[Workload, int, int], Row]] = {
    "one process": one_process,
    "DDP": ddp,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "FSDP2": fsdp2(True),
    "FSDP2, compiled": fsdp2(True, compiled=True),
    "FairScale": fairscale,
    "DeepSpeed 1": deepspeed(1),
    "DeepSpeed 2": deepspeed(2),
    "DeepSpeed 3": deepspeed(3),
}
# What memory.py measures beside them: units stay gathered from the forward to the backward pass.
KEEPING: dict[str, Callable[[Workload, int, int], Row]] = {"FSDP2, kept": fsdp2(False)}

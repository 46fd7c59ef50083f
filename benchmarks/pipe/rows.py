"""The same training in pipelines: by ZeroFn, by torch.distributed.pipelining, and by DeepSpeed's engine.

A row's builder takes `(work, rank, world)` and returns a `Row`, whose step takes the tokens [B, S] of all ranks. Its
loss is NaN on a rank that has none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import measure
from benchmarks.common.peers import Row, adamw, state_of
from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, SEED, SMALL, SMOKE, WEIGHT_DECAY, Workload
from benchmarks.mesh.rows import Builder, reference

MICROBATCHES = 8  # of one row
# The mesh benchmark's Llama, with as many rows a rank as give each pipeline of two ranks its microbatches.
WORKLOADS = {"small": dataclasses.replace(SMALL, batch=4), "smoke": dataclasses.replace(SMOKE, layers=6, batch=4)}


def zerofn_in(schedule: str, data: int = 1, stage: int = 3, reduce: str | None = None, **compiles: Any) -> Builder:
    """As a user writes it: stages are chosen by `zerofn.parallel.pipe`. `reduce`: as of `zerofn.accumulate`.
    `compiles`: as of `zerofn.compile`.
    """

    def build(work: Workload, rank: int, world: int) -> Row:
        held, compiled, own = begun(work, schedule, world // data, data, stage, reduce=reduce, **compiles)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            held[0], loss = compiled(held[0], own(tokens))
            return loss

        return Row(step, lambda: measure.reachable_tensors(held[0]))

    return build


def begun(
    work: Workload,
    schedule: str,
    ranks: int,
    data: int = 1,
    stage: int = 3,
    microbatches: int = MICROBATCHES,
    reduce: str | None = None,
    **compiles: Any,
) -> tuple[list[Any], Any, Callable[[torch.Tensor], torch.Tensor]]:
    """([first state], compiled step, what gives a rank its rows of all ranks' tokens)."""
    import zerofn

    mesh = zerofn.Mesh.make(pipe=ranks, data=data)
    model = zerofn.skeleton(work.module)

    def loss_fn(params: Any, tokens: Any) -> Any:
        batch = {"input_ids": tokens, "labels": tokens}
        return torch.func.functional_call(model, params, (), batch).loss

    def init_state() -> Any:
        params = dict(work.module().named_parameters())
        tx = zerofn.optim.adamw(LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY)
        return zerofn.TrainState.create(params=params, tx=tx)

    def train_step(state: Any, tokens: Any) -> Any:
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), microbatches, reduce=reduce)(tokens)
        return state.apply_gradients(grads), loss

    one = torch.zeros(1, work.seq, dtype=torch.long)
    cuts = zerofn.parallel.pipe(model, mesh, loss_fn, one, schedule=schedule, microbatches=microbatches)
    torch.manual_seed(SEED)
    held = [zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts)]
    compiled = zerofn.compile(train_step, **compiles)
    return held, compiled, lambda tokens: tokens.chunk(mesh.rows.size)[mesh.rows.rank]


class Part(torch.nn.Module):
    """Layers of a Llama, with its embedding before the first ones, and norm and head behind the last. The tables of the
    rotary embedding, which its own forward pass makes for all layers, are there once and for all.
    """

    def __init__(self, work: Workload, model: Any, first: int, last: int) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if first == 0 else None
        self.layers = model.model.layers[first:last]
        ends = last == work.layers
        self.norm, self.head = (model.model.norm, model.lm_head) if ends else (None, None)
        with torch.no_grad():
            x = torch.zeros(1, work.seq, work.hidden)
            self.tables = model.model.rotary_emb(x, position_ids=torch.arange(work.seq)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=self.tables)
        return x if self.head is None else self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of a microbatch, as the model's own."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def torch_in(schedule: str, chunks: int = 1, data: int = 1, compiled: bool = False) -> Builder:
    """`PipelineStage`s of equally many layers, and `fully_shard` along the other axis if it has several ranks. Units
    stay gathered while microbatches pass, as torchtitan has it: else each would gather them twice. `compiled`: layer by
    layer, before they are wrapped, as torchtitan does.
    """

    def build(work: Workload, rank: int, world: int) -> Row:
        import torch.distributed.pipelining as pipelining
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        ranks = world // data
        mesh = init_device_mesh("cpu", (ranks, data), mesh_dim_names=("pipe", "data"))
        place, num = mesh["pipe"].get_local_rank(), ranks * chunks
        mine = [place] + [2 * ranks - 1 - place if "ZBV" in schedule else place + ranks] * (chunks - 1)
        model, parts = work.build(), torch.nn.ModuleList()
        for stage in mine:
            part = Part(work, model, stage * work.layers // num, (stage + 1) * work.layers // num)
            for layer in part.layers if compiled else ():
                layer.compile()
            if data > 1:
                for layer in part.layers:
                    fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
                fully_shard(part, mesh=mesh["data"], reshard_after_forward=False)
            parts.append(part)
        del model
        group, device = mesh.get_group("pipe"), torch.device("cpu")
        stages = [
            pipelining.PipelineStage(part, stage, num, device, group=group)
            for part, stage in zip(parts, mine, strict=True)
        ]
        order: Any = getattr(pipelining, schedule)
        run = order(stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=next_token_loss)
        optimizer = adamw(parts.parameters())
        first, last = 0 in mine, num - 1 in mine

        def step(tokens: torch.Tensor) -> torch.Tensor:
            own = tokens.chunk(data)[rank % data]
            losses: list[torch.Tensor] = []
            target = {"target": own, "losses": losses} if last else {}
            run.step(*([own] if first else []), **target, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return torch.stack(losses).mean().detach() if losses else torch.tensor(torch.nan)

        return Row(step, lambda: state_of(parts, optimizer))

    return build


def deepspeed_pipeline(work: Workload, rank: int, world: int) -> Row:
    """Its `PipelineEngine`, which runs 1F1B, with a `PipelineModule` of the same layers."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    model = work.build()
    ends = [0, *range(1, work.layers), work.layers]
    layers = [Part(work, model, a, b) for a, b in zip(ends, ends[1:], strict=False)]
    module = PipelineModule(layers, num_stages=world, loss_fn=next_token_loss, partition_method="uniform")
    del model, layers
    optimizer = adamw(module.parameters())
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        rows: Iterator[Any] = ((row, row) for row in tokens.chunk(MICROBATCHES))
        return engine.train_batch(rows).detach()

    return Row(step, lambda: state_of(engine.module, engine.optimizer))


TORCH: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "Schedule1F1B"},
    "interleaved": {"schedule": "ScheduleInterleaved1F1B", "chunks": 2},
    "ZBV": {"schedule": "ScheduleZBVZeroBubble", "chunks": 2},
}
# Once more with compiled layers, of which zero-bubble schedules cannot take the backward pass apart.
TORCH |= {f"{name}, compiled": TORCH[name] | {"compiled": True} for name in ("1F1B", "ZBV")}
# What torch's rows do along the other axis: memory for gathered units, and one reduce-scatter a step.
KEPT: dict[str, Any] = {"memory": "400MB", "reduce": "step"}
# ranks -> system -> builder
PEERS: dict[int, dict[str, Builder]] = {
    2: {f"torch, {name}": torch_in(**what) for name, what in TORCH.items()} | {"DeepSpeed, 1F1B": deepspeed_pipeline},
    4: {f"torch, {name} x FSDP2": torch_in(**what, data=2) for name, what in TORCH.items()},
}
ZEROFN: dict[int, dict[str, Builder]] = {
    2: {f"ZeroFn, {name}": zerofn_in(name) for name in ("1f1b", "interleaved", "zbv", "auto")}
    | {f"ZeroFn, {name}, compiled": zerofn_in(name, backend="inductor") for name in ("1f1b", "auto")}
    | {"ZeroFn, 1f1b, compiled, in 280 MB": zerofn_in("1f1b", backend="inductor", memory="280MB")},
    4: {
        "ZeroFn, auto x stage 3, units kept": zerofn_in("auto", 2, **KEPT),
        "ZeroFn, 1f1b x stage 3, units kept, compiled": zerofn_in("1f1b", 2, **KEPT, backend="inductor"),
        "ZeroFn, auto x stage 3, units kept, compiled": zerofn_in("auto", 2, **KEPT, backend="inductor"),
    },
}


@functools.cache
def builders() -> dict[str, Builder]:
    """All rows, by name."""
    cells: list[dict[str, Callable[..., Row]]] = [*PEERS.values(), *ZEROFN.values()]
    return {"reference": reference} | {name: builder for cell in cells for name, builder in cell.items()}

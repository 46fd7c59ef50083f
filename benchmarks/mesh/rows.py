"""The same training on meshes: by ZeroFn, by torch's own parallelism, and by DeepSpeed.

A row's builder takes `(work, rank, world)` and returns a `Row`, whose step takes the tokens [B, S] of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import measure
from benchmarks.common.handwritten import Handwritten
from benchmarks.common.peers import Row, adamw, shard_layers, state_of, train_once
from benchmarks.common.workload import BETAS, EPS, LEARNING_RATE, SEED, WEIGHT_DECAY, Workload

Builder = Callable[[Workload, int, int], Row]


def reference(work: Workload, rank: int, world: int) -> Row:
    """One process with everything."""
    loop = Handwritten(work)
    return Row(loop, loop.state_tensors)


IN_PARTS = {"model.layers.*": "sequence_parallel", "lm_head": "colwise"}


def zerofn_on(
    sizes: dict[str, int], stage: int = 2, method: str = "ulysses", more: dict[str, str] | None = None
) -> Builder:
    """As a user writes it. `more`: entries beside those of the model's own plan."""

    def build(work: Workload, rank: int, world: int) -> Row:
        import zerofn

        mesh = zerofn.Mesh.make(**sizes)
        model = zerofn.skeleton(work.module)
        plan: Any = model.tp_plan
        cuts = zerofn.parallel.tensor(model, mesh, plan | (more or {})) if "tensor" in sizes else None
        if "context" in sizes:
            zerofn.parallel.context(model, mesh, method=method)

        def init_state() -> Any:
            params = dict(work.module().named_parameters())
            tx = zerofn.optim.adamw(LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY)
            return zerofn.TrainState.create(params=params, tx=tx)

        def train_step(state: Any, batch: Any) -> Any:
            def loss_fn(params: Any, batch: Any) -> Any:
                return torch.func.functional_call(model, params, (), batch).loss

            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), loss

        torch.manual_seed(SEED)
        held = [zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts)]
        compiled = zerofn.compile(train_step)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            mine = tokens.chunk(mesh.rows.size)[mesh.rows.rank]
            batch = {"input_ids": mine, "labels": mine}
            if "context" in sizes:
                batch = zerofn.parallel.split_sequence(batch, mesh)
            held[0], loss = compiled(held[0], batch)
            return loss

        return Row(step, lambda: measure.reachable_tensors(held[0]))

    return build


def _tensor_plan(gathers: bool) -> dict[str, Any]:
    """Return torch's plan for the layers that Llama's own names. `gathers`: whether its head gathers the logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    cut = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    plan = {f"model.layers.*.self_attn.{name}": how for name, how in cut.items()}
    for name in ("gate_proj", "up_proj"):
        plan[f"model.layers.*.mlp.{name}"] = ColwiseParallel()
    plan["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    head = {"output_layouts": Replicate()} if gathers else {"output_layouts": Shard(-1), "use_local_output": False}
    plan["lm_head"] = ColwiseParallel(**head)
    return plan


def torch_tensor(data: int, tensor: int, gathers: bool = True) -> Builder:
    """`parallelize_module`, and `fully_shard` along the other axis if it has several ranks; without a gather of logits
    in `loss_parallel`.
    """

    def build(work: Workload, rank: int, world: int) -> Row:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(work.build(), mesh["tensor"], _tensor_plan(gathers))
        if data > 1:
            shard_layers(work, model, mesh["data"])
        # Norms are no DTensors where nothing is sharded; a fused update takes one kind at a time.
        kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == kind] for kind in (True, False)]
        optimizer = adamw([{"params": kind} for kind in kinds if kind])
        once = train_once(model, optimizer)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            with contextlib.nullcontext() if gathers else loss_parallel():
                loss = once(tokens.chunk(data)[rank // tensor])
            return loss.full_tensor() if isinstance(loss, DTensor) else loss

        return Row(step, lambda: state_of(model, optimizer))

    return build


def _next_tokens(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)


def torch_context(data: int, context: int) -> Builder:
    """`context_parallel`, and `fully_shard` over all ranks."""

    def build(work: Workload, rank: int, world: int) -> Row:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cpu", (data, context), mesh_dim_names=("data", "context"))
        model = work.build()
        shard_layers(work, model, mesh["data", "context"]._flatten("all"))
        optimizer = adamw(model.parameters())

        def step(tokens: torch.Tensor) -> torch.Tensor:
            mine = tokens.chunk(data)[rank // context].clone()
            labels, places = _next_tokens(mine), torch.arange(mine.shape[1]).repeat(len(mine), 1)
            count = (labels != -100).sum() / context
            with context_parallel(mesh["context"], buffers=[mine, labels, places], buffer_seq_dims=[1, 1, 1]):
                loss = model(
                    input_ids=mine, labels=labels, shift_labels=labels, position_ids=places, num_items_in_batch=count
                ).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return Row(step, lambda: state_of(model, optimizer))

    return build


def _deepspeed_settings(rows: int, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }


def _engine_step(engine: Any, inputs: Callable[[torch.Tensor], dict[str, Any]]) -> Callable:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(**inputs(tokens)).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def deepspeed_autotp(data: int, tensor: int) -> Builder:
    """AutoTP for training, with ZeRO 2 if there are several ranks along the other axis."""

    def build(work: Workload, rank: int, world: int) -> Row:
        import deepspeed

        deepspeed.init_distributed("gloo")
        settings = _deepspeed_settings(work.batch * world // data, 2 if data > 1 else 1)
        settings["tensor_parallel"] = {"autotp_size": tensor}
        model = deepspeed.tp_model_init(work.build(), tp_size=tensor, dtype=torch.float32)
        optimizer = adamw(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

        def inputs(tokens: torch.Tensor) -> dict[str, Any]:
            mine = tokens.chunk(data)[rank // tensor]
            return {"input_ids": mine, "labels": mine}

        return Row(_engine_step(engine, inputs), lambda: state_of(engine.module, engine.optimizer.optimizer))

    return build


def deepspeed_ulysses(context: int) -> Builder:
    """Ulysses for transformers' models, over all ranks, with ZeRO 2."""

    def build(work: Workload, rank: int, world: int) -> Row:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed("gloo")
        model = work.build()
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=context,
            micro_batch_size=work.batch * world,
            seq_length=work.seq,
            seq_length_is_variable=False,
        )
        group = mpu.get_sequence_parallel_group()
        settings = _deepspeed_settings(work.batch * world, 2) | {"sequence_parallel_size": context}
        optimizer = adamw(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)

        def inputs(tokens: torch.Tensor) -> dict[str, Any]:
            labels, places = _next_tokens(tokens), torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
            part = dist.get_rank(group)
            ids, labels, places = (x.chunk(context, 1)[part].contiguous() for x in (tokens, labels, places))
            count = (_next_tokens(tokens) != -100).sum() / context
            return {
                "input_ids": ids, "labels": labels, "shift_labels": labels, "position_ids": places,
                "num_items_in_batch": count,
            }  # fmt: skip

        return Row(_engine_step(engine, inputs), lambda: state_of(engine.module, engine.optimizer.optimizer))

    return build


TENSOR, CONTEXT = "tensor", "context"
# world -> what is cut -> system -> builder. The peers of a cell do the work of ZeroFn's rows in it.
PEERS: dict[int, dict[str, dict[str, Builder]]] = {
    2: {
        TENSOR: {
            "torch, tensor 2": torch_tensor(1, 2),
            "torch, tensor 2, loss_parallel": torch_tensor(1, 2, gathers=False),
            "DeepSpeed AutoTP 2": deepspeed_autotp(1, 2),
        },
        CONTEXT: {"torch, context 2": torch_context(1, 2), "DeepSpeed Ulysses 2": deepspeed_ulysses(2)},
    },
    4: {
        TENSOR: {
            "torch, data 2 x tensor 2": torch_tensor(2, 2),
            "torch, data 2 x tensor 2, loss_parallel": torch_tensor(2, 2, gathers=False),
            "DeepSpeed AutoTP 2 x ZeRO-2": deepspeed_autotp(2, 2),
        },
        CONTEXT: {"torch, data 2 x context 2": torch_context(2, 2), "DeepSpeed Ulysses 4": deepspeed_ulysses(4)},
    },
}
ZEROFN: dict[int, dict[str, dict[str, Builder]]] = {
    2: {
        TENSOR: {
            "ZeroFn, tensor 2": zerofn_on({"tensor": 2}),
            "ZeroFn, tensor 2, in parts": zerofn_on({"tensor": 2}, more=IN_PARTS),
        },
        CONTEXT: {
            "ZeroFn, context 2": zerofn_on({"context": 2}),
            "ZeroFn, context 2, ring": zerofn_on({"context": 2}, method="ring"),
        },
    },
    4: {
        TENSOR: {
            "ZeroFn, data 2 x tensor 2": zerofn_on({"data": 2, "tensor": 2}),
            "ZeroFn, data 2 x tensor 2, in parts": zerofn_on({"data": 2, "tensor": 2}, more=IN_PARTS),
        },
        CONTEXT: {
            "ZeroFn, data 2 x context 2": zerofn_on({"data": 2, "context": 2}),
            "ZeroFn, context 4": zerofn_on({"context": 4}),
        },
    },
}


@functools.cache
def builders() -> dict[str, Builder]:
    """All rows, by name."""
    cells = [cell for rows in (PEERS, ZEROFN) for kinds in rows.values() for cell in kinds.values()]
    return {"reference": reference} | {name: builder for cell in cells for name, builder in cell.items()}

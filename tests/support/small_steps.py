"""A multilayer perceptron with one unit per layer, its training step, and what its graph holds."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.fx import GraphModule, Node

import zerofn
from tests.support.same import assert_same_trees
from zerofn import optim, passes
from zerofn._torch_compat import join_fake_group
from zerofn.capture.capture import capture
from zerofn.cost import simulator
from zerofn.geometry.cuts import Pipeline, on_stages
from zerofn.graph.alias import positions
from zerofn.graph.edit import copied, weight_chain
from zerofn.graph.node_kinds import is_gather, is_scatter
from zerofn.graph.program import Program
from zerofn.passes._context import context_of
from zerofn.runtime.buffers import Buffers
from zerofn.runtime.executor import Executor
from zerofn.schedules import make

ops, aten = torch.ops.zerofn, torch.ops.aten
WIDTH, ROWS = 16, 4
SCHEDULE = [each.fn for each in passes.standard(donating=True) if each.scope == "body"]


class Normed(torch.nn.Module):
    """Batch norm and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@torch.library.custom_op("small_steps::fail_here", mutates_args=())
def fail_here(x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
    """`x`, or an error of a step that runs where `when` is not zero."""
    if when.item() > 0:
        raise ValueError("the disk is full")
    return x.clone()


@fail_here.register_fake
def _(x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def unit_of(name: str) -> str:
    """One unit per layer."""
    return name.split(".")[0]


def build(num_layers: int = 4, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Linear, tanh, dropout, and so on; seeded."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(num_layers):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(dropout)]
    return torch.nn.Sequential(*layers).to(dtype)


def state_of(module: torch.nn.Module, stage: int, tx: Any = None, **options: Any) -> Any:
    """The module's parameters and `tx`'s state, sharded."""
    create = {k: options.pop(k) for k in ("extra", "frozen", "loss_scale", "seed") if k in options}
    tx = tx or optim.adamw(1e-2, weight_decay=0.1)
    plain = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=tx, **create)
    return zerofn.shard(plain, stage=stage, unit=unit_of, **options)


def layers_on_stages(num_layers: int, num_ranks: int, schedule: str = "1f1b") -> dict[str, Any]:
    """Cuts that deal the layers of `build` out to the stages of a pipeline."""
    line = Pipeline(make(schedule, num_ranks, 1).placement, schedule)
    stages = {k: k * line.placement.num_stages // num_layers for k in range(num_layers)}
    return {f"{3 * k}.{x}": on_stages(line, 0, WIDTH, {s}) for k, s in stages.items() for x in ("weight", "bias")}


def apart(patch: Any, share: float) -> None:
    """Host memory that is not where the model computes, and the share of the units that the host updates."""
    patch.setattr(zerofn.offload.policy, "lies_there", lambda tier, device: False)
    patch.setattr(importlib.import_module("zerofn.passes.update_on_host"), "share_of", lambda *args: share)


def beside_drives(patch: Any) -> None:
    """A device that is not the host, whose gradients go to drives through host memory."""
    patch.setattr(importlib.import_module("zerofn.passes.update_on_host"), "_on_device", lambda rule: True)


def take_seconds(patch: Any, seconds: Callable[[Node], float]) -> None:
    """In plans, operations take as long as `seconds` says, beside transfers that take what the machine says."""
    patch.setattr(simulator, "roofline", lambda machine: seconds)


def captures_of(step: Any) -> list[Any]:
    """What a compiled step has captured, for one signature each, the latest last."""
    return [*step._entries.values()]


def batch_of(rank: int = 0, rows: int = ROWS, dtype: torch.dtype = torch.float32, seed: int = 1) -> dict[str, Any]:
    """Inputs and targets that differ between ranks."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    make = lambda: torch.randn(rows, WIDTH, generator=generator, dtype=dtype)  # noqa: E731
    return {"x": make(), "y": make()}


def loss_of(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Mean squared error, in the parameters' dtype."""

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x = batch["x"].to(params["0.weight"].dtype)
        return (functional_call(module, params, (x,)) - batch["y"]).square().mean()

    return loss_fn


def adapted_loss_of(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """First-order MAML: the loss after a step of descent by a gradient that is accumulated itself."""
    loss_fn = loss_of(module)

    def adapted(params: Any, batch: Any) -> torch.Tensor:
        fixed = {name: x.detach() for name, x in params.items()}
        _, grads = zerofn.accumulate(zerofn.value_and_grad(loss_fn), 2)(fixed, batch)
        return loss_fn({name: x - 0.1 * grads[name] for name, x in params.items()}, batch)

    return adapted


def step_with(
    loss_fn: Callable[..., Any], num_microbatches: int = 1, has_aux: bool = False
) -> Callable[[Any, Any], Any]:
    """A step with a loss function of one's own, which returns its value."""

    def step(state: Any, batch: Any) -> Any:
        vg = state.value_and_grad(loss_fn, has_aux)
        value, grads = (zerofn.accumulate(vg, num_microbatches) if num_microbatches > 1 else vg)(batch)
        return state.apply_gradients(grads), value

    return step


def train_step_of(module: torch.nn.Module, num_microbatches: int = 1) -> Callable[[Any, Any], Any]:
    """The everyday step."""
    loss_fn = loss_of(module)

    def train_step(state: Any, batch: Any) -> Any:
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, num_microbatches) if num_microbatches > 1 else vg)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


def trained(
    num_layers: int,
    rows: int,
    tx: Any,
    steps: int,
    *,
    stage: int = 3,
    num_microbatches: int = 1,
    precision: Any = None,
    offload: Any = None,
    **options: Any,
) -> tuple[Any, list[torch.Tensor]]:
    """(plan, losses and parameters) after some steps of the everyday step, with dropout, compiled with `options`."""
    module = build(num_layers, dropout=0.1)
    state = state_of(module, stage, tx, precision=precision, offload=offload)
    step = zerofn.compile(train_step_of(module, num_microbatches), **options)
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan = step.lower(state, batch_of(rank, rows=rows))
    losses = []
    for k in range(steps):
        state, aux = step(state, batch_of(rank, rows=rows, seed=k))
        losses.append(aux["loss"])
    return plan, [*losses, *zerofn.tree.leaves(zerofn.unshard(state.params))]


@contextlib.contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is one of `world` ranks of which the others are not there."""
    join_fake_group(world, rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def captured(step: Callable[..., Any], state: Any, batch: Any, *schedule: Callable[..., None]) -> Program:
    """The program of a step after some passes, on its own graph alone."""
    program = capture(step, state, batch)
    for each in schedule:
        if each in SCHEDULE:
            each(program.gm, context_of(program))
        else:
            passes.Pass(each)(program)
    return program


def lowered(
    *schedule: Callable[..., None], num_layers: int = 6, num_microbatches: int = 1, stage: int = 3, **options: Any
) -> GraphModule:
    """The everyday step's graph on one of two ranks, after some passes."""
    module = build(num_layers)
    with fake_ranks(2):
        step = train_step_of(module, num_microbatches)
        return captured(step, state_of(module, stage, **options), batch_of(), *schedule).gm


def assert_results_stay(*schedule: Callable[..., None], num_microbatches: int = 1) -> None:
    """On a real rank: the everyday step at stage 3 has the same bits after some passes."""
    module = build(6)
    state, batch = state_of(module, 3), batch_of(dist.get_rank())
    step = train_step_of(module, num_microbatches)
    before = results(captured(step, state, batch), state, batch)
    assert_same_trees(results(captured(step, state, batch, *schedule), state, batch), before, "stage 3")


def scheduled(step: Callable[..., Any], state: Any, batch: Any, *, donating: bool = False) -> Program:
    """The program of a step after all passes."""
    return passes.run(capture(step, state, batch), donating=donating)


def inputs_of(state: Any, batch: Any) -> list[torch.Tensor]:
    """What the program takes: the state's tensors, the gathered copies, the batch's tensors."""
    nodes = zerofn.tree.leaves(state, is_leaf=zerofn.sharding.sharded.is_sharded)
    sharded = [x for x in nodes if zerofn.sharding.sharded.is_sharded(x)]
    tensors = [t for x in nodes for t in (x.parts if x in sharded else [x])]
    copies = [t for x in sharded for t in (x.full or [])]
    return [*tensors, *copies, *zerofn.tree.leaves(batch)]


def results(program: Program, state: Any, batch: Any) -> list[torch.Tensor]:
    """What the program returns for copies of these inputs."""
    buffers, gm = Buffers(program), copied(program.gm)
    buffers.bind(gm)
    return Executor(gm).run([x.clone() for x in inputs_of(state, batch)])


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def calls(gm: GraphModule) -> list[Node]:
    """Everything the graph does, in order."""
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


def gathers(gm: GraphModule) -> list[Node]:
    """The starts of gathers of units."""
    return [n for n in gm.graph.nodes if is_gather(n)]


def scatters(gm: GraphModule) -> list[Node]:
    """The starts of reduce-scatters of units."""
    return [n for n in gm.graph.nodes if is_scatter(n)]


def users_of(start: Node) -> list[Node]:
    """What computes with a gathered unit, through its wait and any view, in order."""
    graph = start.graph
    inside, where = {*weight_chain(graph), start}, positions(graph)
    found: set[Node] = set()
    todo = [start]
    while todo:
        for user in todo.pop().users:
            if user in inside or user.target is ops.wait.default:
                todo.append(user)
            else:
                found.add(user)
    return sorted(found, key=where.__getitem__)


def num_alive(gm: GraphModule) -> int:
    """The most gathered units that hold memory at once, from the start of the gather to the last use."""
    where = positions(gm.graph)
    spans = [(where[g], where[users_of(g)[-1]]) for g in gathers(gm)]
    return max(sum(a <= at <= b for a, b in spans) for at, _ in spans)

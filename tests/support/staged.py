"""Steps whose parameters lie on stages of a pipeline, captured in one process, and their pieces run there in turns."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

import zerofn
from tests.support.small_steps import captured, inputs_of
from zerofn import optim
from zerofn.collectives.maps import Linear
from zerofn.graph.boundaries import reads_of
from zerofn.graph.cut import Piece
from zerofn.graph.nested import Call, calls, fold
from zerofn.graph.region import Region, seams_of
from zerofn.passes._context import context_of
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.functionalize import functionalize
from zerofn.runtime.executor import Executor

library = torch.library.Library("staged", "FRAGMENT")
for _name in ("leaf", "gradient"):
    library.define(f"{_name}(Tensor x, str leaf) -> Tensor")
    library.impl(_name, lambda x, leaf: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"staged::{_name}", lambda x, leaf: x.clone(), lib=library)
ops = torch.ops.staged


class Lent(NamedTuple):
    """A parameter as a stage lends it to others; its transpose is of its gradient."""

    name: str
    op: Any = ops.leaf

    @property
    def transpose(self) -> Lent:
        return Lent(self.name, ops.gradient if self.op is ops.leaf else ops.leaf)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.op(x, self.name),)


class Staged(NamedTuple):
    """The body of a step's loop, with real inputs. `call`: what runs it. `seams`: the operations that lend a parameter,
    and return its gradient. `given`: by the body's inputs.
    """

    body: GraphModule
    call: Call
    seams: tuple[Any, Any]
    given: dict[Node, torch.Tensor]

    @property
    def varying(self) -> set[Node]:
        index = next(iter(self.body.graph.nodes))
        return {index, *list(self.call.given)[: self.call.num_cut]}

    def names(self) -> list[str]:
        """The parameters, in the order of their first use."""
        return list(dict.fromkeys(name for _, name in reads_of(self.region())))

    def region(self) -> Region:
        """The part between parameters and gradients."""
        return Region(self.body, seams_of(self.body, *self.seams, self.varying))

    def fresh(self) -> Staged:
        """The same, with inputs of its own, which the body may write to."""
        return self._replace(given={x: v.clone() for x, v in self.given.items()})

    def inputs(self, k: int) -> dict[str, torch.Tensor]:
        """What the body takes in a round, by name."""
        index, *_ = self.body.graph.nodes
        cut = list(self.call.given)[: self.call.num_cut]
        return {index.name: torch.tensor(k)} | {x.name: v[k] if x in cut else v for x, v in self.given.items()}

    def whole(self) -> tuple[list[torch.Tensor], list[Any]]:
        """The sums and the stacks of all rounds, by the uncut body."""

        def once(index: torch.Tensor, *_: Any) -> tuple[list[Any], list[Any]]:
            out = Executor(self.body).run([*self.inputs(int(index)).values()])
            return out[: self.call.num_sums], out[self.call.num_sums :]

        rows = [v for x, v in self.given.items() if x in list(self.call.given)[: self.call.num_cut]]
        return fold(once, self.call.rounds, rows)


def staged(
    params: Mapping[str, torch.Tensor],
    loss_fn: Callable[..., Any],
    batch: Any,
    rounds: int = 3,
    unit: Callable[[str], str] | None = None,
    has_aux: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None,
    sharded: Mapping[str, Any] | None = None,
    **create: Any,
) -> Staged:
    """Capture a step that accumulates, and take its loop's body out. `buffers`: tensors that `loss_fn` takes behind the
    batch, and may write to. `sharded`: how parameters are sharded; on a mesh with stages they are lent as there.
    """
    buffers, mesh = dict(buffers or {}), (sharded or {}).get("mesh")
    lend, back = (ops.leaf, ops.gradient) if mesh is None else (torch.ops.zerofn.on_stage, torch.ops.zerofn.to_stage)

    def lent(params: Any, *args: Any) -> Any:
        if mesh is None:
            params = {k: Linear.apply(Lent(k), x)[0] for k, x in params.items()}
        return loss_fn(params, *args)

    create |= {"extra": buffers} if buffers else {}
    state = zerofn.TrainState.create(params=dict(params), tx=optim.sgd(0.1), **create)
    state = zerofn.shard(state, **{"stage": 3, "unit": unit or (lambda name: name), **(sharded or {})})

    def step(state: Any, batch: Any) -> Any:
        inside = {k: x.clone() for k, x in state.extra.items()} if buffers else {}
        fn = (lambda params, batch: lent(params, batch, inside)) if buffers else lent
        value, grads = zerofn.accumulate(state.value_and_grad(fn, has_aux), rounds)(batch)
        return state.apply_gradients(grads, **({"extra": inside} if buffers else {})), value

    program = captured(step, state, batch)
    ((node, call),) = calls(program.gm)
    for x in call.body.graph.nodes:
        if x.target in (ops.leaf.default, ops.gradient.default):  # as on a mesh, where they stand before and behind
            x.meta.pop("phase", None)
    for each in (canonicalize, functionalize):
        each(call.body, context_of(program))
    values = dict(zip(program.placeholders, inputs_of(state, batch), strict=True))
    for x in program.gm.graph.nodes:
        if x is node:
            break
        if x.op == "call_function":
            values[x] = x.target(*torch.fx.map_arg(x.args, values.get), **torch.fx.map_arg(x.kwargs, values.get))
        elif x.op == "get_attr":
            values[x] = getattr(program.gm, x.target)
    seams = (lend.default, back.default)
    return Staged(call.body, call, seams, {x: values[outer].detach().clone() for x, outer in call.given.items()})


def layers_begin(names: Sequence[str], count: int, layer: str = r"\.(\d+)\.") -> list[str]:
    """The parameters that begin all stages but the first, if layers are dealt out equally."""
    first: dict[str, str] = {}
    for name in names:
        if found := re.search(layer, name):
            first.setdefault(name[: found.end()], name)
    starts = list(first.values())
    return [starts[-(-s * len(starts) // count)] for s in range(1, count)]


class Pipeline:
    """Runs the pieces of all stages for several microbatches, in turns: 1F1B, or F, I and W as soon as they may.

    `bodies`: for each stage what its rank has captured. `pieces`: of all stages. `alike`: see `Cut`.
    """

    def __init__(
        self, bodies: Sequence[Staged], pieces: Mapping[tuple[int, str], Piece], alike: Sequence[int] = ()
    ) -> None:
        self._bodies, self._pieces, self._count, self._alike = bodies, pieces, len(bodies), alike
        self._call = bodies[0].call
        self._values: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        self._sent: dict[tuple[int, int, str], deque[Any]] = defaultdict(deque)
        self.sums: dict[int, dict[int, Any]] = defaultdict(dict)  # result -> stage -> sum of its terms
        self.rows: dict[int, dict[int, list[Any]]] = defaultdict(dict)  # result -> stage -> of each microbatch

    def run(self) -> tuple[list[torch.Tensor], list[Any]]:
        """The sums, over stages in order, and the stacks."""
        for actions in self._ticks():
            for stage, kind, k in actions:
                self._act(stage, kind, k)
        assert not any(self._sent.values()), "sent and never received"
        sums = []
        for i in range(self._call.num_sums):
            parts = [self.sums[i][s] for s in sorted(self.sums[i])][: 1 if i in self._alike else None]
            total = parts[0]
            for x in parts[1:]:
                total = total + x
            sums.append(total)
        rows = range(self._call.num_sums, len(self._call.results))
        return sums, [torch.stack(min(self.rows[i].items())[1]) for i in rows]  # what all stages make is the same

    def _ticks(self) -> Iterable[list[tuple[int, str, int]]]:
        """1F1B: stage s is `count - s` microbatches ahead of its backward pass; W of one comes behind the next I."""
        rounds, late = self._call.rounds, [k for k in ("I", "B", "W") if any(x == k for _, x in self._pieces)]
        for tick in range(2 * (rounds + self._count)):
            for s in range(self._count):
                if tick - s in range(rounds):
                    yield [(s, "F", tick - s)]
            for s in reversed(range(self._count)):
                k = tick - 2 * (self._count - 1) + s
                yield [(s, kind, k - (kind == "W")) for kind in late if k - (kind == "W") in range(rounds)]

    def _act(self, stage: int, kind: str, k: int) -> None:
        piece = self._pieces.get((stage, kind))
        if piece is None:
            return
        env, given = self._values[stage, k], self._bodies[stage].inputs(k)
        for edge in piece.received:
            number, name, value = self._sent[edge.source, stage, edge.name].popleft()
            assert number == k and name == edge.name
            assert (tuple(value.shape), value.stride(), value.dtype) == (edge.shape, edge.stride, edge.dtype)
            env[edge.name] = value
        values = [
            *(given[x] for x in piece.given),
            *(env[e.name] for e in piece.received),
            *(env[x] for x in piece.taken),
        ]
        out = Executor(piece.graph).run(values)
        env.update({name: out[i] for name, i in piece.kept.items()})
        for edge, i in piece.sent.items():
            self._sent[stage, edge.target, edge.name].append((k, edge.name, out[i].clone()))
        for result, i in piece.results.items():
            self._add(result, stage, out[i].clone())

    def _add(self, result: int, stage: int, term: Any) -> None:
        if result >= self._call.num_sums:
            self.rows[result].setdefault(stage, []).append(term)
        else:
            before = self.sums[result].get(stage)
            self.sums[result][stage] = term if before is None else before + term

"""A small model of four layers on the stages of a pipeline, trained in float64: cut, and uncut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zerofn
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import Pipeline, StageCut, on_stages
from zerofn.schedules import make

WIDTH, WORDS, LAYERS = 8, 11, 4


def params(tied: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """An embedding, layers with a norm, a product there and one back, a norm, and a head unless it is tied."""
    draw = torch.Generator().manual_seed(0)
    made = {"embed": (WORDS, WIDTH)}
    for i in range(LAYERS):
        made |= {f"h.{i}.norm": (WIDTH,), f"h.{i}.up": (WIDTH, 2 * WIDTH), f"h.{i}.down": (2 * WIDTH, WIDTH)}
    made |= {"norm": (WIDTH,)} | ({} if tied else {"head": (WORDS, WIDTH)})
    return {k: (k.endswith("norm") + 0.4 * torch.randn(*s, generator=draw)).to(dtype) for k, s in made.items()}


def layer(params: Mapping[str, Tensor], i: int, x: Tensor) -> Tensor:
    y = F.layer_norm(x, (WIDTH,)) * params[f"h.{i}.norm"]
    return x + torch.tanh(y @ params[f"h.{i}.up"]) @ params[f"h.{i}.down"]


def embedded(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return F.embedding(batch["ids"], params["embed"])


def logits(params: Mapping[str, Tensor], x: Tensor, layers: Iterable[int] = range(LAYERS)) -> Tensor:
    """Of what was embedded, after these layers."""
    for i in layers:
        x = layer(params, i, x)
    return (F.layer_norm(x, (WIDTH,)) * params["norm"]) @ params.get("head", params["embed"]).t()


def cross_entropy(out: Tensor, batch: Mapping[str, Tensor], **options: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten(), **options)


def loss_fn(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(logits(params, embedded(params, batch)), batch)


def batches(steps: int = 2, rows: int = 12, length: int = 5) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    make = lambda: torch.randint(WORDS, (rows, length), generator=draw)  # noqa: E731
    return [{"ids": make(), "labels": make()} for _ in range(steps)]


def rows_of(batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """A rank's own."""
    return {k: x.chunk(mesh.rows.size)[mesh.rows.rank] for k, x in batch.items()}


def stages_of(params: Mapping[str, Tensor], mesh: Mesh, schedule: str) -> dict[str, StageCut]:
    """As many layers to each stage; a tied embedding on the first and the last. Leaves without a dim lie on all."""
    placement = make(schedule, mesh.size("pipe"), 1).placement
    last = placement.num_stages - 1
    first_and_last = {"embed": [0] if "head" in params else [0, last]}
    of = lambda k: [int(k.split(".")[1]) * (last + 1) // LAYERS] if k.startswith("h.") else [last]  # noqa: E731
    return {
        k: on_stages(Pipeline(placement, schedule), 0, len(x), first_and_last.get(k) or of(k))
        for k, x in params.items()
        if x.dim()
    }


def in_two_stages(params: Mapping[str, Tensor], stages: Callable[[str], Iterable[int]]) -> dict[str, StageCut]:
    """Cuts that put each leaf on the stages that its name says, of a line of two ranks."""
    line = Pipeline(make("1f1b", 2, 1).placement, "1f1b")
    return {name: on_stages(line, 0, len(x), stages(name)) for name, x in params.items()}


def uncut(known: list[Any]) -> list[Any]:
    return [x for x in known if x.name != "cut_stages"]


def trained(
    schedule: str,
    num_microbatches: int,
    stage: int,
    *,
    loss: Callable[..., Any] = loss_fn,
    step: Callable[[Any, Any], Any] | None = None,
    given: dict[str, Tensor] | None = None,
    tx: Any = None,
    has_aux: bool = False,
    create: Mapping[str, Any] | None = None,
    shards: Mapping[str, Any] | None = None,
    passes: Any = None,
    reduce: str | None = None,
    schedule_of_step: Any = None,
    **sizes: int,
) -> Any:
    """(what each step returned, what the whole state holds) after all batches, on a mesh of two stages and `sizes`."""
    mesh, given = Mesh.make(pipe=2, **sizes), params() if given is None else given
    tx = tx or optim.adamw(1e-2)
    state = zerofn.TrainState.create(params=given, tx=tx, **(create or {}))
    state = zerofn.shard(state, stage=stage, mesh=mesh, cuts=stages_of(given, mesh, schedule), **(shards or {}))

    def train_step(state: Any, batch: Any) -> Any:
        vg = state.value_and_grad(loss, has_aux=has_aux)
        out, grads = zerofn.accumulate(vg, num_microbatches, reduce=reduce)(batch)
        return state.apply_gradients(grads), out

    compiled, found = zerofn.compile(step or train_step, passes=passes, schedule=schedule_of_step), []
    for batch in batches():
        state, out = compiled(state, rows_of(batch, mesh))
        found.append(out)
    return found, held_by(zerofn.unshard(state))


def held_by(state: Any) -> dict[str, Tensor]:
    """The tensors of a state by name; it cannot travel between processes itself."""
    paths, leaves, _ = zerofn.tree.flatten_with_path(state)
    return {zerofn.tree.name_of(path): x for path, x in zip(paths, leaves, strict=True)}


def both(*args: Any, **options: Any) -> list[Any]:
    """`trained` by a pipeline, and uncut."""
    return [trained(*args, passes=passes, **options) for passes in (None, uncut)]

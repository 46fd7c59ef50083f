"""python -m benchmarks.pipe.equality   (about an hour on 2 cores): pipelines beside steps that are not cut, float64.

Five steps with clipping and AdamW of seven Hugging Face models. On `pipe` alone, beside plain accumulation of one
process: the bits, or 1e-12 of the largest entry where a parameter lies on several ranks, whose terms are then added in
another order. Beside other axes: the same of the uncut step on the same mesh, stage and `reduce`. One process of every
model is compared with torch's own autograd, clipping and AdamW, where no dropout is.

The first cases are a cover of all pairs of a model, a size, a schedule and a stage; then follow the others. Ranks stay
for all cases of a size of the mesh, with their models, and with the stages that `zerofn.parallel.pipe` has chosen for a
placement. Every case is written as it comes: `--resume` leaves out those that are there and were kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing import SignalException
from torch.func import functional_call

import zerofn
from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.processes import HERE
from benchmarks.mesh import training
from benchmarks.mesh.float64_models import build, in_float64
from zerofn import optim
from zerofn.moe import experts
from zerofn.schedules import NAMES

MODELS = {
    "llama": "llama",
    "gpt2": "gpt2, dropout",
    "t5": "t5",
    "mixtral": "mixtral, balanced",
    "qwen2_moe": "qwen2_moe",
    "bert": "bert",
    "vit": "vit",
}
LAYERS = {2: 3, 3: 4, 4: 6}  # of a model on so many ranks of `pipe`: with embedding and head, a part for each stage
OF_T5 = {2: 2, 3: 2, 4: 3}  # of its encoder, and of its decoder
TIED = ("gpt2", "t5", "bert")  # which have parameters of several stages
LIMIT = 1e-12  # there, and beside torch, of the model's largest entry, and of the loss
MICROBATCHES = 4
STAGES = range(4)
# Meshes of several axes, their models, and when gradients are summed.
MIXED: list[tuple[dict[str, int], tuple[str, ...], str | None]] = [
    ({"pipe": 2, "data": 2}, tuple(MODELS), None),
    ({"pipe": 2, "data": 2}, ("llama",), "step"),
    ({"pipe": 2, "replicate": 2}, ("llama", "gpt2"), None),
    ({"pipe": 2, "context": 2}, ("llama",), None),
    ({"pipe": 2, "expert": 2}, ("mixtral", "qwen2_moe"), None),
    ({"pipe": 2, "data": 2, "tensor": 2}, ("llama", "mixtral"), None),
]
Found = tuple[list[float], dict[str, torch.Tensor]]  # losses, and parameters after all steps


class Case(NamedTuple):
    """A line of the table. `sizes`: of the mesh's axes; `reduce`: as of `accumulate`."""

    model: str
    sizes: tuple[tuple[str, int], ...]
    schedule: str
    stage: int
    reduce: str | None = None

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.sizes)
        more = f", reduce={self.reduce!r}" if self.reduce else ""
        return f"{self.model}, {mesh}, {self.schedule}, stage {self.stage}{more}"

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.sizes)

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return (OF_T5 if self.model == "t5" else LAYERS)[dict(self.sizes)["pipe"]]

    @property
    def trains(self) -> tuple[str, int]:
        """What one process trains: the model, and its number of layers."""
        return self.model, self.layers

    @property
    def microbatches(self) -> int:
        """How many: of 12 rows, or of 6."""
        return MICROBATCHES if self.alone else 3

    @property
    def alone(self) -> bool:
        """Whether one process trains the same."""
        return len(self.sizes) == 1


def alone() -> list[Case]:
    """All cases of `pipe` alone."""
    sizes = [(("pipe", n),) for n in (2, 3, 4)]
    return [Case(*case) for case in itertools.product(MODELS, sizes, NAMES, STAGES)]


def mixed() -> list[Case]:
    """All cases with other axes."""
    return [
        Case(model, tuple(sizes.items()), name, stage, reduce)
        for sizes, models, reduce in MIXED
        for model in models
        for stage in STAGES
        for name in NAMES
    ]


def cover(cases: list[Case]) -> list[Case]:
    """Some of the cases, in which every two properties occur together that do in any."""
    left = {pair for case in cases for pair in _pairs(case)}
    draw, found = random.Random(0), []
    while left:
        some = draw.sample(cases, min(200, len(cases)))
        found.append(max(some, key=lambda case: len(left & _pairs(case))))
        left -= _pairs(found[-1])
    return found


def _pairs(case: Case) -> set[Any]:
    return set(itertools.combinations(enumerate(case), 2))


@cache
def batches(model: str) -> list[dict[str, torch.Tensor]]:
    """Of all ranks: 12 rows for each step."""
    if model != "vit":
        return training.batches()
    draw = torch.Generator().manual_seed(5)
    return [
        {
            "pixel_values": torch.randn(12, 3, 8, 8, generator=draw, dtype=torch.float64),
            "labels": torch.randint(0, 5, (12,), generator=draw),
        }
        for _ in range(training.STEPS)
    ]


class Setting(NamedTuple):
    """What cases of one model on one mesh share. `batches`: this rank's; `cuts`: those of other axes than `pipe`."""

    mesh: Any
    model: Any
    batches: list[Any]
    cuts: dict[str, Any]


def loss_of(model: Any) -> Any:
    """A model's own loss, as a function of parameters and a batch."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return functional_call(model, params, (), batch).loss

    return loss_fn


@cache
def parameters(name: str, layers: int) -> dict[str, torch.Tensor]:
    """A model's first ones."""
    return {k: x.detach() for k, x in build(MODELS[name], layers).named_parameters()}


@cache
def setting(name: str, layers: int, axes: tuple[tuple[str, int], ...]) -> Setting:
    """The model on its mesh, before stages are chosen."""
    sizes = dict(axes)
    mesh = zerofn.Mesh.make(**sizes)
    model = zerofn.skeleton(partial(build, MODELS[name], layers))
    cuts = training.cuts_of(name, model, mesh) if "tensor" in sizes else {}
    if "expert" in sizes:
        cuts |= experts(model, mesh)
    if "context" in sizes:
        zerofn.parallel.context(model, mesh)

    def own(batch: Any) -> Any:
        rows = {k: x.chunk(mesh.rows.size)[mesh.rows.rank] for k, x in batch.items()}
        return zerofn.parallel.split_sequence(rows, mesh) if "context" in sizes else rows

    return Setting(mesh, model, [own(batch) for batch in batches(name)], cuts)


@cache
def staged(name: str, layers: int, axes: tuple[tuple[str, int], ...], style: str) -> dict[str, Any]:
    """The cuts into stages of a placement. Which of its schedules runs, `compile` is told."""
    mesh, model, rows, cuts = setting(name, layers, axes)
    first = next(x for x in NAMES if NAMES[x].style == style)
    return zerofn.parallel.pipe(model, mesh, loss_of(model), rows[0], schedule=first, cuts=cuts)


def trained(case: Case, cut: bool) -> Found:
    """Training on a mesh: by a pipeline, or, not `cut`, with every parameter sent to all ranks."""
    with in_float64():
        mesh, model, mine, _ = setting(case.model, case.layers, case.sizes)
        cuts = staged(case.model, case.layers, case.sizes, NAMES[case.schedule].style)
        return by_zerofn(
            case, mesh, loss_of(model), mine, stage=case.stage, cuts=cuts, reduce=case.reduce,
            schedule=case.schedule, passes=None if cut else _uncut,
        )  # fmt: skip


def by_zerofn(case: Case, mesh: Any, loss_fn: Any, mine: list[Any], *, stage: int = 0, cuts: Any = None,
              reduce: str | None = None, **compiles: Any) -> Found:  # fmt: skip
    """The training itself."""
    rounds = case.microbatches

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), rounds, reduce=reduce)(batch)
        return state.apply_gradients(grads), loss

    params = {k: x.clone() for k, x in parameters(*case.trains).items()}
    tx = optim.chain(optim.clip_by_global_norm(CLIP), optim.adamw(RATE, weight_decay=DECAY))
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=tx), stage=stage, mesh=mesh, cuts=cuts)
    step, losses = zerofn.compile(train_step, **compiles), []
    for batch in mine:
        state, loss = step(state, batch)
        losses.append(loss.item())
    return losses, zerofn.unshard(state.params)


def in_one_process(case: Case) -> Found:
    """The same training, accumulated in this process alone."""
    with in_float64():
        mesh, model, mine, _ = setting(case.model, case.layers, (("data", 1),))
        return by_zerofn(case, mesh, loss_of(model), mine)


CLIP, RATE, DECAY = 0.5, 1e-2, 0.1


def _uncut(known: list[Any]) -> list[Any]:
    return [x for x in known if x.name != "cut_stages"]


def by_torch(name: str, layers: int) -> Found:
    """The same training by torch alone, in one process."""
    with in_float64():
        model, losses = build(MODELS[name], layers), []
        optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
        for batch in batches(name):
            optimizer.zero_grad()
            parts = zip(*(x.chunk(MICROBATCHES) for x in batch.values()), strict=True)
            terms = [model(**dict(zip(batch, part, strict=True))).loss / MICROBATCHES for part in parts]
            sum(terms).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(sum(terms).item())
        return losses, {k: v.detach() for k, v in model.named_parameters()}


def difference(found: Found, expected: Found) -> float:
    """The greatest, of losses relative to each, of parameters relative to the largest entry."""
    (losses, params), (wanted, others) = found, expected
    largest = max(float(x.abs().max()) for x in others.values())
    of_losses = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    return max(of_losses, *(float((params[k] - x).abs().max()) / largest for k, x in others.items()))


def on_ranks(cases: list[Case], expected: dict[tuple[str, int], Found], path: Path) -> None:
    """Run cases of one size one after the other; the first rank writes them down. Every rank calls it.

    Ranks that refuse a case say the same, before they send anything; others end the ranks.
    """
    uncut: dict[Case, Found] = {}  # by placement: a norm adds what ranks have in their order
    for case in cases:
        began = time.monotonic()
        if zerofn.rank() == 0:  # which joins the ranks
            _write(path, case, None)
        try:
            reference = expected.get(case.trains)
            if not case.alone:
                key = case._replace(schedule=NAMES[case.schedule].style)
                if key not in uncut:
                    uncut[key] = trained(case, cut=False)
                reference = uncut[key]
            assert reference is not None
            told: Any = difference(trained(case, cut=True), reference)
        except Exception as error:  # whatever it is, it is this line of the table, and the others are to be filled
            told = f"{type(error).__name__}: {error}"[:600]
        everyone: list[Any] = [None] * zerofn.world_size()
        dist.all_gather_object(everyone, told)
        if zerofn.rank() == 0:
            texts = [x for x in everyone if isinstance(x, str)]
            _write(path, case, texts[0] if texts else max(everyone), time.monotonic() - began)


def _write(path: Path, case: Case, told: Any, seconds: float = 0.0) -> None:
    """Append a case: None when it begins, then the greatest difference of all ranks, or what was raised."""
    with path.open("a") as file:
        file.write(json.dumps([str(case), told, round(seconds, 1)]) + "\n")
    if told is not None:
        wrong = "" if isinstance(told, float) and told <= limit(case) else "FAILED "
        print(f"{wrong}{case}: {told if isinstance(told, str) else f'{told:.1e}'} ({seconds:.0f} s)", flush=True)


def limit(case: Case) -> float:
    """What a case may differ by."""
    return LIMIT if case.model in TIED else 0.0


def told_in(path: Path) -> dict[str, Any]:
    """The cases that a file has; one that only began ended its ranks."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {name: "its ranks ended" if told is None else told for name, told, _ in lines}


def keep(path: Path, cases: list[Case]) -> None:
    """Leave in a file the cases that were kept. Others run again: what they have told may be mended."""
    told = told_in(path)
    kept = [case for case in cases if isinstance(x := told.get(str(case)), float) and x <= limit(case)]
    path.write_text("".join(json.dumps([str(case), told[str(case)], 0.0]) + "\n" for case in kept))


def run(cases: list[Case], expected: dict[tuple[str, int], Found], path: Path) -> None:
    """Run what the file does not have, on ranks that stay while the size of the mesh does."""
    for world, these in itertools.groupby(cases, key=lambda case: case.world):
        left = [case for case in these if str(case) not in told_in(path)]
        while left:
            try:
                zerofn.run(on_ranks, left, expected, path, ranks=world)
            except SignalException as stopped:  # the ranks have been ended, and so ends this process
                sys.exit(128 + stopped.sigval)
            except Exception as error:
                print(f"FAILED {world} ranks ended: {str(error).splitlines()[0]}", flush=True)
                if str(left[0]) not in told_in(path):
                    raise
            # The case at which ranks ended stands in the file, and is not begun again.
            left = [case for case in left if str(case) not in told_in(path)]


def ordered(part: str) -> Iterator[Case]:
    """The cover by sizes of the mesh, then the rest."""
    every = {"alone": alone(), "mixed": mixed()}
    some = [case for kind in every.values() for case in cover(kind)]
    rest = [case for kind in every.values() for case in kind if case not in set(some)]
    yield from sorted(some, key=lambda case: case.world)
    if part == "all":
        yield from sorted(rest, key=lambda case: case.world)


def table(told: dict[str, Any]) -> Table:
    """The greatest difference of each model on each mesh, over schedules and stages, and how many cases there were."""
    cells: dict[tuple[str, str], list[Any]] = {}
    for case in (*alone(), *mixed()):
        if str(case) in told:
            mesh = " x ".join(f"{name} {size}" for name, size in case.sizes)
            cells.setdefault((mesh, case.model), []).append(told[str(case)])
    meshes = list(dict.fromkeys(mesh for mesh, _ in cells))
    out = Table("mesh", *MODELS, title="Greatest difference over schedules and stages (number of cases)")
    for mesh in meshes:
        out.add_row(mesh, *(_cell(cells.get((mesh, model), [])) for model in MODELS))
    return out


def _cell(told: list[Any]) -> str:
    worst = [x for x in told if isinstance(x, str)] or [f"{max(told):.0e}" if max(told) else "0"] if told else [""]
    return f"{'raised' if len(worst[0]) > 9 else worst[0]} ({len(told)})" if told else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("cover", "all"), default="all", help="the cover of pairs alone, or all")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these texts")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that an earlier run has told")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "pipe_equality.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as ranks have: sums of several threads have other bits
    path = args.out.with_suffix(".jsonl")
    cases = [case for case in ordered(args.part) if any(text in str(case) for text in args.only)]
    if args.resume:
        keep(path, [*alone(), *mixed()])
    else:
        path.unlink(missing_ok=True)
    expected = {trains: in_one_process(case) for trains, case in {x.trains: x for x in cases if x.alone}.items()}
    plain = {f"{x[0]}, {x[1]} layers": difference(expected[x], by_torch(*x)) for x in expected if x[0] != "gpt2"}
    print(f"{len(cases)} cases; one process beside torch: {plain}", flush=True)
    run(cases, expected, path)
    told = told_in(path)
    held = [Check(f"one process beside torch: {k}", f"{x:.1e}", x, LIMIT) for k, x in plain.items()]
    for case in cases:
        x = told[str(case)]
        shown, measured = (f"{x:.1e}", x) if isinstance(x, float) else (x, math.inf)
        held.append(Check(str(case), shown, measured, limit(case)))
    console = Console(soft_wrap=True)
    console.print(table(told))
    missed = [check for check in held if not check.kept]
    console.print(f"{len(held) - len(missed)} kept, {len(missed)} missed of {len(held)}", highlight=False)
    for check in missed:
        console.print(f"{check.what}: {check.shown}", highlight=False)
    return report.conclude(args.out, {"surroundings": report.surroundings(), "one process": plain}, held, True)


if __name__ == "__main__":
    from benchmarks.pipe import equality  # a function of `__main__` would travel to the ranks by value

    sys.exit(equality.main())

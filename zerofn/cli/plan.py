"""`zerofn plan`: the step of a script or of a configuration, planned on a cluster that need not exist."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..comm.axes import KINDS, USUAL
from ..comm.mesh import Mesh
from ..cost.machine import KNOWN
from ..dry_run.script import DryRun, Reached
from ..interop import hf_config
from ..planning.asked import ALL, Asked, Layers, Step
from ..planning.meshes import AUTO
from ..planning.planner import cluster, grid_of, plan_meshes, plan_step
from ..planning.table import Table
from ..util.sign_of_life import sign_of_life


def add(commands: Any) -> None:
    """Add the command."""
    one = commands.add_parser(
        "plan",
        help="plan memory and time of a script's training step on a cluster",
        description="Runs SCRIPT unchanged up to the first call of the compiled step FUNCTION (or of any compiled "
        "step), without memory for its state, and plans it. Arguments of your script come last, after --. "
        "Or plans the training of a Hugging Face config.json with AdamW, on rows of --context tokens. "
        "Exits with 1 if nothing fits.",
    )
    one.add_argument("script", metavar="SCRIPT[:FUNCTION] | config.json")
    one.add_argument("--context", type=int, help="number of tokens of a row, for a config.json")
    one.add_argument("--microbatches", type=int, help="microbatches of a rank's rows, for a config.json (1)")
    one.add_argument(
        "--capacity", type=float, help="capacity factor of experts, for a config.json (none: drop no tokens)"
    )
    one.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="along tensor, for a config.json: each rank has a part of the tokens between sliced layers",
    )
    one.add_argument("--world", type=int, help="number of ranks (all devices if --machine says how many nodes; else 8)")
    one.add_argument(
        "--mesh",
        help="the ranks as a grid, such as data=4,tensor=2; auto plans all meshes that may be the fastest, and names "
        "the fastest (default: the script's mesh, or data)",
    )
    one.add_argument(
        "--machine",
        default="H100-8",
        help=f"{', '.join(KNOWN)}, or a file that `zerofn profile` wrote; for several nodes, '8 x H100-8' (H100-8)",
    )
    one.add_argument("--stage", type=int, nargs="+", help="stages to plan, of 0, 1, 2, 3 (default: all)")
    one.add_argument("--offload", nargs="+", help="none, cpu, nvme (default: those that make a difference)")
    one.add_argument(
        "--precision", nargs="+", help="none, fp32, bf16, fp16, fp8 (default: the script's, or the usual ones)"
    )
    one.add_argument("--wire", nargs="+", help="none, bf16, fp8, int8, gather=int4,reduce=int8 (default: the script's)")
    one.add_argument(
        "--remat",
        nargs="+",
        help="none, auto (selective recomputation), full, budget (default: more if a plan does not fit)",
    )
    one.add_argument("--rows", type=int, nargs="+", help="number of rows of a rank's batch (default: the script's)")
    one.add_argument("--memory", help="memory of a device, such as 24GiB, instead of the machine's")
    one.add_argument("--price", type=float, help="price of a GPU-hour, such as 2.50, for the cost of a billion tokens")
    one.add_argument("--wide", action="store_true", help="print all columns, however wide: bytes by kind, and more")
    one.add_argument("--picture", type=Path, help="draw the plan to this file, such as plan.png")
    one.add_argument("--json", type=Path, help="write the plan to this file")
    one.set_defaults(run=_plan)


_OF_CONFIGURATIONS = {  # options, and what a script does instead
    "context": "has its own batch",
    "microbatches": "chooses its own number of microbatches",
    "capacity": "sets the capacity of its own layers",
    "sequence_parallel": "has a plan of its own",
}


def _plan(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if nothing fits."""
    if args.price is not None and not args.price > 0:
        raise ValueError(f"--price {args.price:g}: expected the price of a GPU-hour, a number above 0, such as 2.50.")
    with sign_of_life(f"planning {args.script}"):
        table = _table(args)
        text = table.text(wide=args.wide, price=args.price)
    print(text)
    if args.picture:
        table.picture(args.picture)
    if args.json:
        args.json.write_text(json.dumps(table.json(), indent=1) + "\n")
    return int(not any(row.fits for row in table))


def _table(args: argparse.Namespace) -> Table:
    """Return the plans that are asked for."""
    where, ranks = cluster(args.machine, args.world, args.memory)  # before the script runs
    given: dict[str, Any] = {
        name: [None if x == "none" else x for x in values]
        for name, values in vars(args).items()
        if name in ("offload", "remat", "stage", "precision", "wire") and values
    }
    is_config = args.script.endswith(".json") or Path(args.script).is_dir()
    if is_config and args.context is None:
        raise ValueError(f"{args.script} needs --context, the number of tokens of a row, such as --context 4096.")
    for name, why in _OF_CONFIGURATIONS.items():
        if not is_config and getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect on a script, which {why}. Leave it out.")
    make = functools.cache(functools.partial(_of_config, args) if is_config else functools.partial(_of_script, args))
    if args.mesh == AUTO:
        asked = _asked(None if is_config else make(Mesh.planned({USUAL: ranks})), given, args.rows)

        def step_on(mesh: Mesh) -> Step:
            # A configuration's model is the same on all meshes that agree along these axes: it is made once for each.
            inner = {name: mesh.size(name) for name, kind in KINDS.items() if kind.changes_model}
            return make(Mesh.planned(inner) if is_config else mesh).step

        return plan_meshes(step_on, ranks, args.machine, where, asked)
    known = args.world is not None or where.nodes > 0
    grid = None if args.mesh is None and not is_config else grid_of(ranks, _sizes(args.mesh), known)
    found = make(grid) if grid is not None else _of_script(args, None, ranks if known else None)
    asked = _asked(found, given, args.rows)
    return plan_step(found.step, grid_of(ranks, found.mesh or grid, known), args.machine, where, asked)


def _asked(found: StepToPlan | None, given: dict[str, Any], rows: Any) -> Asked:
    """Return what is asked for, and what a script chose itself in place of what is not."""
    own = {"precision": found.precision or ALL, "wire": found.wire} if found else {"precision": ALL}
    return Asked(**{**own, **given}, rows=rows)


def _sizes(text: str | None) -> dict[str, int] | None:
    """Return the sizes of axes that --mesh gives."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and re.fullmatch(r"-?\d+", size) for name, _, size in pairs):
        raise ValueError(f"--mesh {text}: expected sizes by axis, such as data=4,tensor=2, or auto.")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ValueError(f"--mesh {text}: an axis may occur only once.")
    return {name: int(size) for name, _, size in pairs}


class StepToPlan(NamedTuple):
    """A step to plan. `mesh`, `precision`, `wire`: the script's own, None where it has none."""

    step: Step
    mesh: Mesh | None = None
    precision: Any = None
    wire: Any = None


def _of_config(args: argparse.Namespace, mesh: Mesh) -> StepToPlan:
    """Return the step of a Hugging Face configuration on a mesh."""
    if args.sequence_parallel is not None and args.mesh != AUTO and not mesh.partial:
        raise ValueError("--sequence-parallel has no effect without several ranks along tensor. Leave it out.")

    def step(parts: bool, number: int | None = None) -> Step:
        count = 1 if args.microbatches is None else args.microbatches
        rows = (args.rows or [count])[0]
        given = {"capacity": args.capacity, "sequence_parallel": parts, "layers": number, "microbatches": count}
        found = hf_config.step_of(args.script, args.context, rows, mesh, **given)
        few = functools.cache(lambda number: step(parts, number))
        layers = Layers(found.num_layers, found.odd, few) if found.num_layers else None
        return Step(found.train_step, found.init_state, found.batch, found.cuts, layers=layers, written=found.written)

    if args.sequence_parallel is not None or not mesh.partial:
        return StepToPlan(step(bool(args.sequence_parallel)))
    with contextlib.suppress(ValueError):  # the model does not take it
        return StepToPlan(step(True)._replace(otherwise=lambda: step(False)))
    return StepToPlan(step(False))


def _of_script(args: argparse.Namespace, mesh: Mesh | None, ranks: int | None = None) -> StepToPlan:
    """Return the step of a script that gets this mesh where it makes one. `ranks`: where no mesh is given."""
    script, _, function = args.script.rpartition(":") if ":" in args.script else (args.script, "", "")
    if not Path(script).is_file():
        raise ValueError(f"the script {script!r} does not exist.")
    sizes = None if mesh is None else {axis.name: axis.size for axis in mesh.axes}
    found = _dry_run(script, args.arguments, DryRun(function, ranks, sizes))
    chosen = found.options
    step = Step(found.step, found.init, found.batch, chosen["cuts"], chosen["unit"], chosen["again"])
    return StepToPlan(step, *(chosen[name] for name in ("mesh", "precision", "wire")))


def _dry_run(script: str, arguments: Sequence[str], dry_run: DryRun) -> Reached:
    """Run the script up to its step."""
    before, sys.argv = sys.argv, [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        with dry_run(), contextlib.redirect_stdout(sys.stderr):  # the script's output is not the plan
            runpy.run_path(script, run_name="__main__")
    except Reached as found:
        return found
    except SystemExit as error:
        if isinstance(error.code, str):  # it does not take this mesh
            raise ValueError(error.code) from None
        raise
    finally:
        sys.argv = before
        sys.path.pop(0)
    what = f"the compiled step {dry_run.name!r}" if dry_run.name else "a compiled step"
    raise ValueError(
        f"{script} ended without calling {what}. Write the name of the function that it passes to zerofn.compile, and "
        "the script's own arguments after --."
    )

"""The command line: plan a step, measure a machine, start ranks, and look at configurations and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .capture.capture import CaptureError
from .checkpoint import CheckpointError, export, verify
from .checkpoint.reports import checkpoints_at, described, differences
from .comm.axes import KINDS, USUAL
from .comm.mesh import Mesh
from .cost.calibrate import this_machine
from .cost.machine import KNOWN
from .dry_run.script import DryRun, Reached
from .interop import deepspeed_report, hf_config
from .launch.nodes import LaunchError
from .launch.report import report
from .launch.script import Launch, launch
from .planning.asked import ALL, Asked, Layers, Step
from .planning.meshes import AUTO
from .planning.planner import cluster, grid_of, plan_meshes, plan_step
from .planning.table import Table
from .util.command_line import Parser
from .util.errors import printable
from .util.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status. Errors are printed as a sentence."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given and given[0] != "launch" else len(given)
    parser = _parser()
    args, unknown = parser.parse_known_args(given[:end])
    if unknown:
        parser.error(
            f"{' '.join(unknown)}: not known to zerofn {args.command}; arguments of your script come last, after --: "
            "zerofn plan script.py --world 8 -- --layers 24"
        )
    if args.command != "launch":
        args.arguments = given[end + 1 :]
    try:
        return int(args.run(args))
    except (
        CaptureError,
        CheckpointError,
        ImportError,
        LaunchError,
        MemoryError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        print(printable(f"zerofn {args.command}: {error}"), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="zerofn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"zerofn {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    two = commands.add_parser("profile", help="measure this machine, for plans")
    two.add_argument("file", type=Path)
    two.add_argument("--ranks", type=int, default=1, help="processes that measure at the same time, as ranks do (1)")
    two.add_argument("--folder", type=Path, help="a folder on the drive for offloaded state, to measure the drive too")
    two.set_defaults(run=_profile)
    three = commands.add_parser(
        "config",
        help="translate a DeepSpeed configuration, key by key",
        description="Prints for each key of a DeepSpeed configuration what replaces it here, and the code to write. "
        "Without FILE: all keys of DeepSpeed. Exits with 1 if a key is unknown or has no counterpart.",
    )
    three.add_argument("file", nargs="?", type=Path, metavar="FILE", help="such as ds_config.json")
    three.add_argument("--world", type=int, default=1, help="number of ranks, for the batch size (1)")
    three.add_argument("--auto", nargs="+", default=[], metavar="KEY=VALUE", help='a value for "auto", such as lr=3e-4')
    three.set_defaults(run=_config)
    four = commands.add_parser(
        "report",
        help="check and measure this machine",
        description="Prints versions, processors, GPUs and limits, measures memory, kernels, drives and links, and "
        "trains on all devices. A line with ! names a problem, its cost, and what to type. Takes half a "
        "minute.",
    )
    four.add_argument("--ranks", type=int, help="ranks of the training (one for each GPU or processor; at most 8)")
    four.add_argument("--folder", type=Path, help="a folder on a drive, to measure the drive too")
    four.set_defaults(run=lambda args: report(args.folder, args.ranks) and 0)
    _add_launch(commands)
    _add_checkpoints(commands)
    return parser


def _add_plan(commands: Any) -> None:
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
    one.add_argument("--world", type=int, help="number of ranks (of all nodes, if --machine names several; else 8)")
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
    one.add_argument("--remat", nargs="+", help="none, auto, full, budget (default: more if a plan does not fit)")
    one.add_argument("--rows", type=int, nargs="+", help="number of rows of a rank's batch (default: the script's)")
    one.add_argument("--memory", help="memory of a device, such as 24GiB, instead of the machine's")
    one.add_argument("--picture", type=Path, help="draw the plan to this file, such as plan.png")
    one.add_argument("--json", type=Path, help="write the plan to this file")
    one.set_defaults(run=_plan)


def _add_launch(commands: Any) -> None:
    one = commands.add_parser(
        "launch",
        help="run a script on ranks: on this machine, on machines of a hostfile, or in a SLURM allocation",
        description="Starts torch's elastic agent on this machine, or by ssh on every machine of a hostfile, or by "
        "srun in a SLURM allocation. Arguments after SCRIPT belong to the script.",
    )
    one.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    one.add_argument("--ranks", type=int, help="ranks on each machine (one for each slot or GPU; 1 without GPUs)")
    one.add_argument("-H", "--hostfile", help="file of lines such as 'worker-1 slots=8' (/job/hostfile, if it exists)")
    one.add_argument("-i", "--include", help="machines and slots to use, such as worker-1@worker-2:0,2")
    one.add_argument("-e", "--exclude", help="machines and slots not to use, such as worker-2:1")
    one.add_argument("--max-restarts", type=int, default=0, help="how often failed ranks are started again (0)")
    one.add_argument("--port", type=int, default=29400, help="port on the first machine, for several machines (29400)")
    one.add_argument("--ssh-port", type=int)
    one.add_argument("--logs", metavar="FOLDER", help="a folder for the output of each rank, in separate files")
    one.add_argument("script", metavar="SCRIPT", help="a file, or with -m the name of a module")
    one.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's")
    one.set_defaults(run=_launch)


def _add_checkpoints(commands: Any) -> None:
    """Add the commands for checkpoints. A path may be that of a checkpoint, or of the folder of a run."""
    inspect = commands.add_parser("inspect", help="describe a checkpoint: time, versions, sizes, ranks, tiers")
    inspect.add_argument("path")
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser("verify", help="read every byte of a checkpoint; exits with 1 if one has changed")
    verify.add_argument("path")
    verify.set_defaults(run=_verify)
    diff = commands.add_parser("diff", help="list leaves that differ between two checkpoints; exits with 1 if any do")
    diff.add_argument("one")
    diff.add_argument("other")
    diff.set_defaults(run=_diff)
    convert = commands.add_parser("convert", help="write a checkpoint as plain safetensors, like zerofn.export")
    convert.add_argument("path")
    convert.add_argument("out", type=Path, help="a file that ends in .safetensors, or a folder")
    convert.add_argument("--part", help='the part to write, such as params.encoder; "" for all (params)')
    convert.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of floating-point leaves")
    convert.add_argument("--max-shard-size", help="of a file, such as 5GB")
    convert.set_defaults(run=_convert)


def _launch(args: argparse.Namespace) -> int:
    names = ("script", "arguments", "module", "ranks", "hostfile", "include", "exclude", "max_restarts", "port")
    return launch(Launch(**{name: getattr(args, name) for name in (*names, "ssh_port", "logs")}))


def _config(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if something is refused, which is raised after the table."""
    if args.file is None:
        print(deepspeed_report.text(deepspeed_report.every_key(), "default"))
        return 0
    pairs = [text.partition("=") for text in args.auto]
    if bare := [name for name, is_given, _ in pairs if not is_given]:
        raise ValueError(f"--auto {bare[0]}: expected KEY=VALUE, such as lr=3e-4.")
    print(printable(deepspeed_report.text(deepspeed_report.explained(args.file))), end="\n\n")
    print(deepspeed_report.summary(args.file, {name: _value(text) for name, _, text in pairs}, args.world))
    return 0


def _value(text: str) -> Any:
    """Return a value as JSON has it; what is none is a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _inspect(args: argparse.Namespace) -> int:
    print(printable(described(args.path)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if something is damaged."""
    faults = 0
    for path in checkpoints_at(args.path):
        found = verify(path)
        faults += len(found)
        print(printable("\n".join(found) if found else f"{path}: every bit is as saved"))
    return int(faults > 0)


def _diff(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if something differs."""
    count = 0
    for difference in differences(args.one, args.other):
        print(difference)
        count += 1
    print(f"{count} leaves differ" if count else "no leaf differs")
    return int(count > 0)


def _convert(args: argparse.Namespace) -> int:
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    for file in export(args.path, args.out, part=args.part, dtype=dtype, max_shard_size=args.max_shard_size):
        print(printable(str(file)))
    return 0


_OF_CONFIGURATIONS = {  # options, and what a script does instead
    "context": "has its own batch",
    "microbatches": "chooses its own number of microbatches",
    "capacity": "sets the capacity of its own layers",
    "sequence_parallel": "has a plan of its own",
}


def _plan(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if nothing fits."""
    print((table := _table(args)).text())
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


def _profile(args: argparse.Namespace) -> int:
    if args.ranks > 1 and "RANK" not in os.environ:
        folder = ["--folder", str(args.folder)] if args.folder else []
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        command += ["-m", "zerofn.cli", "profile", str(args.file), "--ranks", str(args.ranks), *folder]
        if subprocess.run(command).returncode:
            raise ValueError(f"the {args.ranks} measuring ranks failed; see above.")
        return 0
    machine = this_machine(args.folder)
    if os.environ.get("RANK", "0") == "0":
        machine.save(args.file)
        print(f"{args.file}: {machine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

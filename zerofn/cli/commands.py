"""The command line: plan a step, measure a machine, start ranks, and look at configurations and checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..capture.capture import CaptureError
from ..checkpoint import CheckpointError, export, verify
from ..checkpoint.reports import checkpoints_at, described, differences
from ..cost.calibrate import this_machine
from ..interop import deepspeed_report
from ..launch.nodes import LaunchError
from ..launch.report import report
from ..launch.script import Launch, launch
from ..util.command_line import Parser
from ..util.errors import printable
from ..util.version import __version__
from . import plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status. Errors are printed as a sentence."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not given:
        parser.print_help()
        return 0
    end = given.index("--") if "--" in given and given[0] != "launch" else len(given)
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
    except BrokenPipeError:  # of `zerofn ... | head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
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
    plan.add(commands)
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
        "trains on all devices. A line with ! says what you lose by a problem, and how to fix it. Takes half a "
        "minute.",
    )
    four.add_argument("--ranks", type=int, help="ranks of the training (one for each GPU or processor; at most 8)")
    four.add_argument("--folder", type=Path, help="a folder on a drive, to measure the drive too")
    four.set_defaults(run=lambda args: report(args.folder, args.ranks) and 0)
    _add_launch(commands)
    _add_checkpoints(commands)
    return parser


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


def _profile(args: argparse.Namespace) -> int:
    if args.ranks > 1 and "RANK" not in os.environ:
        folder = ["--folder", str(args.folder)] if args.folder else []
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        command += ["-m", "zerofn.cli", "profile", str(args.file), "--ranks", str(args.ranks), *folder]
        if subprocess.run(command).returncode:
            raise ValueError(f"the {args.ranks} ranks that measure failed. Their errors are printed above.")
        return 0
    machine = this_machine(args.folder)
    if os.environ.get("RANK", "0") == "0":
        machine.save(args.file)
        print(f"{args.file}: {machine}")
    return 0

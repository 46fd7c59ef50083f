"""python -m benchmarks.memory.foresight   (make bench): what was predicted of a step, beside what came.

Five Hugging Face models at one and at two gloo ranks of one thread, some stages, and everything computed again. In
every round this machine is measured, each operation of every step is run once on made-up values, a step is simulated,
and the step itself runs; so prediction and measurement see the same machine. Bytes are those of the host's allocator.
Then 1 T parameters on 1,024 GPUs are planned, and that is timed. Writes JSON beside the table; `--only` leaves models
out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.check import Check
from benchmarks.common.processes import HERE, BenchmarkError, program
from benchmarks.common.statistic import interval
from benchmarks.common.turns import in_turn

STEPS = 4  # of a round
SECONDS = (0.8, 1.2)  # predicted / measured, of every row
BYTES = (0.99, 1.01)
APART = 1.1  # rows predicted further apart than this must be in that order
SCALE, SCALE_SECONDS, SCALE_BYTES = "1 T on 1024 GPUs", 60.0, 4 << 30  # a plan of this takes no more
ROWS = {1: ((3, None), (3, "full")), 2: ((0, None), (2, None), (3, None), (3, "full"))}
TEXT = {"vocab_size": 1000, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}


def _tokens(length: int) -> dict[str, Any]:
    import torch

    return {"input_ids": torch.randint(3, 1000, (4, length)), "labels": torch.randint(3, 1000, (4, length))}


def _whisper() -> tuple[Callable[[], Any], dict[str, Any]]:
    import torch
    import transformers as hf

    config = hf.WhisperConfig(
        vocab_size=1000, d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=1024, decoder_ffn_dim=1024, num_mel_bins=80,
        max_source_positions=100, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 80, 200), "labels": torch.randint(3, 1000, (2, 32))}
    return lambda: hf.WhisperForConditionalGeneration(config), batch


def models() -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Name -> (its constructor, one rank's batch): 3 to 8 M parameters."""
    import transformers as hf

    gpt2 = hf.GPT2Config(vocab_size=1000, n_positions=128, n_embd=256, n_layer=4, n_head=8)
    llama = hf.LlamaConfig(hidden_size=384, intermediate_size=1024, **TEXT)
    mixtral = hf.MixtralConfig(hidden_size=256, intermediate_size=512, num_local_experts=4, **TEXT)
    t5 = hf.T5Config(
        vocab_size=1000, d_model=256, d_kv=32, d_ff=1024, num_layers=2, num_heads=8, decoder_start_token_id=0
    )
    return {
        "gpt2": (lambda: hf.GPT2LMHeadModel(gpt2), _tokens(128)),
        "llama": (lambda: hf.LlamaForCausalLM(llama), _tokens(64)),
        "t5": (lambda: hf.T5ForConditionalGeneration(t5), _tokens(64)),
        "mixtral": (lambda: hf.MixtralForCausalLM(mixtral), _tokens(64)),
        "whisper": _whisper(),
    }


class Trained:
    """One model's step in one form, and its state."""

    def __init__(self, name: str, stage: int, remat: str | None) -> None:
        import torch

        import zerofn
        from zerofn import optim

        torch.manual_seed(0)
        build, self.batch = models()[name]
        model = zerofn.skeleton(build)

        def loss_fn(params: Any, batch: dict[str, Any]) -> Any:
            return torch.func.functional_call(model, params, (), {**batch, "use_cache": False}).loss

        def init_state() -> Any:
            tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4))
            return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx)

        def train_step(state: Any, batch: dict[str, Any]) -> Any:
            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), {"loss": loss}

        self.state = zerofn.shard(init_state, stage=stage)
        self.step = zerofn.compile(train_step, remat=remat)
        self.plan = self.step.lower(self.state, self.batch)
        self.run(2)
        (self.state, _), found = self.step.profile(self.state, self.batch)
        self.peak = found.peak

    def run(self, steps: int) -> list[float]:
        """Seconds of steps."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.state, _ = self.step(self.state, self.batch)
            seconds.append(time.perf_counter() - start)
        return seconds


def child(name: str, world: int, rank: int, port: int, rounds: int) -> dict[str, Any]:
    """All rows of a model, on one rank."""
    import torch
    import torch.distributed as dist

    import zerofn
    from zerofn.cost import op_timer
    from zerofn.cost.simulator import Timeline

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    rows = {f"stage {stage}{', remat' if remat else ''}": Trained(name, stage, remat) for stage, remat in ROWS[world]}
    out = {key: {"predicted": [], "measured": [], "peak": row.peak, "planned": row.plan.memory().total}
           for key, row in rows.items()}  # fmt: skip
    for number in range(rounds):
        with _together(world):
            op_timer.forget()
            machine = zerofn.this_machine()
            cost = op_timer.measured([row.plan.graph for row in rows.values()], machine)
        for key, row in in_turn([*rows.items()], number):
            with _together(world):
                out[key]["measured"].append(statistics.median(row.run(STEPS)))
            out[key]["predicted"].append(Timeline(row.plan.graph, machine, world, cost).seconds)
    if world > 1:
        dist.destroy_process_group()
    return out


def planned() -> dict[str, Any]:
    """What planning for a trillion parameters takes, from a model with shapes alone on."""
    from benchmarks.memory import what_fits

    (found,) = what_fits.figures(next(case for case in what_fits.CASES if case.name == SCALE))
    return {"seconds": found["took"], "bytes": found["planner"], "fits": found["fits"]}


@contextlib.contextmanager
def _together(world: int) -> Iterator[None]:
    """Ranks begin at the same time."""
    import torch.distributed as dist

    if world > 1:
        dist.barrier()
    yield


def checks(run: dict[str, Any]) -> list[Check]:
    """What must hold."""
    found = []
    for label, rows in run.items():
        for key, row in rows.items():
            ratio = interval([a / b for a, b in zip(row["predicted"], row["measured"], strict=True)])
            off = max(ratio.median / SECONDS[1], SECONDS[0] / ratio.median)
            found.append(Check(f"{label}, {key}: seconds, predicted / measured, in {SECONDS}", str(ratio), off, 1.0))
            share = row["planned"] / row["peak"]
            off = max(share / BYTES[1], BYTES[0] / share)
            what = f"{label}, {key}: peak bytes, predicted / measured, in {BYTES}"
            found.append(Check(what, f"{share:.5f}", off, 1.0))
        wrong = [pair for pair in itertools.combinations(rows.values(), 2) if _astray(*pair)]
        found.append(Check(f"{label}: rows in another order than predicted", f"{len(wrong)}", float(len(wrong)), 0.0))
    return found


def scale_checks(found: dict[str, Any]) -> list[Check]:
    """That planning is quick, and small."""
    seconds, nbytes = found["seconds"], found["bytes"]
    return [
        Check(f"{SCALE}, planned: seconds", f"{seconds:.1f}", seconds, SCALE_SECONDS),
        Check(f"{SCALE}, planned: bytes of the planner", f"{nbytes / 1e9:.2f} GB", nbytes, SCALE_BYTES),
        Check(f"{SCALE}, planned: does not fit", str(not found["fits"]), float(not found["fits"]), 0.0),
    ]


def _astray(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two rows that are predicted well apart were measured in the other order."""
    expected = statistics.median(x / y for x, y in zip(a["predicted"], b["predicted"], strict=True))
    came = statistics.median(x / y for x, y in zip(a["measured"], b["measured"], strict=True))
    return expected > APART and came < 1 or expected < 1 / APART and came > 1


def table(run: dict[str, Any]) -> Table:
    """All rows."""
    out = Table("model", "row", "predicted ms", "measured ms", "ratio", "predicted MB", "measured MB")
    for label, rows in run.items():
        for key, row in rows.items():
            predicted, measured = (statistics.median(row[x]) * 1e3 for x in ("predicted", "measured"))
            ratio = interval([a / b for a, b in zip(row["predicted"], row["measured"], strict=True)])
            out.add_row(label, key, f"{predicted:.1f}", f"{measured:.1f}", str(ratio), f"{row['planned'] / 1e6:.3f}",
                        f"{row['peak'] / 1e6:.3f}")  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=["gpt2", "llama", "t5", "mixtral", "whisper"])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "foresight.json")
    for name in ("child", "world", "rank", "port"):
        parser.add_argument(f"--{name}", type=str if name == "child" else int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = planned() if args.child == SCALE else child(args.child, args.world, args.rank, args.port, args.rounds)
        print("RESULT " + json.dumps(found), flush=True)
        os._exit(0)
    console, run = Console(), {}
    for name in args.only:
        for world in ROWS:
            label, port = f"{name}, {world} ranks", processes.free_port()
            command = [*program(sys.executable, "benchmarks.memory.foresight"), "--child", name, "--world", str(world)]
            command += ["--port", str(port), "--rounds", str(args.rounds)]
            try:
                run[label] = processes.run(label, [[*command, "--rank", str(rank)] for rank in range(world)])[0]
            except BenchmarkError as error:
                console.print(f"[red]{error}[/red]", highlight=False)
                return 1
            console.print(f"{label} done", highlight=False)
    (scale,) = processes.run(SCALE, [[*program(sys.executable, "benchmarks.memory.foresight"), "--child", SCALE]])
    console.print(table(run))
    found = checks(run) + scale_checks(scale)
    args.out.write_text(json.dumps({**report.surroundings(), "rows": run, "scale": scale}, indent=1) + "\n")
    for check in found:
        console.print(f"{'kept  ' if check.kept else 'MISSED'} {check.what}: {check.shown}", highlight=False)
    return 0 if all(check.kept for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""python -m benchmarks.mesh.foresight   (make bench): what a plan says of a step on a mesh, beside what came.

Small Llamas and a Mixtral on 2 and on 4 gloo ranks of one thread, along each axis and several of them. Memory: the
peak that is planned for, on ranks that are not there, beside that of the host's allocator. Bytes: those sent along each
axis, beside the transport's own counters and, over all ranks, beside the loopback interface's counter, which counts
whatever else uses it: run this alone, or in a network of its own (`unshare -n`, then `ip link set lo up`). Shares: the
state, and the activations that wait for the backward pass, over those of a rank that has everything. Writes JSON beside
the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.check import Check
from benchmarks.common.processes import HERE, program

STEPS = 4  # during which bytes are counted
WIRE = 1.02  # the loopback's bytes over those of all ranks: packets have heads, and ranks agree
BYTES = (0.99, 1.01)
ROWS, LENGTH, VOCABULARY = 4, 128, 1000  # of a rank's batch, without a context axis
PARTS = (0.99, 1.01)  # what a layer in parts keeps, times the ranks, over what it keeps on one rank; without masks
LAYERS = 4
# world -> (model, mesh, stage, "in parts" or the method of attention along context)
CASES: dict[int, list[tuple[str, dict[str, int], int, str]]] = {
    2: [
        ("llama", {"tensor": 2}, 3, "ulysses"),
        ("llama", {"tensor": 2}, 3, "in parts"),
        ("llama", {"context": 2}, 1, "ulysses"),
        ("llama", {"context": 2}, 3, "ulysses"),
        ("llama", {"context": 2}, 3, "ring"),
        ("mixtral", {"expert": 2}, 3, "ulysses"),
        ("mixtral", {"tensor": 2}, 3, "ulysses"),
    ],
    4: [
        ("llama", {"data": 2, "tensor": 2}, 1, "ulysses"),
        ("llama", {"data": 2, "tensor": 2}, 3, "ulysses"),
        ("llama", {"tensor": 4}, 3, "in parts"),
        ("llama", {"replicate": 2, "data": 2}, 3, "ulysses"),
        ("llama", {"context": 4}, 3, "ulysses"),
        ("llama", {"context": 2, "tensor": 2}, 3, "ulysses"),
        ("mixtral", {"data": 2, "expert": 2}, 3, "ulysses"),
        ("mixtral", {"expert": 2, "tensor": 2}, 3, "ulysses"),
    ],
}


def label(model: str, sizes: dict[str, int], stage: int, method: str) -> str:
    """A row's name in the table."""
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{model}, {mesh}{'' if method == 'ulysses' else f', {method}'}, stage {stage}"


def build(model: str, layers: int = LAYERS) -> Any:
    """7 M parameters of a Llama, 11 M of a Mixtral."""
    import transformers as hf

    text = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8,
            "use_cache": False}  # fmt: skip
    if model == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=384, intermediate_size=1024, **text))
    more = {"num_local_experts": 4}
    return hf.MixtralForCausalLM(hf.MixtralConfig(hidden_size=256, intermediate_size=512, **text, **more))


def made(model: str, mesh: Any, method: str, layers: int = LAYERS) -> tuple[Any, Any, Any, Any]:
    """(train step, first state, cuts, a rank's batch) on a mesh, which may be one of ranks that are not there."""
    import torch

    import zerofn
    from benchmarks.mesh.rows import IN_PARTS
    from zerofn import optim

    module, cuts = zerofn.skeleton(lambda: build(model, layers)), {}
    if mesh.size("tensor") > 1:
        cuts |= zerofn.parallel.tensor(module, mesh, module.tp_plan | (IN_PARTS if method == "in parts" else {}))
    if mesh.size("expert") > 1:
        cuts |= zerofn.moe.experts(module, mesh)
    tokens = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + mesh.rows.rank) * 7 % VOCABULARY
    batch = {"input_ids": tokens, "labels": tokens}
    if mesh.size("context") > 1:
        zerofn.parallel.context(module, mesh, method=method)
        batch = zerofn.parallel.split_sequence(batch, mesh)

    def init_state() -> Any:
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4))
        return zerofn.TrainState.create(params=dict(build(model, layers).named_parameters()), tx=tx)

    def train_step(state: Any, batch: dict[str, Any]) -> Any:
        loss, grads = state.value_and_grad(lambda p, x: torch.func.functional_call(module, p, (), x).loss)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step, init_state, cuts or None, batch


def planned(model: str, sizes: dict[str, int], stage: int, method: str, layers: int = LAYERS) -> Any:
    """The plan of a step on such a mesh, made without its ranks."""
    import zerofn

    mesh = zerofn.Mesh.planned(sizes)
    train_step, init_state, cuts, batch = made(model, mesh, method, layers)
    here = zerofn.Machine("here", "cpu", 4, 1e12, 1e10, {"float32": 1e10}, link=1e9, network=1e9, host_memory=1e12)
    given = {"machine": here, "stage": stage, "offload": None, "precision": None, "remat": None}
    return zerofn.plan(train_step, init_state, batch, mesh=mesh, cuts=cuts, **given)[0].plan


def measured(model: str, sizes: dict[str, int], stage: int, method: str) -> dict[str, Any]:
    """What a rank needs and sends."""
    import torch
    import torch.distributed as dist

    import zerofn
    from benchmarks.common import measure
    from zerofn import tree
    from zerofn.comm.axes import BETWEEN
    from zerofn.comm.mesh_groups import axes_along
    from zerofn.comm.transport import SentBytes
    from zerofn.job.in_flight import pending
    from zerofn.util.process import the

    mesh = zerofn.Mesh.make(**sizes)
    train_step, init_state, cuts, batch = made(model, mesh, method)
    state, step = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts), zerofn.compile(train_step)
    for _ in range(2):
        state, _ = step(state, batch)
    pending().wait_for_all()
    dist.barrier()
    before, on_wire = Counter(the(SentBytes).by_group), measure.loopback_bytes()
    for _ in range(STEPS):
        state, _ = step(state, batch)
    pending().wait_for_all()
    dist.barrier()
    on_wire, sent = measure.loopback_bytes() - on_wire, Counter[str]()
    for group, nbytes in (the(SentBytes).by_group - before).items():
        sent[BETWEEN.join(axes_along(mesh, group))] += nbytes
    (state, _), found = step.profile(state, batch)
    own = step.lower(state, batch)
    held = measure.storage_bytes([x for x in tree.leaves((state, batch)) if isinstance(x, torch.Tensor)])
    return {"peak": found.peak, "own": own.memory().total, "own_sent": own.sent_along, "wire": on_wire / STEPS,
            "held": held, "own_state": own.memory().peak["state"],
            "sent": {axis: nbytes / STEPS for axis, nbytes in sent.items() if axis}}  # fmt: skip


def child(world: int, rank: int, port: int) -> dict[str, Any]:
    """All rows of as many ranks, on one of them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = {label(*case): measured(*case) for case in CASES[world]}
    dist.destroy_process_group()
    return found


def rows(world: int) -> dict[str, Any]:
    """What was planned and what came, of all rows of as many ranks."""
    command = [*program(sys.executable, "benchmarks.mesh.foresight"), "--world", str(world)]
    command += ["--port", str(processes.free_port())]
    ranks = processes.run(f"{world} ranks", [[*command, "--rank", str(rank)] for rank in range(world)])
    found = {}
    for case in CASES[world]:
        name, (model, _, stage, method) = label(*case), case
        plan, whole = planned(*case), planned(model, {"data": 1}, stage, method)
        mine, all_of_it = plan.memory(), whole.memory()
        found[name] = {
            "planned": mine.total,
            "ranks": [rank[name] for rank in ranks],
            "sent": plan.sent_along,
            "state": mine.peak["state"] / all_of_it.peak["state"],
            "activations": _most(mine) / _most(all_of_it),
        }
        if method == "in parts":
            more, whole_more = planned(*case, 2 * LAYERS), planned(model, {"data": 1}, stage, method, 2 * LAYERS)
            # torch's attention on CPUs keeps the mask of each layer, one for all heads: every rank has it.
            masks = LAYERS * ROWS * LENGTH**2 * 4
            of_layers = _most(whole_more.memory()) - _most(all_of_it) - masks
            found[name]["of_layers"] = (_most(more.memory()) - _most(mine) - masks) / of_layers
    return found


def _most(memory: Any) -> int:
    """The most bytes of activations that wait for the backward pass."""
    return max(x.live["activations"] for x in memory.over_time)


def checks(found: dict[str, Any]) -> list[Check]:
    """What must hold."""
    out = []
    for name, row in found.items():
        for rank, came in enumerate(row["ranks"]):
            share = (row["planned"] if rank == 0 else came["own"]) / came["peak"]
            off = max(share / BYTES[1], BYTES[0] / share)
            out.append(Check(f"{name}, rank {rank}: peak, planned / measured, in {BYTES}", f"{share:.5f}", off, 1.0))
            if "stage 3" in name:  # at stage 1 shards are views of the gathered copy
                share = came["own_state"] / came["held"]
                off = max(share / BYTES[1], BYTES[0] / share)
                what = f"{name}, rank {rank}: state, planned / held, in {BYTES}"
                out.append(Check(what, f"{share:.5f}", off, 1.0))
            apart = sum(abs(came["sent"].get(x, 0) - n) for x, n in came["own_sent"].items())
            out.append(Check(f"{name}, rank {rank}: bytes sent that are not planned", f"{apart:.0f}", apart, 0.0))
        if row["sent"] != row["ranks"][0]["own_sent"]:
            out.append(Check(f"{name}: the plan of ranks that are not there sends others", str(row["sent"]), 1.0, 0.0))
        if "of_layers" in row:
            share = row["of_layers"] * len(row["ranks"])
            off = max(share / PARTS[1], PARTS[0] / share)
            what = f"{name}: activations of a layer, x ranks / those on one rank, in {PARTS}"
            out.append(Check(what, f"{share:.3f}", off, 1.0))
        share = _on_wire(row)
        out.append(Check(f"{name}: the loopback's bytes / those of all ranks", f"{share:.4f}", share, WIRE))
    return out


def _on_wire(row: dict[str, Any]) -> float:
    return row["ranks"][0]["wire"] / sum(sum(came["sent"].values()) for came in row["ranks"])


def table(found: dict[str, Any]) -> Table:
    """All rows."""
    out = Table("row", "planned MB", "measured MB", "state", "activations", "sent by a rank, MB", "loopback / sent")
    for name, row in found.items():
        first = row["ranks"][0]
        sent = ", ".join(f"{axis} {n / 1e6:.2f}" for axis, n in first["sent"].items())
        figures = (f"{row['planned'] / 1e6:.3f}", f"{first['peak'] / 1e6:.3f}")
        shares = (f"{row['state']:.3f}", f"{row['activations']:.3f}")
        out.add_row(name, *figures, *shares, sent, f"{_on_wire(row):.4f}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "mesh_foresight.json")
    for name in ("world", "rank", "port"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.world:
        print("RESULT " + json.dumps(child(args.world, args.rank, args.port)), flush=True)
        os._exit(0)
    console, found = Console(soft_wrap=True), {}
    for world in args.worlds:
        found |= rows(world)
    console.print(table(found))
    told = checks(found)
    args.out.write_text(json.dumps({**report.surroundings(), "rows": found}, indent=1) + "\n")
    for check in told:
        console.print(f"{'kept  ' if check.kept else 'MISSED'} {check.what}: {check.shown}", highlight=False)
    return 0 if all(check.kept for check in told) else 1


if __name__ == "__main__":
    sys.exit(main())

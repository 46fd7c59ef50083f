"""What gpu.py found: what must hold of it, and tables."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.common.check import Check

GIB = 1 << 30
# Batches of 128-token sentence pairs, English to Romanian, on a device of 24 GB, as published for transformers'
# integration of the peers. They are not run here.
PUBLISHED = {
    "t5-large": {"DDP": 16, "DDP, fp16": 20, "FairScale": 30, "DeepSpeed": 40, "DeepSpeed with offload": 50},
    "t5-3b": {"DeepSpeed with offload": 20},
}
COPY_SHARE, RATIO = 0.90, 1.05  # of the copy's bandwidth; offloaded to resident, from enough tokens on


# --- what must hold --------------------------------------------------------------------------------------------------


def checks(found: dict[str, Any]) -> list[Any]:
    out = [Check(row["what"], "yes" if row["passed"] else "no", 0.0 if row["passed"] else 1.0, 0.0)
           for part in ("correct", "ranks", "meshes", "nccl")
           for row in rows_of(found, part) if "passed" in row]  # fmt: skip
    speeds = {r["what"]: r["bytes"] / r["seconds"] for r in rows_of(found, "kernels") if "seconds" in r}
    seconds = {r["what"]: r["seconds"] for r in rows_of(found, "kernels") if "seconds" in r}
    for what, speed in speeds.items():
        if what not in ("copy", "AdamW, torch fused"):
            over = speeds["copy"] / speed
            out.append(Check(f"{what}: bandwidth, copy / ours", f"{over:.3f}", over, 1 / COPY_SHARE))
    ours = seconds.get("AdamW, fp32 master, fp32 moments")
    if ours is not None:
        over = ours / seconds["AdamW, torch fused"]
        out.append(Check("AdamW in fp32, ours / torch fused, seconds", f"{over:.3f}", over, 1.0))
    for part, name, wanted in (("large_offload", "t5-large", 50), ("big_24", "t5-3b", 32)):
        best = largest(found, part)
        out.append(
            Check(
                f"{name}, 24 GiB, offload: {wanted} / largest batch",
                str(best or "none"),
                wanted / best if best else None,
                1.0,
            )
        )
    return [*out, *_small_device(found), *_tokens(found)]


def _small_device(found: dict[str, Any]) -> list[Any]:
    row = next((r for r in rows_of(found, "big_10") if "losses" in r), None)
    what = "t5-3b, exact Adam: "
    if row is None:
        return [Check(what + "a step in 10 GiB and 32 GiB of host memory", "none", None, 1.0)]
    device, host = row["device_bytes"] / GIB, row["host_bytes"] / GIB
    falls = row["losses"][-1] / row["losses"][0]
    return [Check(what + "device memory, GiB", f"{device:.2f}", device, 10.0),
            Check(what + "host memory, GiB", f"{host:.2f}", host, 32.0),
            Check(what + "last loss / first", f"{falls:.4f}", falls, 1.0, strict=True)]  # fmt: skip


def _tokens(found: dict[str, Any]) -> list[Any]:
    return [Check(f"{r['tokens']:,} tokens a step (needed: {r['bound']:,.0f}): offloaded / resident, seconds",
                  f"{r['ratio']:.3f}", r["ratio"], RATIO)
            for r in rows_of(found, "tokens") if "ratio" in r and r["tokens"] >= r["bound"]]  # fmt: skip


def rows_of(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return found.get(part, {}).get("rows", [])


def largest(found: dict[str, Any], part: str) -> int | None:
    """The largest batch that ran."""
    return max((r["batch"] for r in rows_of(found, part) if "ms" in r), default=None)


# --- tables ----------------------------------------------------------------------------------------------------------


def kernel_table(found: dict[str, Any]) -> Any:
    table = Table("kernel", "ms", "GB/s", "of the copy's", title="Kernels")
    rows = [r for r in rows_of(found, "kernels") if "seconds" in r]
    for r in rows:
        speed, copy = (x["bytes"] / x["seconds"] for x in (r, rows[0]))
        table.add_row(r["what"], f"{1e3 * r['seconds']:.3f}", f"{speed / 1e9:.0f}", f"{speed / copy:.2f}")
    return table


def model_table(found: dict[str, Any]) -> Any:
    table = Table("model", "batch", "ms/step", "tokens/s", "device GiB", "in use / planned", "host GiB",
                  "layers recomputed", title="T5, pairs of 128 tokens, bf16 with exact AdamW")  # fmt: skip
    for part in ("large_resident", "large_offload", "big_24", "big_10"):
        for r in rows_of(found, part):
            if "ms" in r:
                table.add_row(
                    r["what"],
                    str(r["batch"]),
                    f"{r['ms']:.0f}",
                    f"{r['tokens_per_second']:,.0f}",
                    f"{r['device_bytes'] / GIB:.2f}",
                    f"{r['used_bytes'] / r['planned_bytes']:.3f}",
                    f"{r['host_bytes'] / GIB:.2f}",
                    "yes" if r.get("recompute", True) else "no",
                )
            elif "batch" in r:
                table.add_row(r["what"], str(r["batch"]), "out of memory")
    for model, systems in PUBLISHED.items():
        for system, batch in systems.items():
            table.add_row(f"{model}, {system}", str(batch), "published, not run", style="dim")
    for r in (r for r in rows_of(found, "ranks") if "planned" in r):
        table.add_row(r["what"], "", "", "", "", f"{r['ratio']:.3f}")
    for r in rows_of(found, "plain"):
        table.add_row("t5-large, resident, over plain torch's time", str(r["batch"]), f"{r['ratio']:.3f}")
    return table


def check_table(held: list[Check]) -> Table:
    table = Table("what", "measured", "limit", "", title="What must hold")
    for check in held:
        word = "kept" if check.kept else "MISSED"
        table.add_row(
            check.what,
            check.shown,
            f"{'<' if check.strict else '<='} {check.limit:.3f}",
            word,
            style="green" if check.kept else "bold red",
        )
    return table


def surroundings(dry: bool) -> dict[str, Any]:
    """Hardware, versions, date and commit."""
    git = (
        subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        if Path("/usr/bin/git").exists()
        else ""
    )
    there = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git or "unknown",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if not dry:
        there |= {"device": torch.cuda.get_device_name(0), "device_bytes": torch.cuda.mem_get_info(0)[1]}
    return there


def write(path: Path, run: dict[str, Any], held: list[Check]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    checks = [dataclasses.asdict(check) | {"kept": check.kept} for check in held]
    path.write_text(json.dumps(run | {"must_hold": checks}, indent=1) + "\n")

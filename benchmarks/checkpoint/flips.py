"""python -m benchmarks.checkpoint.flips   10,000 bits of a checkpoint are flipped, one at a time: is each of them told?

The bits are drawn from all files alike, the manifest too. About two minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

import zerofn
from benchmarks.common.processes import HERE
from benchmarks.common.report import surroundings
from zerofn import optim


def state() -> zerofn.TrainState:
    params = {f"h.{k}.w": torch.randn(60, 61) for k in range(4)} | {"h.0.b": torch.randn(61).bfloat16()}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))


def flips(folder: Path, number: int, seed: int) -> Counter[str]:
    """What came of each flip: the file's kind, and "told" or what else happened."""
    zerofn.save(folder, zerofn.shard(state, stage=3))
    like, drawn, found = zerofn.shard(state, stage=3), random.Random(seed), Counter[str]()
    files = sorted(folder.iterdir())
    sizes = [file.stat().st_size for file in files]
    for _ in range(number):
        (file,) = drawn.choices(files, weights=sizes if drawn.random() < 0.5 else None)  # or each file alike
        with file.open("r+b") as opened:
            at = drawn.randrange(file.stat().st_size)
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << drawn.randrange(8)]))
            opened.flush()
            found[f"{file.suffix.removeprefix('.')}: {outcome(folder, like)}"] += 1
            opened.seek(at)
            opened.write(bytes([byte]))
    zerofn.load(folder, like=like)
    return found


def outcome(folder: Path, like: object) -> str:
    try:
        zerofn.load(folder, like=like)
    except zerofn.CheckpointError:
        return "told"
    except Exception as error:
        return type(error).__name__
    return "not noticed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = flips(Path(folder) / "checkpoint", args.flips, args.seed)
    told = sum(count for what, count in found.items() if what.endswith(": told"))
    print(f"{told:,} of {args.flips:,} flips were told: {dict(found)}")
    result = {"flips": args.flips, "seed": args.seed, "found": dict(found)}
    (HERE / "results/flips.json").write_text(json.dumps(surroundings() | result, indent=1) + "\n")
    return int(told != args.flips)


if __name__ == "__main__":
    sys.exit(main())

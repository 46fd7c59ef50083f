"""python -m benchmarks.gpu.meshes BACKEND [--device cpu]: one of two or four ranks on one GPU, on meshes.

Hugging Face models in float64, cut along `tensor`, along `context` with exchanges, and by experts, beside plain torch
on that GPU; over NCCL also with blocks that go round a ring, which gloo does not send from a GPU's memory.
"""

from __future__ import annotations

import argparse
import math

import torch.distributed as dist

from benchmarks.gpu.ranks import say_all
from benchmarks.gpu.trial import begin
from benchmarks.mesh.equality import LIMIT, difference, words
from benchmarks.mesh.training import plain

Meshes = list[tuple[dict[str, int], str, tuple[str, ...]]]
MESHES: Meshes = [
    (
        {"tensor": 2},
        "ulysses",
        ("llama", "gpt2", "llama, 2 key heads", "mixtral", "t5", "bert", "deepseek_v3", "qwen3"),
    ),
    ({"context": 2}, "ulysses", ("llama", "gpt2")),
    ({"context": 2}, "ring", ("llama", "gpt2")),
    ({"expert": 2}, "ulysses", ("mixtral", "deepseek_v3")),
    ({"replicate": 2, "data": 2}, "ulysses", ("llama", "mixtral")),
    ({"data": 2, "tensor": 2}, "ulysses", ("llama", "t5")),
    ({"tensor": 2, "context": 2}, "ring", ("llama",)),
    ({"context": 4}, "ring", ("llama",)),
    ({"expert": 2, "context": 2}, "ulysses", ("mixtral",)),
]


def chosen(backend: str, dry: bool) -> Meshes:
    """Those of as many ranks as there are; on the CPU one model each."""
    fit = [x for x in MESHES if math.prod(x[0].values()) == dist.get_world_size()]
    fit = [x for x in fit if backend == "nccl" or x[1] != "ring"]
    return [(sizes, method, names[:1] if dry else names) for sizes, method, names in fit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["gloo", "nccl"])
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    begin(options.backend, device := options.device)
    for sizes, method, names in chosen(options.backend, device == "cpu"):
        for name in names:
            try:
                found, said = max(difference(name, sizes, method, plain(name, device), (0, 3), device)), {}
            except Exception as error:
                found, said = float("nan"), {"error": f"{type(error).__name__}: {error}"[:600]}
            say_all(f"{name} on {words(sizes, method)}: as plain torch", found <= LIMIT, difference=found, **said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

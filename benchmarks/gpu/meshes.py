"""python -m benchmarks.gpu.meshes [--device cpu]: one of two ranks on one GPU, over gloo, on meshes of one axis.

Hugging Face models in float64, cut along `tensor`, along `context` with exchanges, and by experts, beside plain torch
on that GPU. Blocks that go round a ring are not among them: gloo sends none from a GPU's memory.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from benchmarks.gpu.ranks import say_all
from benchmarks.mesh.equality import LIMIT, difference, words
from benchmarks.mesh.training import plain

MESHES: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"tensor": 2}, ("llama", "gpt2", "llama, 2 key heads", "mixtral", "t5", "bert", "deepseek_v3", "qwen3")),
    ({"context": 2}, ("llama", "gpt2")),
    ({"expert": 2}, ("mixtral", "deepseek_v3")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    for sizes, names in MESHES if device != "cpu" else [(sizes, names[:1]) for sizes, names in MESHES]:
        for name in names:
            try:
                found, said = max(difference(name, sizes, "ulysses", plain(name, device), (0, 3), device)), {}
            except Exception as error:
                found, said = float("nan"), {"error": f"{type(error).__name__}: {error}"[:600]}
            say_all(f"{name} on {words(sizes, 'ulysses')}: as plain torch", found <= LIMIT, difference=found, **said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

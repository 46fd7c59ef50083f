"""Layouts of DeepSpeed's own classes, as hashes: `python -m tests.sparse.deepspeed_layouts sparsity_config.py` writes
`deepspeed_layouts.json` by the file of that name of DeepSpeed 0.19.6 (deepspeed/ops/sparse_attention), which needs
torch alone.
"""

import hashlib
import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path

RECORDED = Path(__file__).with_suffix(".json")
CLASSES = {
    "dense": "DenseSparsityConfig",
    "fixed": "FixedSparsityConfig",
    "variable": "VariableSparsityConfig",
    "bigbird": "BigBirdSparsityConfig",
    "bslongformer": "BSLongformerSparsityConfig",
    "local_sliding_window": "LocalSlidingWindowSparsityConfig",
}
DIRECTIONS = ("bidirectional", "unidirectional")
HEADS = 4


def cases():
    """(name, parameters, blocks in a row)"""
    for num, direction in itertools.product((5, 16, 23), DIRECTIONS):
        both = direction == "bidirectional"
        yield "dense", {"block": 32}, num
        yield "fixed", {"attention": direction}, num
        yield "fixed", {"attention": direction, "num_local_blocks": 6, "num_global_blocks": 2}, num
        per_head = {"different_layout_per_head": True, "num_different_global_patterns": 3}
        yield "fixed", {"attention": direction, "horizontal_global_attention": both, **per_head}, num
        yield "variable", {"attention": direction}, num
        windows = {"local_window_blocks": [2, 5, 3], "global_block_indices": [1, 4, 40]}
        yield "variable", {"attention": direction, "num_random_blocks": 2, **windows}, num
        ends = {"global_block_indices": [0, 3], "global_block_end_indices": [2, 7]}
        more = {"horizontal_global_attention": both, "different_layout_per_head": True, "num_random_blocks": 1}
        yield "variable", {"attention": direction, "block": 64, **ends, **more}, num
        yield "bigbird", {"attention": direction}, num
        yield "bigbird", {"attention": direction, "num_global_blocks": 2, "num_sliding_window_blocks": 5}, num
        yield "bigbird", {"attention": direction, "different_layout_per_head": True}, num
        yield "bslongformer", {"attention": direction, "different_layout_per_head": True}, num
        yield "bslongformer", {"attention": direction, "num_sliding_window_blocks": 4, **ends}, num
        yield "local_sliding_window", {"attention": direction}, num
        yield "local_sliding_window", {"attention": direction, "num_sliding_window_blocks": 5, "block": 128}, num
    for num in (1, 7):
        yield "bigbird", {"num_global_blocks": 0, "num_sliding_window_blocks": 0}, num
        yield "bslongformer", {"num_sliding_window_blocks": 0, "global_block_indices": []}, num
        yield "local_sliding_window", {"num_sliding_window_blocks": 0}, num


def hash_of(blocks):
    """Of booleans [heads, blocks, blocks]."""
    return hashlib.sha256(bytes(blocks.flatten().tolist())).hexdigest()[:16]


def main(path):
    spec = importlib.util.spec_from_file_location("sparsity_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for seed, (name, options, num) in enumerate(cases()):
        random.seed(seed)
        config = getattr(module, CLASSES[name])(HEADS, **options)
        blocks = config.make_layout(num * config.block).bool()
        found.append({"name": name, "seed": seed, "attended": int(blocks.sum()), "hash": hash_of(blocks)})
    RECORDED.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Every public function answers a wrong argument with a sentence of its own, which names the argument."""

import inspect
import math
from pathlib import Path

import pytest
import torch

import zerofn
from tests.test_api import PUBLIC
from zerofn import collectives, moe, optim, parallel, random, sparse
from zerofn.cost.machine import machine_of

# Values of other kinds than what is asked for.
WRONG = {
    "flag": ["False", 2.5, [], len],
    "whole": ["2", 1.5, [2], math.nan, len],
    "number": ["2", [1.0], math.nan, 1j, len],
    "text": [3, ["a"], len],
    "path": [3, ["a"], "", len],
    "function": [3, "f", [len]],
    "tensor": [3.0, "x", [1.0], len],
    "dict": [3, "x", len],
    "list": [3, "01", len],
    "iterable": [3, len],
    "dtype": ["float32", 3],
    "device": ["nowhere", 3.5, []],
    "module": [3, "model", len],
    "axis": [3, ["data"], len],
    "ours": [3, "x", len, [3]],  # an object of a class of ours
    "function or number": ["2", [1.0], math.nan, 1j],
    "function or text": [3, [len], 2.5],
    "number or text": [["2"], len, [], b"2"],
    "signals": [["SIGTERM"], 3, [True], [0], len],
    "tree": [3, "x", len, {"w": "x"}],  # of tensors
    "numbers": ["x", len, {"w": "x"}],  # tensors, or numbers that become tensors
}
STATE = {"w": torch.ones(4)}
MESH = zerofn.Mesh.of(None)
ROUTING = moe.route(torch.eye(4, 2), 1)


def train(state, batch):
    loss, grads = state.value_and_grad(lambda p, x: (p["w"] * x).sum())(batch)
    return state.apply_gradients(grads), loss


def state():
    return zerofn.TrainState.create(params=STATE, tx=optim.sgd(0.1))


# (function, arguments with which it works): a value, or a value and its kind, of which others are tried.
CASES = [
    (zerofn.abort, {"message": ("x", "text")}),
    (zerofn.accumulate, {"vg": (zerofn.value_and_grad(len), "ours"), "n": (2, "whole")}),
    *((f, {"values": (STATE, "tree")}) for f in (
        zerofn.all_finite, zerofn.global_norm, zerofn.leaf_norms, zerofn.first_nonfinite
    )),
    (zerofn.compile, {
        "train_step": (train, "function"), "donate": (True, "flag"), "memory": (None, "number or text"),
        "remat": (None, "ours"), "machine": (None, "ours"), "backend": ("eager", "ours"), "passes": (None, "function"),
        "deterministic": (False, "flag"), "watch": ((), "list"),
    }),
    (zerofn.diloco, {
        "inner_step": (train, "function"), "outer": (None, "ours"), "every": (4, "whole"), "after": (0, "whole"),
        "fragments": (1, "whole"), "axis": ("replicate", "text"), "tau": (1, "whole"), "mix": (None, "number"),
        "wire": (None, "ours"),
    }),
    (zerofn.eager_region, {"fn": (len, "function"), "like": (len, "function")}),
    (zerofn.microbatched, {"fn": (len, "function"), "n": (2, "whole")}),
    (zerofn.even, {"loader": ([1], "iterable")}),
    (zerofn.export, {
        "path": ("a", "path"), "out": ("b", "path"), "part": (None, "text"), "dtype": (None, "dtype"),
        "max_shard_size": (None, "number or text"), "rename": (None, "function"),
    }),
    (zerofn.export_dcp, {"path": ("a", "path"), "out": ("b", "path")}),
    (zerofn.from_deepspeed, {"config": {}, "auto": (None, "dict"), "tx": optim.sgd(0.1), "world": (None, "whole")}),
    (zerofn.gather, {"values": STATE, "axis": (None, "axis"), "only": (None, "function or text")}),
    (zerofn.load, {"path": ("a", "path"), "like": STATE, "rename": (None, "function"), "donate": (False, "flag")}),
    (zerofn.load_dcp, {"path": ("a", "path"), "like": (state, "ours"), "only": (None, "text")}),
    (zerofn.load_deepspeed, {"path": ("a", "path"), "like": (state, "ours"), "tag": (None, "text")}),
    (zerofn.load_safetensors, {"path": ("a", "path"), "like": STATE, "strict": (True, "flag")}),
    (zerofn.load_state_dict, {"state_dict": (STATE, "dict"), "like": STATE, "strict": (True, "flag")}),
    (zerofn.normal_like, {"values": STATE, "key": (random.key(0), "tensor")}),
    (zerofn.plan, {
        "train_step": (train, "function"), "init_state": state, "batch": torch.ones(4), "world": (1, "whole"),
        "unit": (None, "function"), "hpz": (False, "flag"), "remat": (None, "ours"),
    }),
    (zerofn.progress, {
        "loader": ([1], "iterable"), "every": (10, "whole"), "total": (None, "whole"), "initial": (0, "whole"),
        "tokens": (None, "function"), "to": ((), "ours"),
    }),
    (zerofn.rank, {"among": ("", "text")}),
    (zerofn.world_size, {"among": ("", "text")}),
    (zerofn.register_step_pre_hook, {"hook": (list, "function")}),
    (zerofn.remat, {"fn": (len, "function")}),
    (zerofn.sampler, {
        "dataset": (range(4), "iterable"), "mesh": (None, "ours"), "shuffle": (True, "flag"), "seed": (0, "whole"),
    }),
    (zerofn.save, {"path": ("a", "path"), "state": STATE, "wait": (True, "flag")}),
    (zerofn.scatter, {"values": STATE, "like": (zerofn.shard({"params": STATE})["params"], "ours")}),
    (zerofn.shard, {
        "state_or_init": state, "stage": (3, "whole"), "mesh": (None, "ours"), "precision": (None, "ours"),
        "offload": (None, "ours"), "unit": (None, "function"), "device": (None, "device"), "cuts": (None, "dict"),
        "hpz": (False, "flag"), "wire": (None, "text"),
    }),
    (zerofn.skeleton, {"build": (lambda: torch.nn.Linear(1, 1), "function"), "device": (None, "device")}),
    (zerofn.tree_map, {"f": (id, "function"), "tree": STATE}),
    (zerofn.unshard, {"state": STATE, "rank": (None, "whole")}),
    (zerofn.value_and_grad, {
        "loss_fn": (len, "function"), "has_aux": (False, "flag"), "scale": (None, "ours"), "rng": (None, "tensor"),
        "frozen": (None, "function"),
    }),
    (zerofn.verify, {"path": ("a", "path")}),
    (zerofn.Checkpoints, {
        "folder": ("a", "path"), "every": (None, "whole"), "keep": (3, "whole"), "keep_best": (None, "ours"),
        "async_": (True, "flag"), "loader": (None, "ours"), "time_limit": (None, "number"),
        "replicate_every": (None, "whole"), "signals": ((), "signals"),
    }),
    (zerofn.DynamicLossScale, {
        "period": (2, "whole"), "factor": (2.0, "number"), "min_loss_scale": (1.0, "number"),
        "hysteresis": (1, "whole"),
    }),
    (zerofn.Machine.from_json, {"text": (machine_of("H100-8").to_json(), "text")}),
    (zerofn.Machine.load, {"path": ("a", "path")}),
    (zerofn.Mesh.planned, {"sizes": ({"data": 2}, "dict"), "num_ranks": (None, "whole")}),
    (zerofn.Mesh.of, {"mesh": (None, "ours")}),
    (MESH.axis, {"name": ("data", "text")}),
    (MESH.over, {"names": (("data",), "iterable")}),
    (zerofn.Offload, {
        "optimizer": ("cpu", "ours"), "params": (None, "ours"), "path": (None, "ours"), "fraction": (1.0, "number"),
        "update": ("auto", "text"),
    }),
    (zerofn.Pass, {"fn": (len, "function"), "scope": ("step", "text"), "name": ("x", "text")}),
    (zerofn.Precision, {**dict.fromkeys(("param", "compute", "reduce"), (None, "dtype")), "wire": (None, "text")}),
    (zerofn.TrainState.create, {
        "params": (STATE, "numbers"), "tx": (optim.sgd(0.1), "ours"), "loss_scale": (None, "ours"),
        "seed": (0, "whole"),
        "frozen": (None, "function"),
    }),
    (state().replace, {
        "step": (torch.tensor(0), "whole"), "rng": (random.key(0), "whole"), "tx": (optim.sgd(0.1), "ours"),
        "loss_scale": (None, "ours"),
    }),
    (state().value_and_grad, {"loss_fn": (len, "function"), "has_aux": (False, "flag")}),
    (state().apply_gradients, {"grads": STATE, "on_nonfinite": ("skip", "text")}),
    (random.key, {"seed": (0, "whole")}),
    (random.fold_in, {"key": (random.key(0), "tensor"), "data": (1, "whole")}),
    *((f, {"x": (torch.ones(2), "tensor"), "axis": ("data", "axis")}) for f in (
        collectives.all_gather, collectives.all_reduce, collectives.psum, collectives.reduce_scatter, collectives.vary,
        collectives.same, collectives.all_to_all,
    )),
    (collectives.mean, {"x": (torch.ones(2), "tensor")}),
    (collectives.permute, {"x": (torch.ones(2), "tensor"), "sources": ([0], "list"), "axis": ("data", "axis")}),
    (moe.combine, {"y": (torch.ones(2, 4, 3), "tensor"), "routing": (ROUTING, "ours"), "axis": (None, "axis")}),
    (moe.dispatch, {"x": (torch.ones(4, 3), "tensor"), "routing": (ROUTING, "ours"), "axis": (None, "axis")}),
    (moe.route, {
        "logits": (torch.ones(4, 2), "tensor"), "k": (1, "whole"), "capacity": (1.0, "number"),
        "min_capacity": (4, "whole"), "priority": ("choice", "ours"), "noise": (None, "tensor"),
        "noisy_first": (True, "flag"), "normalize": (None, "flag"), "used": (None, "tensor"),
    }),
    (moe.gumbel, {"logits": (torch.ones(4, 2), "tensor"), "key": (random.key(0), "tensor")}),
    (moe.z_loss, {"logits": (torch.ones(4, 2), "tensor")}),
    (parallel.context, {"model": (torch.nn.Linear(1, 1), "module"), "mesh": (MESH, "ours")}),
    (parallel.tensor, {"model": (torch.nn.Linear(1, 1), "module"), "mesh": (MESH, "ours"), "plan": (None, "dict")}),
    (parallel.tiled_loss, {"model": (torch.nn.Linear(1, 1), "module"), "tiles": (8, "whole")}),
    (parallel.split_sequence, {"batch": ({}, "dict"), "mesh": (MESH, "ours"), "shift": (True, "flag")}),
    (parallel.balanced_chunks, {
        "layout": sparse.causal, "length": (4, "whole"), "mesh": (MESH, "ours"), "causal": (True, "flag"),
        "heads": (1, "whole"),
    }),
    (sparse.attention, {
        **dict.fromkeys("qkv", (torch.ones(1, 1, 4, 2), "tensor")), "layout": sparse.causal,
        "is_causal": (False, "flag"), "scale": (None, "number"), "dropout": (0.0, "number"),
    }),
    (sparse.chosen, {
        "index": (torch.zeros(1, 1, 1, 1, dtype=torch.int64), "tensor"), "block": (4, "whole"), "queries": (4, "whole"),
    }),
    (sparse.documents, {"cu_seqlens": (torch.tensor([0, 4]), "tensor")}),
    (sparse.layout, {
        "pattern": (sparse.causal, "ours"), "queries": (4, "whole"), "keys": (4, "whole"), "heads": (1, "whole"),
    }),
    (sparse.pattern, {"function": (len, "function")}),
    (sparse.sliding_window, {"window": (4, "whole")}),
    (sparse.use, {
        "model": (torch.nn.MultiheadAttention(2, 1), "module"), "layout": sparse.causal, "layers": (None, "list"),
    }),
    *((f, {"num": (4, "whole")}) for f in (sparse.prefix, sparse.sinks)),
    (sparse.deepspeed.fixed, {
        "block": (16, "whole"), "num_local_blocks": (4, "whole"), "attention": ("bidirectional", "text"),
        "horizontal_global_attention": (False, "flag"),
    }),
    (sparse.deepspeed.variable, {
        "local_window_blocks": ([4], "list"), "global_block_indices": ([0], "list"), "seed": (0, "whole"),
    }),
    (parallel.Slice, {"dim": (0, "whole"), "parts": (1, "whole"), "input": ("equal", "text")}),
]  # fmt: skip
TX = optim.sgd(0.1)
# What optimizers and schedules need; all that is annotated as a number, a flag or a function is tried besides.
NEEDS = {
    "learning_rate": 0.1, "decay": 0.9, "init_value": 0.1, "end_value": 0.2, "peak_value": 0.2, "transition_steps": 10,
    "decay_steps": 20, "decay_rate": 0.9, "warmup_steps": 5, "power": 1.0, "clipping": 1.0, "max_delta": 1.0,
    "threshold": 1.0, "max_norm": 1.0, "value": 0.1, "step_size": 0.1, "sync_period": 2, "slow_step_size": 0.5,
    "total_num_steps": 2000, "step_size_fn": abs, "fast_optimizer": TX, "optimizer": TX, "inner": TX, "mask": None,
    "labels": lambda leaf: "a", "transforms": {"a": TX}, "cosine_kwargs": [], "schedules": [], "boundaries": [],
    "init": lambda params: (), "update": lambda grads, state, params: (grads, state), "inner_factory": optim.sgd,
    "name": "", "args": (), "fn": abs, "freeze_step": 10, "var_freeze_step": 10,
}  # fmt: skip
KINDS = {
    "bool": "flag",
    "int": "number",
    "float": "number",
    "float | None": "number",
    "ScalarOrSchedule": "function or number",
}


def of_optim():
    for name in PUBLIC[optim].split():
        function = getattr(optim, name)
        if isinstance(function, type) or name in ("apply_updates", "chain"):
            continue
        parameters = inspect.signature(function).parameters.values()
        base = {p.name: NEEDS.get(p.name, p.default) if p.default is p.empty else p.default for p in parameters}
        kinds = {p.name: KINDS.get(p.annotation) for p in parameters}
        yield function, {k: (v, kinds[k]) if kinds[k] else v for k, v in base.items()}


def is_tried(x):
    """Whether an argument is a value with the kind of it."""
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], str) and x[1] in WRONG


@pytest.mark.parametrize(
    ("function", "given"), [pytest.param(f, given, id=f.__qualname__) for f, given in (*CASES, *of_optim())]
)
def test_a_wrong_argument_is_told_by_its_name(tmp_path, monkeypatch, function, given):
    monkeypatch.chdir(tmp_path)
    base = {name: x[0] if is_tried(x) else x for name, x in given.items()}
    for name, (right, kind) in ((name, x) for name, x in given.items() if is_tried(x)):
        for wrong in WRONG[kind]:
            if callable(wrong) and callable(right):
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                function(**{**base, name: wrong})
                pytest.fail(f"{name}={wrong!r} was taken")
            where = Path(caught.traceback[-1].path)
            assert where.is_relative_to(Path(zerofn.__file__).parent), (name, wrong, where, caught.value)
            assert name in str(caught.value), (wrong, caught.value)
    assert not list(tmp_path.iterdir())

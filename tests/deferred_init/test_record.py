from __future__ import annotations

import copy
import dataclasses
import random
import weakref
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import tiny_models
from zerofn import tree
from zerofn.deferred_init import record


def replayed(init: Any, seed: int = 5) -> tuple[Any, list[torch.Tensor]]:
    """The leaves that a replay hands out, in order of `Replay.leaves`; checks the generator."""
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    replay = record(init)
    assert torch.equal(torch.get_rng_state(), before), "recording moved the generator"
    leaves: dict[int, torch.Tensor] = {}
    for index, tensor in replay.run():
        assert index not in leaves
        leaves[index] = tensor.clone()
    return replay, [leaves[i] for i in range(len(replay.leaves))]


def check(init: Any, seed: int = 5) -> None:
    """Replay equals the plain call: bits, strides, dtypes, and the generator's state afterwards."""
    torch.manual_seed(seed)
    plain, treedef = tree.flatten(init())
    after = torch.get_rng_state()
    replay, leaves = replayed(init, seed)
    assert torch.equal(torch.get_rng_state(), after)
    expected = [x for x in plain if isinstance(x, torch.Tensor)]
    assert len(leaves) == len(expected) == len(replay.leaves)
    for want, got, fake in zip(expected, leaves, replay.leaves, strict=True):
        want = want.detach()
        assert want.dtype == got.dtype == fake.dtype
        assert want.shape == got.shape == fake.shape
        assert want.device == fake.device
        assert torch.equal(want, got)
        assert not got.requires_grad and not fake.requires_grad
    found, treedef_found = tree.flatten(replay.output)
    assert treedef_found == treedef
    rest = [x for x in plain if not isinstance(x, torch.Tensor)]
    assert rest == [x for x in found if not isinstance(x, torch.Tensor)]


def with_moments(build: Any) -> Any:
    def init() -> Any:
        params = dict(build().named_parameters())
        mu, nu = ({k: torch.zeros_like(p) for k, p in params.items()} for _ in range(2))
        return {"params": params, "mu": mu, "nu": nu, "step": 0}

    return init


@pytest.mark.part(name=["resnet", "mamba"])
@pytest.mark.parametrize("name", list(tiny_models.BUILDERS))
def test_transformers_model_with_moments(name: str) -> None:
    check(with_moments(tiny_models.BUILDERS[name]))


class Everything(nn.Module):
    """Every initialiser of torch.nn.init, tied and frozen weights, buffers, views, copies."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 30), nn.Linear(30, 20)
        self.conv, self.bn = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.embed = nn.Embedding(10, 20, padding_idx=0)
        self.head = nn.Linear(20, 10, bias=False)
        self.head.weight = self.embed.weight
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)  # deep copies
        self.lstm = nn.LSTM(8, 8, 2)
        self.twin = copy.deepcopy(self.b)
        nn.init.xavier_normal_(self.a.weight)
        nn.init.orthogonal_(self.b.weight)
        nn.init.dirac_(self.conv.weight)
        nn.init.trunc_normal_(self.b.bias)
        nn.init.trunc_normal_(self.twin.bias, std=2.0, a=1.0, b=2.0)
        nn.init.sparse_(self.a.weight, 0.2)
        nn.init.eye_(self.head.weight.data[:5])
        nn.init.kaiming_uniform_(self.twin.weight.data.t())
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 5)]
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.full = nn.Parameter(torch.full((3,), self.rates[-1]), requires_grad=False)
        self.a.bias.data = torch.randn(30, dtype=torch.float64).float()
        with torch.no_grad():
            self.scale *= 1 + torch.rand_like(self.scale)
            self.twin.weight[3:7, 1::2].uniform_()
            torch.add(self.full, 1, out=self.full)
            self.bn.running_var.copy_(self.bn.running_mean + torch.arange(8))


def test_plain_module() -> None:
    def init() -> Any:
        module = Everything()
        params = dict(module.named_parameters(remove_duplicate=False))
        ema = {k: p.clone() for k, p in params.items()}
        half = {k: p.to(torch.bfloat16) for k, p in params.items()}
        return {"params": params, "buffers": dict(module.named_buffers()), "ema": ema, "half": half}

    check(init)


@dataclasses.dataclass
class Holder:
    w: Any
    name: str = "holder"


Pair = namedtuple("Pair", "x y")


def test_modules_converted_inside() -> None:
    """`module.to(dtype)` swaps tensors, which fake ones refuse; tied weights are converted once."""

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].weight = model[0].weight
        return model

    for convert in (nn.Module.double, nn.Module.bfloat16, lambda m: m.to(torch.float16)):
        check(lambda convert=convert: dict(convert(tied()).named_parameters()))
        check(lambda convert=convert: convert(tied()).state_dict())
    replay, _ = replayed(lambda: tied().to(torch.bfloat16).state_dict(), 0)
    assert torch.utils.swap_tensors.__module__ == "torch.utils"
    assert replay.output["0.weight"].dtype == torch.bfloat16


def made_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 3))
    model[1].weight = model[0].weight  # tied until `to_empty`
    for part in model.to_empty(device="cpu"):
        part.reset_parameters()
    return model


def skipped() -> nn.Module:
    model = nn.utils.skip_init(nn.Linear, 4, 4)
    model.reset_parameters()
    return model


def moved_to_meta() -> nn.Module:
    model = nn.Linear(4, 4).to("meta").to_empty(device="cpu")
    model.reset_parameters()
    return model.double()


@pytest.mark.parametrize("build", [made_on_meta, skipped, moved_to_meta])
def test_modules_made_without_memory(build: Any) -> None:
    before = nn.Module._apply
    check(lambda: build().state_dict())
    check(lambda: dict(build().named_parameters()))
    assert nn.Module._apply is before


def test_lazy_layers_are_refused() -> None:
    def init() -> Any:
        model = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(3))
        model(torch.ones(2, 4))
        return model.state_dict()

    with pytest.raises(RuntimeError, match=r"test_record.py:\d+: .* lazy layer, .* Give the layer its sizes"):
        record(init)
    assert init()["1.weight"].shape == (3, 4)


def test_containers_and_other_leaves() -> None:
    def init() -> Any:
        w = torch.randn(3, 4)
        whole = torch.randn(6)
        return {
            "z": Holder(w),
            "a": [w, w[1], (w.t(), None)],
            "pair": Pair(whole[:2], whole[4:]),
            "rest": [1, 2.5, True, "text", torch.zeros(()), torch.ones(0, 3), torch.eye(2)],
        }

    check(init)


def test_leaves_that_share_memory_come_together() -> None:
    def init() -> Any:
        w = torch.randn(4)
        other = torch.randn(4)
        return [w, other, w, w[1:]]

    order = [index for index, _ in record(init).run()]
    assert order == [0, 2, 3, 1]


def test_default_dtype_at_the_time_counts() -> None:
    def init() -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            inside = [torch.randn(3), torch.arange(3) / 3]
        finally:
            torch.set_default_dtype(torch.float32)
        return [*inside, torch.randn(3), torch.arange(3) / 3]

    check(init)


# --- generators


def test_seeds_inside() -> None:
    from torch import manual_seed as seed_under_another_name

    def init() -> Any:
        out = [torch.randn(3)]
        torch.manual_seed(1)
        out.append(torch.randn(3))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            out.append(torch.randn(3))
            with torch.random.fork_rng():
                out.append(torch.randn(3))
        out.append(torch.randn(3))
        seed_under_another_name(1)
        seed_under_another_name(1)
        state = torch.get_rng_state()
        out.append(torch.randn(3))
        torch.default_generator.set_state(state)
        out.append(torch.randn(3))
        seed_under_another_name(torch.initial_seed() + 1)
        return out

    check(init)


FORWARD = {
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=None)),
    "batch norm in evaluation mode": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6).eval()),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(0, (1, 4)), nn.InstanceNorm1d(4, track_running_stats=True)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)),
    "LSTM": lambda: nn.LSTM(5, 3, num_layers=2),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(5)),
}


@pytest.mark.parametrize("build", FORWARD.values(), ids=FORWARD.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_forward_pass_inside(build: Any, mode: Any) -> None:
    """A dry run changes the statistics of batch norm, whose operation does not say that it writes them."""

    def init() -> Any:
        model = build()
        with mode():
            out = model(torch.arange(20.0).view(4, 5) / 7)
        return dict(model.state_dict()), [x.clone() for x in tree.leaves(out)]

    check(init)


def test_what_a_kernel_keeps_for_its_backward_pass_is_not_replayed() -> None:
    def init() -> Any:
        model = nn.LSTM(5, 3)
        out, _ = model(torch.ones(4, 2, 5))
        return torch.autograd.grad(out.sum(), list(model.parameters()))

    with pytest.raises(RuntimeError, match="Do not compute gradients in the initialisation function"):
        list(record(init).run())


def test_the_same_seed_for_every_layer() -> None:
    def init() -> Any:
        out = []
        for _ in range(3):
            torch.manual_seed(0)
            out += [torch.randn(3), torch.rand(2)]
        return out

    check(init)


def test_fork_restores_the_callers_state() -> None:
    def init() -> Any:
        with torch.random.fork_rng():
            return [torch.randn(3)]

    check(init)


def test_own_generators() -> None:
    outside = torch.Generator().manual_seed(3)

    def init() -> Any:
        inside = torch.Generator().manual_seed(2)
        copied = torch.Generator()
        copied.set_state(torch.get_rng_state())
        out = [torch.randn(3, generator=g) for g in (inside, outside, copied)]
        out.append(torch.randn(3))
        copied.set_state(inside.get_state())
        inside.manual_seed(2)
        return out + [torch.empty(3).uniform_(generator=g) for g in (inside, outside, copied)]

    def fresh() -> Any:
        outside.manual_seed(3)
        return init()

    check(fresh)
    outside.manual_seed(3)
    expected = init()
    state = outside.get_state()
    outside.manual_seed(3)
    for index, tensor in record(init).run():
        if index in (1, 5):
            assert torch.equal(tensor, expected[index])
    assert torch.equal(outside.get_state(), state)


# --- values from elsewhere


def test_numpy_and_values_that_are_not_random() -> None:
    table = np.arange(6, dtype=np.float32).reshape(2, 3)

    def init() -> Any:
        np.random.seed(0)
        drawn = torch.from_numpy(np.random.standard_normal((2, 3)))
        positions = torch.arange(4)[torch.arange(4) > 1]
        grid = torch.linspace(0, 1, 3).numpy() * 2
        changed = torch.from_numpy(table).mul_(2)
        if (torch.ones(2) > 0).all():
            drawn = drawn.float() * 3
        return [drawn, positions, torch.from_numpy(grid), changed, positions.tolist()]

    def fresh() -> Any:
        nonlocal table
        table = np.arange(6, dtype=np.float32).reshape(2, 3)
        return init()

    check(fresh)


def test_tensors_of_the_caller_are_not_written() -> None:
    outside = torch.ones(3)
    kept = nn.Parameter(torch.ones(2))

    def init() -> Any:
        return [outside.add_(1), kept, torch.full((2,), 3.0)]

    leaves = replayed(init)[1]
    assert leaves[0].tolist() == [2.0, 2.0, 2.0] and outside.tolist() == [1.0, 1.0, 1.0]
    assert leaves[1].tolist() == [1.0, 1.0]


def test_constants_are_freed_on_the_way() -> None:
    storages: list[Any] = []

    def init() -> Any:
        arrays = [torch.from_numpy(np.full(100, i, dtype=np.float32)) for i in range(4)]
        return [a + 1 for a in arrays]

    replay = record(init)
    storages = [weakref.ref(v.constant) for v in replay._versions if v.constant is not None]
    assert len(storages) == 4
    alive = [sum(s() is not None for s in storages) for _ in replay.run()]
    assert alive == [3, 2, 1, 0]


# --- what cannot be replayed


def test_branch_on_a_random_value_names_the_line() -> None:
    def init() -> Any:
        w = torch.randn(3)
        return [w * w.norm().item()]

    with pytest.raises(RuntimeError, match=r"test_record.py:\d+: initialisation reads the value"):
        record(init)
    with pytest.raises(RuntimeError, match=r"test_record.py:\d+: .* random tensor"):
        record(lambda: [torch.from_numpy(torch.randn(2).numpy())])
    with pytest.raises(RuntimeError, match=r"test_record.py:\d+: .* random tensor"):
        record(lambda: [torch.ones(2)] if torch.rand(2).sum() > 1 else [])


def test_a_failed_recording_leaves_the_generator_alone() -> None:
    def init() -> Any:
        torch.manual_seed(1)
        torch.randn(3)
        raise ValueError("of the user")

    torch.manual_seed(9)
    before, sampler = torch.get_rng_state(), nn.init._no_grad_trunc_normal_
    with pytest.raises(ValueError, match="of the user"):
        record(init)
    assert torch.equal(torch.get_rng_state(), before)
    assert nn.init._no_grad_trunc_normal_ is sampler


def test_unknown_tensors_raise(tmp_path: Any) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    with pytest.raises(RuntimeError, match=r"test_record.py:\d+: a tensor .* cannot be replayed"):
        record(lambda: [torch.load(tmp_path / "w.pt")["w"] + 1])
    with pytest.raises(RuntimeError, match="dense plain tensors only"):
        record(lambda: [torch.ones(2).to_sparse()])


def test_a_module_is_no_leaf() -> None:
    with pytest.raises(TypeError, match=r"named_parameters"):
        record(lambda: [nn.Linear(2, 2)])


def test_a_recording_runs_once() -> None:
    replay = record(lambda: [torch.ones(2)])
    assert len(list(replay.run())) == 1
    with pytest.raises(RuntimeError, match="record it again"):
        replay.run()


# --- memory


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensor memory alive at once, of what operations inside made."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        return out

    def _meet(self, storage: Any) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def peak_and_sizes(init: Any) -> tuple[int, int, int]:
    """(peak bytes while replaying, bytes of the largest leaf, bytes of all leaves)."""
    torch.manual_seed(0)
    replay = record(init)
    sizes = [t.numel() * t.element_size() for t in replay.leaves]
    with PeakBytes() as memory:
        for _, tensor in replay.run():
            del tensor
    assert memory.live == 0
    return memory.peak, max(sizes), sum(sizes)


@pytest.mark.part(name=["llama", "resnet", "t5"])
@pytest.mark.parametrize("name", list(tiny_models.BUILDERS))
def test_peak_of_tiny_models(name: str) -> None:
    peak, largest, total = peak_and_sizes(with_moments(tiny_models.BUILDERS[name]))
    assert peak <= 3 * largest + 4096
    assert total > 2.5 * peak


def test_peak_of_samplers_that_need_memory_of_their_own() -> None:
    def init() -> Any:
        sampled = [nn.init.trunc_normal_(torch.empty(200, 100)) for _ in range(10)]
        return sampled + [nn.init.orthogonal_(torch.empty(100, 100)) for _ in range(10)]

    peak, largest, _ = peak_and_sizes(init)
    assert peak <= 4.5 * largest


def test_peak_of_a_deep_model() -> None:
    config = hf.LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=16, num_attention_heads=8
    )
    peak, largest, total = peak_and_sizes(with_moments(lambda: hf.LlamaForCausalLM(config)))
    assert total > 3 * 4 * 45e6
    assert peak <= 3 * largest + 4096
    assert peak < total / 30


def test_what_is_made_from_leaves_at_the_end_is_made_one_by_one() -> None:
    def init() -> Any:
        layers = [nn.Linear(100, 100) for _ in range(20)]
        zeros = [torch.zeros(100, 100) for _ in range(20)]
        ema = [layer.weight.detach().clone() for layer in layers]
        half = [layer.weight.detach().bfloat16() for layer in layers]
        ones = [z + 1 for z in zeros]
        mean = [layer.weight.detach().mul(0.5).add_(o) for layer, o in zip(layers, ones, strict=True)]
        return [ema, half, zeros, ones, mean, [layer.weight for layer in layers]]

    check(init)
    peak, largest, total = peak_and_sizes(init)
    assert peak <= 6 * largest and total > 100 * largest


# --- schedules


def test_random_programs() -> None:
    """Random mixtures of draws, views, in-place writes and copies: bits and generator as plain."""

    def program(choices: random.Random) -> Any:
        tensors = [torch.empty(4, 6).normal_(), torch.zeros(4, 6), torch.ones(4, 6)]
        kept = []
        for _ in range(40):
            x, y = choices.choice(tensors), choices.choice(tensors)
            row = choices.randrange(4)
            match choices.randrange(11):
                case 0:
                    x.normal_()
                case 1:
                    x[row].uniform_()
                case 2:
                    x.mul_(0.5).add_(y)
                case 3:
                    x.copy_(y)
                case 4:
                    tensors.append(x + y)
                case 5:
                    tensors.append(torch.randn_like(x))
                case 6:
                    x[row] = y[3 - row]
                case 7:
                    x.zero_()
                case 8:
                    kept.append(x.clone())
                case 9:
                    tensors.append(torch.full_like(y, 2.0))
                case 10:
                    x.data = y.detach().clone() * 2
        return [tensors, kept]

    for seed in range(30):
        check(lambda seed=seed: program(random.Random(seed)), seed)

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from tests.support import tiny_models
from zerofn.deferred_init.skeleton import skeleton


def plain_and_skeleton(build: Any, seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """Both builds from the same generator state; checks what must hold for every module."""
    torch.manual_seed(seed)
    plain = build()
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    shapes = skeleton(build)
    assert torch.equal(torch.get_rng_state(), before)
    params = dict(plain.named_parameters(remove_duplicate=False))
    metas = dict(shapes.named_parameters(remove_duplicate=False))
    assert list(params) == list(metas)
    assert len(set(map(id, params.values()))) == len(set(map(id, metas.values())))
    for name, meta in metas.items():
        real = params[name]
        assert meta.is_meta and type(meta) is type(real)
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())
        assert meta.requires_grad == real.requires_grad
    real_buffers = dict(plain.named_buffers(remove_duplicate=False))
    buffers = dict(shapes.named_buffers(remove_duplicate=False))
    assert list(real_buffers) == list(buffers)
    for name, buffer in buffers.items():
        assert not buffer.is_meta and buffer.dtype == real_buffers[name].dtype
        assert torch.equal(buffer, real_buffers[name])
    return plain, shapes


def same_output(plain: nn.Module, shapes: nn.Module, kwargs: dict[str, Any]) -> None:
    plain.eval()
    shapes.eval()
    with torch.no_grad():
        expected = plain(**kwargs)
        found = functional_call(shapes, dict(plain.named_parameters()), (), kwargs)
    expected, found = (getattr(x, "logits", x) for x in (expected, found))
    assert torch.equal(expected, found)
    assert all(p.is_meta for p in shapes.parameters())


@pytest.mark.part(name=["gpt2", "t5", "resnet", "mixtral"])
@pytest.mark.parametrize("name", list(tiny_models.BUILDERS))
def test_transformers_models(name: str) -> None:
    plain, shapes = plain_and_skeleton(tiny_models.BUILDERS[name])
    same_output(plain, shapes, tiny_models.batch(name))


class Odd(nn.Module):
    """Parameters and buffers made in less common ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("features", torch.randn(4, 4))  # after draws that are skipped
        own = nn.Parameter(torch.randn(4), requires_grad=False)
        own.note = "kept"  # type: ignore[attr-defined]
        self.a, self.b = own, own
        self.list = nn.ParameterList([torch.ones(2), torch.zeros(3)])
        self.dict = nn.ParameterDict({"x": nn.Parameter(torch.ones(2))})
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self._parameters["direct"] = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.first.bias.data = torch.full((4,), 2.0)
        nn.init.trunc_normal_(self.first.weight)
        self.list[0].data.normal_()
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.register_parameter("absent", None)
        self.plain = torch.rand(4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.normed(self.first(x) @ self.features + self.a * self.plain))
        return self.head(x) + self.list[1].sum() * self.direct.sum()


def test_parameters_made_in_odd_ways() -> None:
    plain, shapes = plain_and_skeleton(Odd)
    assert shapes.a is shapes.b and shapes.a.note == "kept"
    assert shapes.head.weight is shapes.embed.weight
    assert torch.equal(shapes.plain, plain.plain)
    same_output(plain, shapes, {"x": torch.randn(3, 4)})


def test_buffers_made_from_parameters() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = parametrizations.spectral_norm(nn.Linear(4, 3))
            self.weight = nn.Parameter(torch.randn(3))
            self.register_buffer("average", self.weight.detach().clone())
            self.register_buffer("same", self.average)
            self.register_buffer("other", torch.arange(3))

    _, shapes = plain_and_skeleton(Average)
    assert shapes.average is shapes.same


def test_a_build_may_move_its_module() -> None:
    """Parameters stay on "meta", with the dtype and the strides that the move gives them."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(4, 4))
        made.register_buffer("noise", torch.randn(3))
        return made

    for move in (
        lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.to("cpu", memory_format=torch.channels_last), lambda m: m.double().to(torch.device("cpu")),
    ):  # fmt: skip
        found, expected = skeleton(lambda move=move: move(build())), move(build())
        for (name, x), y in zip(found.named_parameters(), expected.parameters(), strict=True):
            assert (x.device.type, x.dtype, x.stride()) == ("meta", y.dtype, y.stride()), name
        assert all(torch.equal(x, y) for x, y in zip(found.buffers(), expected.buffers(), strict=True))


def test_buffers_go_to_the_device() -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        module[1].running_mean = module[0].running_mean
        return module

    module = skeleton(build, device="meta")  # stands for another device
    assert {x.device.type for x in module.buffers()} == {"meta"}
    assert module[1].running_mean is module[0].running_mean
    assert skeleton(build).get_buffer("0.running_var").device.type == "cpu"


def test_seeds_inside() -> None:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.second = nn.Linear(3, 3)
                self.register_buffer("inside", torch.randn(3))
            self.register_buffer("outside", torch.randn(3))

    plain_and_skeleton(Seeded)


def test_old_style_weight_norm() -> None:
    def build() -> nn.Module:
        with pytest.warns(FutureWarning):
            return nn.utils.weight_norm(nn.Linear(3, 2))

    plain, shapes = plain_and_skeleton(build)
    same_output(plain, shapes, {"input": torch.randn(2, 3)})


def test_one_real_parameter_at_a_time() -> None:
    alive: list[Any] = []
    counts: list[int] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.empty(8, 8))
            alive.append(weakref.ref(weight.untyped_storage()))
            self.weight = weight
            del weight
            counts.append(sum(ref() is not None for ref in alive))

    gc.disable()
    try:
        skeleton(lambda: nn.Sequential(*(Layer() for _ in range(5))))
    finally:
        gc.enable()
    assert counts == [0] * 5


def test_patches_are_undone_and_other_threads_are_left_alone() -> None:
    register, sampler = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    others: list[nn.Module] = []

    def build() -> nn.Module:
        thread = threading.Thread(target=lambda: others.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        skeleton(build)
    assert not others[0].weight.is_meta
    assert nn.Module.register_parameter is register
    assert nn.init._no_grad_trunc_normal_ is sampler


def test_what_has_no_skeleton() -> None:
    with pytest.raises(TypeError, match="takes a function that makes the module, got the Linear itself"):
        skeleton(nn.Linear(2, 3))
    with pytest.raises(TypeError, match="must return a torch.nn.Module; it returned a dict"):
        skeleton(dict)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="layer is lazy"):
        skeleton(lambda: nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(RuntimeError, match=r"test_skeleton.py:\d+: .* value of a parameter"):
        skeleton(lambda: nn.Linear(2, 2 + int(nn.Linear(2, 2).weight.sum().item() > 0)))
    with pytest.raises(RuntimeError, match=r"test_skeleton.py:\d+: .* use the module itself, build\(\)"):
        skeleton(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match=r"computes with the values .* use the module itself, build\(\)"):
        skeleton(lambda: nn.utils.fuse_linear_bn_eval(nn.Linear(2, 2).eval(), nn.BatchNorm1d(2).eval()))


def test_a_module_in_evaluation_mode_is_said_once(caplog):
    skeleton(lambda: torch.nn.Linear(2, 2))
    assert not caplog.records
    skeleton(lambda: torch.nn.Sequential(torch.nn.Dropout(0.1)).eval())
    assert [r.getMessage().startswith("skeleton: Sequential is in evaluation mode") for r in caplog.records] == [True]


def test_a_parameter_that_no_machine_has_room_for():
    """Nobody has written to it, so there is nothing to compute; what is small stays where it was."""

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.empty(1 << 20, 1 << 20, 4))
            self.register_buffer("places", torch.empty(3).fill_(2.0))

    found = skeleton(Large)
    assert found.experts.shape == (1 << 20, 1 << 20, 4) and found.experts.is_meta
    assert found.places.tolist() == [2.0, 2.0, 2.0]

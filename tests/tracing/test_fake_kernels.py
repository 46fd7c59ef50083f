"""Our own fake kernels beside the real ones, and a step that uses them."""

import pytest
import torch
from torch.func import hessian, jacfwd, jacrev, vmap

import zerofn
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn._torch_compat import FakeTensor, FakeTensorMode
from zerofn.tracing import fake_kernels

grouped = torch.ops.aten._grouped_mm.default
OFFS = torch.tensor([3, 8], dtype=torch.int32)
SHAPES = {
    "rows in groups": ((8, 16), (2, 16, 12), OFFS),
    "batches": ((2, 4, 16), (2, 16, 12), None),
    "columns in groups": ((16, 8), (8, 24), OFFS),
    "columns of b in groups": ((2, 4, 16), (16, 8), OFFS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_grouped_products(name, dtype):
    a, b, offs = SHAPES[name]
    given = torch.randn(a, dtype=dtype), torch.randn(b, dtype=dtype).mT.contiguous().mT, offs
    real = grouped(*given)
    with FakeTensorMode() as mode:
        fake = grouped(*(None if x is None else mode.from_tensor(x) for x in given))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_experts_in_float32_are_captured_as_they_run(caplog):
    seen = []

    def loss_fn(params, x):
        seen.append(torch.compiler.is_compiling())
        return torch._grouped_mm(x, params["w"], offs=OFFS).square().mean()

    step = step_with(loss_fn)

    state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.randn(2, 16, 12)}, tx=optim.sgd(0.1)), stage=3)
    x = torch.randn(8, 16)
    plain, loss = step(state, x)
    with caplog.at_level("INFO", "zerofn"):
        compiled, same = zerofn.compile(step, donate=False)(state, x)
    assert torch.equal(loss, same) and not any(seen)
    assert torch.equal(zerofn.unshard(plain.params)["w"], zerofn.unshard(compiled.params)["w"])
    assert "is_compiling" not in caplog.text


SYSTEMS = {
    "tall": ((2, 7, 4), (2, 7, 3), [None, "gels", "gelsy"]),
    "wide": ((2, 4, 7), (2, 4, 3), [None, "gels", "gelsy", "gelsd", "gelss"]),
    "one vector": ((4, 4), (4,), [None, "gelsd"]),
    "vectors": ((2, 7, 4), (2, 7), ["gels"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", SYSTEMS)
def test_least_squares(name, dtype):
    a, b, drivers = SYSTEMS[name]
    given = torch.randn(a, dtype=dtype), torch.randn(b, dtype=dtype)
    for driver in drivers:
        real = torch.linalg.lstsq(*given, driver=driver)
        with FakeTensorMode() as mode:
            fake = torch.linalg.lstsq(*map(mode.from_tensor, given), driver=driver)
        for k, (x, y) in enumerate(zip(fake, real, strict=True)):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype), (driver, k)


def test_a_step_that_solves_least_squares_is_captured():
    def loss_fn(params, batch):
        found = torch.linalg.lstsq(batch["a"] @ params["w"], batch["b"], driver="gels")
        return found.solution.square().sum() + found.residuals.sum()

    step = step_with(loss_fn)

    batch = {"a": torch.randn(6, 3, dtype=torch.float64), "b": torch.randn(6, 2, dtype=torch.float64)}
    params = {"w": torch.eye(3, dtype=torch.float64)}
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), stage=3)
    plain, loss = step(state, batch)
    compiled, same = zerofn.compile(step, donate=False)(state, batch)
    # LAPACK's result depends on where its arguments lie in memory
    torch.testing.assert_close([same, zerofn.unshard(compiled.params)], [loss, zerofn.unshard(plain.params)])


def test_residuals_whose_shape_depends_on_a_rank_are_refused():
    def step(state, a):
        return torch.linalg.lstsq(a, a, driver="gelsd").solution

    with pytest.raises(zerofn.CaptureError, match="asks for the value of a tensor"):
        zerofn.compile(step)({"p": torch.ones(1)}, torch.randn(5, 3))


SECOND = {
    "hessian": hessian,
    "forward over reverse": lambda f: jacfwd(jacrev(f)),
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
}


@pytest.mark.part(batched=[True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", SECOND)
def test_a_loss_of_second_derivatives_is_trained_as_in_torch(name, batched):
    def loss_fn(params, x):
        second = SECOND[name](lambda x: (torch.tanh(x @ params["w"]) * x.view(1, 3).sum(1)).square().sum())
        return (vmap(second)(x) if batched else second(x[0])).square().mean()

    step = step_with(loss_fn)

    w, x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 3, dtype=torch.float64)
    loss = loss_fn({"w": w}, x)
    (grad,) = torch.autograd.grad(loss, w)
    state = zerofn.shard(zerofn.TrainState.create(params={"w": w.detach()}, tx=optim.sgd(0.1)), stage=3)
    new, same = zerofn.compile(step)(state, x)
    torch.testing.assert_close((same, zerofn.unshard(new.params)["w"]), (loss.detach(), w.detach() - 0.1 * grad))


VIEWS = {
    "view": lambda z: z.view(2, 3),
    "as_strided": lambda z: z.as_strided((3,), (2,)),
    "reshape": lambda z: z.reshape(3, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_immutable_zero_stays_fake_and_where_it_was(name):
    fake_kernels.see_views_of_zeros()
    with FakeTensorMode():
        fake = VIEWS[name](torch._efficientzerotensor(6))
        assert type(fake) is FakeTensor and fake.device.type == "cpu"
        assert (torch.ones(fake.shape) + fake).device.type == "cpu"
    real = VIEWS[name](torch._efficientzerotensor(6))
    assert real._is_zerotensor() and (real.shape, real.stride()) == (fake.shape, fake.stride())

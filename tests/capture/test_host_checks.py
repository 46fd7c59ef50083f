"""A captured step leaves out a library's checks that would only raise. Branches and the user's checks are refused."""

import importlib.util
import re

import pytest
import torch
from torch.nn import functional as F

import zerofn
from tests.support.captured_steps import assert_captured_is_eager
from zerofn import optim
from zerofn._torch_compat import TorchDispatchMode
from zerofn.capture.host_checks import passing_answer
from zerofn.ops.registry import ASKS_VALUES

aten = torch.ops.aten
X = torch.arange(3.0) + 1

SKIPPED = """
def of_one_tensor(x):
    if torch.any(x < 0):
        raise ValueError("negative")

def of_several(x):
    if x.dim() == 1 and (x < 0).any() or (x > 9).any().item():
        message = f"{x.shape}"
        raise ValueError(message)

def of_the_opposite(x):
    if not (
        x.isfinite().all()
        and torch.all(x >= 0)
    ):
        raise ValueError

def of_an_else(x):
    if x.dim() == 0:
        x = x[None]
    elif torch.equal(x, -x):
        raise ValueError

def of_an_assertion(x):
    assert (x >= 0).all() and x.isfinite().all(), "negative"
"""

KEPT = """
def of_a_branch(x):
    if (x < 0).any():
        x = -x

def of_mixed_signs(x):
    if (x < 0).any() and not (x > 1).any():
        raise ValueError

def of_a_condition_inside(x):
    if len([y for y in x if not y.isnan()]) == 0:
        raise ValueError

def of_an_error_that_is_caught(x):
    try:
        if (x < 0).any():
            raise ValueError
    except ValueError:
        x = -x

def of_a_number(x):
    if x.sum().item() < 0:
        raise ValueError
"""


def functions(text, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("import torch\n" + text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [f for name, f in vars(module).items() if name.startswith("of_")]


class Asks(TorchDispatchMode):
    """Truths that are asked of tensors are what passes the check that asks; without one, an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in ASKS_VALUES:
            return func(*args, **(kwargs or {}))
        found = passing_answer() if func is aten.equal.default or args[0].dtype is torch.bool else None
        if found is None:
            raise LookupError
        return found


def asked(text, file):
    """Yield each function's name, and whether it was told that all is well."""
    for check in functions(text, file):
        try:
            with Asks():
                check(X)
            yield check.__name__, True
        except LookupError:
            yield check.__name__, False


@pytest.mark.parametrize(
    ("text", "folder", "skipped"),
    [(SKIPPED, "site-packages", True), (KEPT, "site-packages", False), (SKIPPED, "project", False)],
)
def test_what_only_raises_is_skipped_in_libraries(tmp_path, text, folder, skipped):
    assert dict(asked(text, tmp_path / folder / "checks.py")) == dict.fromkeys(re.findall(r"of_\w+", text), skipped)


def captured(check):
    def step(state, x):
        check(x)
        return 2 * x

    return zerofn.compile(step)({"p": torch.ones(1)}, X)


def test_a_captured_step_leaves_out_a_librarys_checks_and_refuses_the_users(tmp_path, caplog):
    file = tmp_path / "site-packages" / "lib_that_checks.py"
    with caplog.at_level("INFO", "zerofn"):
        assert torch.equal(captured(functions(SKIPPED, file)[1]), 2 * X)
    assert f"{file}:8: this check depends on data" in caplog.text
    with pytest.raises(zerofn.CaptureError, match="asks for the value"):
        captured(functions(SKIPPED, tmp_path / "project" / "checks.py")[1])


@pytest.mark.parametrize("full", [False, True])
def test_a_gaussian_loss_is_the_eager_one(full):
    def step(state, batch):
        def loss_fn(params, batch):
            mean, spread = (batch["x"] @ params["w"]).chunk(2, -1)
            return F.gaussian_nll_loss(mean, batch["y"], spread.square(), full=full)

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    def make_state():
        params = {"w": torch.linspace(-1, 1, 12).view(3, 4)}
        return zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), stage=3)

    assert_captured_is_eager(step, make_state, [{"x": torch.randn(5, 3), "y": torch.randn(5, 2)}])

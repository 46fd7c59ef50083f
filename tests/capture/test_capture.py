import dataclasses
import logging
import random

import numpy as np
import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, loss_of, results, same, state_of, train_step_of
from zerofn import tree
from zerofn.capture.capture import CaptureError, capture

HERE = __file__


def update(module):
    return train_step_of(module)


def test_an_evaluation_step_has_no_new_state():
    module = build()
    program = capture(lambda s, b: loss_of(module)(zerofn.gather(s.params), b), state_of(module, 3), batch_of())
    assert program.new_state is None and program.num_new == 0
    program = capture(update(module), state_of(module, 3), batch_of())
    assert program.new_state is not None and program.num_new == program.num_state


@pytest.mark.parametrize("shape", ["list", "triple", "state alone", "dict", "the state last", "nested"])
def test_a_new_state_is_the_first_of_two_results(shape):
    module = build()

    def step(state, batch):
        new, aux = update(module)(state, batch)
        return {
            "list": [new, aux],
            "triple": (new, aux, aux),
            "state alone": new,
            "dict": {"state": new, "aux": aux},
            "the state last": (aux, new),
            "nested": ((new, aux), aux),
        }[shape]

    state = state_of(module, 3)
    with pytest.raises(CaptureError, match=r"with a new TrainState.*Write `return state, metrics`") as error:
        capture(step, state, batch_of())
    assert "test_capture.py:" in zerofn.util.errors.said(error.value)
    assert capture(lambda s, b: {"kept": s, "sum": b["x"].sum()}, state, batch_of()).new_state is None


def test_a_plain_container_that_is_no_pair_is_a_result():
    state = {"w": torch.ones(2)}
    assert capture(lambda s, b: {"w": 2 * s["w"]}, state, batch_of()).new_state is None


def test_a_pair_of_results_is_no_state():
    program = capture(lambda s, b: ({"loss": b["x"].sum()}, b["x"]), {"params": torch.ones(2)}, batch_of())
    assert program.new_state is None


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "Python's random"), (np.random.rand, "numpy.random"), (np.random.standard_normal, "numpy.random")],
)
def test_a_draw_of_the_hosts_is_no_constant(draw, name):
    draw()  # the second normal number of a pair moves nothing but a flag
    with pytest.raises(CaptureError, match=f"draws from {name}.*in the batch"):
        capture(lambda s, b: b["x"] * draw(), {"params": torch.ones(2)}, batch_of())


def test_generators_of_its_own_are_the_steps_affair():
    own = random.Random(0)
    capture(lambda s, b: b["x"] * own.random(), {"params": torch.ones(2)}, batch_of())


def data_branches():
    def item(state, batch, loss):
        if loss.item() > 0:
            return loss
        return -loss

    def truth(state, batch, loss):
        return loss if loss > 0 else -loss

    def number(state, batch, loss):
        return float(loss)

    def array(state, batch, loss):
        return loss.numpy()

    return [item, truth, number, array]


@pytest.mark.parametrize("branch", data_branches(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True])
def test_a_branch_on_data_is_refused_with_its_line(branch, inside):
    module = build()
    loss_fn = loss_of(module)

    def step(state, batch):
        def loss_here(params, batch):
            loss = loss_fn(params, batch)
            branch(state, batch, loss)
            return loss

        loss, grads = state.value_and_grad(loss_here if inside else loss_fn)(batch)
        return state.apply_gradients(grads), branch(state, batch, loss)

    with pytest.raises(CaptureError, match="asks for the value of a tensor.*cannot branch on data.*torch.where") as e:
        capture(step, state_of(module, 3), batch_of())
    first = branch.__code__.co_firstlineno
    assert any(f" at {HERE}:{first + k} (" in str(e.value) for k in (1, 2)), str(e.value)


def test_a_number_that_comes_from_a_tensor_is_no_result():
    with pytest.raises(CaptureError, match=r"returns '1\.positive' as a number read from a tensor"):
        capture(lambda s, b: (s, {"positive": (b["x"] > 0).sum().item()}), {"params": torch.ones(2)}, batch_of())


def test_a_shape_that_depends_on_data_is_captured_as_such():
    def step(state, batch):
        chosen = batch["x"][batch["x"] > 0]
        return chosen.sum() * state["params"]

    state = {"params": torch.ones(2)}
    program = captured(step, state, batch_of())
    for seed in (1, 2, 3):
        batch = batch_of(seed=seed)
        assert_same_trees(results(program, state, batch), [step(state, batch)])


def test_another_structure_is_named():
    module = build()
    state = state_of(module, 3)

    def grown(state, batch):
        new, aux = update(module)(state, batch)
        return dataclasses.replace(new, extra={"more": aux["loss"]}), aux

    with pytest.raises(CaptureError, match=r"'extra\.more' is new\. Return the same structure"):
        capture(grown, state, batch_of())
    with pytest.raises(CaptureError, match="'b' is missing"):
        capture(lambda s, b: ({"params": s["params"]}, 0), {"params": torch.ones(2), "b": torch.ones(2)}, batch_of())


def test_a_piece_in_another_dtype_is_named():
    module = build()

    def widened(state, batch):
        new, aux = update(module)(state, batch)
        return new.replace(params=tree.tree_map(lambda p: p.double(), new.params)), aux

    with pytest.raises(CaptureError, match=r"entry params\['0'\] as torch.float64 .*it was torch.float32.*\.to\("):
        capture(widened, state_of(module, 3), batch_of())


@pytest.mark.parametrize("number", [5, 0.5, True])
def test_a_number_in_the_new_state_is_the_tensor_it_was(number):
    state = {"n": torch.tensor(0), "params": torch.ones(2), "z": torch.zeros(3)}
    program = capture(lambda s, b: ({**s, "n": number}, b["x"].sum()), state, batch_of())
    assert program.num_new == program.num_state == 3 and program.new_state.names == program.state.names
    found, params, z, _ = results(program, state, batch_of())
    assert found.dtype == {int: torch.int64, float: torch.float64, bool: torch.bool}[type(number)]
    assert found.item() == number and same([params, z], [state["params"], state["z"]])


def test_an_entry_that_ceases_to_be_a_tensor_is_named():
    state = {"params": torch.ones(2), "tag": torch.tensor(0), "z": torch.ones(3)}
    with pytest.raises(CaptureError, match=r"'tag' as a str; it was a tensor\. Return a tensor or a number"):
        capture(lambda s, b: ({**s, "tag": "new"}, None), state, batch_of())
    with pytest.raises(CaptureError, match=r"'tag' as a tensor; it was a str"):
        capture(lambda s, b: ({**s, "tag": b["x"].sum()}, None), {**state, "tag": "old"}, batch_of())


def test_errors_of_the_step_pass():
    def fails(state, batch):
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        capture(fails, {"params": torch.ones(2)}, batch_of())


def test_what_needs_to_know_that_it_is_compiled_is_told(caplog):
    """Libraries leave out checks of data under `torch.compiler.is_compiling()`; asked only where capture fails."""

    def step(state, batch):
        if not torch.compiler.is_compiling() and batch["x"].sum() > 100:
            raise ValueError("too large")
        return batch["x"].sum() * state["params"]

    with caplog.at_level(logging.DEBUG, "zerofn"):
        capture(step, {"params": torch.ones(2)}, batch_of())
    assert "the step was traced with torch.compiler.is_compiling() true" in caplog.text
    assert not torch.compiler.is_compiling()


def test_a_users_own_function_transforms_are_captured():
    module = build(2)
    loss_fn = loss_of(module)
    state, batch = state_of(module, 3), batch_of()

    def step(state, batch):
        full = zerofn.gather(state.params)
        gradient = torch.func.grad(loss_fn)(full, batch)
        value, pullback = torch.func.vjp(lambda p: loss_fn(p, batch), full)
        (pulled,) = pullback(torch.ones_like(value))
        copies = tree.tree_map(torch.clone, full)
        _, moved = torch.func.jvp(lambda p: loss_fn(p, batch), (copies,), (gradient,))
        each = torch.func.vmap(torch.func.grad(loss_fn), in_dims=(None, 0))(
            full, {k: v[:, None] for k, v in batch.items()}
        )
        hvp = torch.func.jvp(torch.func.grad(lambda p: loss_fn(p, batch)), (copies,), (gradient,))[1]
        return [gradient, value, pulled, moved, each, hvp]

    expected = tree.leaves(step(state, batch))
    ours = results(captured(step, state, batch), state, batch)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert len(ours) == 4 * 4 + 2


def test_forward_mode_at_views_says_what_to_write():
    module = build(2)
    loss_fn = loss_of(module)

    def step(state, batch):
        full = zerofn.gather(state.params)
        ones = tree.tree_map(lambda p: torch.ones(p.shape), full)
        return torch.func.jvp(lambda p: loss_fn(p, batch), (full,), (ones,))[1]

    with pytest.raises(CaptureError, match=r"cannot trace this forward-mode.*tree_map\(torch\.clone, params\)"):
        capture(step, state_of(module, 3), batch_of())

"""What makes a step be captured again, and what the log says of it."""

import collections
import dataclasses
import gc
import logging
import math
import sys
import weakref

import optree
import pytest
import torch
from tensordict import TensorDict

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import WIDTH, batch_of, build, captures_of, state_of, step_with, train_step_of
from tests.test_tree import Shown
from zerofn import optim
from zerofn.util.sizes import time_in_words


def messages(caplog):
    return [r.getMessage() for r in caplog.records if ": captured " in r.getMessage()]


def test_a_new_signature_is_captured_and_says_what_changed(caplog):
    module = build()

    def train(state, batch):
        new, aux = train_step_of(module)(state, {k: batch[k] for k in ("x", "y")})
        return new, aux["loss"] * batch.get("weight", 1)

    step, state = zerofn.compile(train), state_of(module, 3)
    weighted = [{**batch_of(), "weight": w} for w in (2, 2, 3, torch.tensor(2.0))]
    with caplog.at_level(logging.INFO, "zerofn"):
        for batch in (batch_of(), batch_of(seed=2), batch_of(rows=3), batch_of(), *weighted):
            state, _ = step(state, batch)
    first, rows, *weights = messages(caplog)
    assert "train: captured (first call): training step, state donated" in first
    assert "batch.x [4, 16] float32 -> [3, 16] float32; batch.y [4, 16] float32 -> [3, 16] float32)" in rows
    assert "batch.x [3, 16] float32 -> [4, 16] float32" in weights[0] and "batch.weight nothing -> 2" in weights[0]
    assert "captured again (batch.weight 2 -> 3)" in weights[1]
    assert "captured again (batch.weight 3 -> [] float32)" in weights[2]
    assert len(weights) == 3


def test_numbers_of_another_type_are_another_signature():
    """Where they are equal too: 1 == 1.0 == True."""
    call = zerofn.compile(lambda state, batch: batch["x"] * batch["by"])
    x = torch.arange(4)
    for by in (1, 1.0, True, 1):
        found, expected = call({"params": torch.ones(2)}, {"x": x, "by": by}), x * by
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert len(captures_of(call)) == 3


def test_a_transposed_batch_of_the_same_shape_is_another_signature():
    call = zerofn.compile(lambda state, batch: batch["x"].reshape(-1) * 2)  # a view of the one, a copy of the other
    rows, columns = batch_of()["x"], batch_of()["x"].view(WIDTH, 4).t()
    for x in (rows, columns, rows):
        assert torch.equal(call({"params": torch.ones(2)}, {"x": x}), x.reshape(-1) * 2)
    assert len(captures_of(call)) == 2


def test_evaluation_and_constants_are_named_in_the_log(caplog):
    table = torch.arange(16.0)
    with caplog.at_level(logging.INFO, "zerofn"):
        zerofn.compile(lambda s, b: (b["x"] * table).sum())({"params": torch.ones(2)}, batch_of())
        zerofn.compile(lambda s, b: (s, b["x"].sum()), donate=False)({"params": torch.ones(2)}, batch_of())
    first, second = messages(caplog)
    assert "evaluation step" in first and "1 closed-over tensors baked in, shapes [(16,)]" in first
    assert "training step," in second and "donated" not in second


def test_numbers_in_a_state_grow_without_a_new_capture():
    def step(state, batch):
        return {**state, "seen": state["seen"] + 4, "rate": state["rate"] * 0.5}, batch["x"].sum()

    call, state = zerofn.compile(step), {"params": torch.ones(32), "seen": 0, "rate": 1.0, "flag": True, "none": None}
    for _ in range(3):
        state, _ = call(state, batch_of())
    assert state["seen"].item() == 12 and state["rate"].item() == 0.125 and state["rate"].dtype == torch.float64
    assert state["flag"].item() is True and state["none"] is None and len(captures_of(call)) == 1


def total_of(shape, stage, **options):
    """A state whose parameter has this shape, and what a step makes of it that depends on the shape."""
    params = {"w": torch.arange(24.0).reshape(shape) + 0.001}
    step = step_with(lambda p, x: (p["w"].square().sum(0) * x).square().sum())

    make = lambda: zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(1e-6)), stage=stage, **options)  # noqa: E731
    return step, make


@pytest.mark.parametrize("stage", [0, 3])
def test_another_layout_of_as_many_elements_is_another_signature(stage):
    step, first = total_of((4, 6), stage)
    _, second = total_of((6, 4), stage)
    call = zerofn.compile(step)
    for make in (first, second, first):
        ours, theirs = call(make(), torch.tensor(1.0)), step(make(), torch.tensor(1.0))
        assert_same_trees(zerofn.unshard(ours), zerofn.unshard(theirs))


def test_another_precision_is_another_signature():
    step, plain = total_of((4, 6), 3)
    _, half = total_of((4, 6), 3, precision="bf16")
    call = zerofn.compile(step)
    assert all(p.dtype == torch.float32 for make in (plain, half) for p in make().params.shards)
    for make in (plain, half):
        ours, theirs = call(make(), torch.tensor(1.0)), step(make(), torch.tensor(1.0))
        assert_same_trees(zerofn.unshard(ours), zerofn.unshard(theirs))
        assert ours[0].params.spec.precision == make().params.spec.precision


def test_timings_are_kept():
    module = build()
    step = zerofn.compile(train_step_of(module))
    step(state_of(module, 3), batch_of())
    assert step.timings["nodes"] > 50 and step.timings["capture"] > 0 and "donate" in step.timings["passes"]
    assert step.__name__ == "train_step"


def test_a_compiled_step_reads_with_units():
    step = zerofn.compile(train_step_of(module := build()), memory="1GiB", machine="A100-8")
    name, limits = step.__name__, "at most 1.07 GB on a rank's device; planned for A100-8"
    assert repr(step) == f"<compiled {name}: not captured yet; donates its state; {limits}>"
    state = state_of(module, 3)
    for rows in (4, 4, 3):
        state, _ = step(state, batch_of(rows=rows))
    seconds = time_in_words(step.timings["capture"] + sum(step.timings["passes"].values()))
    assert repr(step) == (
        f"<compiled {name}: captured for 2 signatures, the last {step.timings['nodes']:,} nodes in {seconds}; "
        f"donates its state; {limits}>"
    )
    named = "<compiled squares: not captured yet; keeps its state; remat='full'>"
    assert repr(zerofn.compile(squares, donate=False, remat="full")) == named
    keeps = zerofn.compile(lambda state, batch: batch["x"].sum())  # an evaluation step
    keeps(state, batch_of())
    assert "captured for 1 signature, the last " in repr(keeps) and repr(keeps).endswith("; keeps its state>")


def test_the_shapes_used_last_are_kept(monkeypatch):
    """A dropped one is captured again, and its memory is free."""
    monkeypatch.setattr(sys.modules["zerofn.compile"], "KEPT", 3)
    step = zerofn.compile(lambda state, x: state * x.sum())
    entries = {}

    def use(n):
        assert torch.equal(step(torch.ones(2), torch.ones(n)), torch.full((2,), float(n)))
        entries.setdefault(n, weakref.ref(captures_of(step)[-1]))

    def dropped():
        gc.collect()
        return {n for n, entry in entries.items() if entry() is None}

    for n in (1, 2, 3, 1, 4):
        use(n)
    assert dropped() == {2}  # unused the longest
    use(2)
    use(1)
    assert dropped() == {2, 3} and len(captures_of(step)) == 3


class Pair:
    """Equal to all others of its class, as an object is that compares by its name."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __eq__(self, other):
        return isinstance(other, Pair)

    def __hash__(self):
        return 0


def squares(state, batch):
    pair = batch["pair"] if isinstance(batch, dict) else batch
    loss, grads = state.value_and_grad(lambda p, b: ((b.x @ p["w"] - b.y) ** 2).mean())(pair)
    return state.apply_gradients(grads), loss


def on_zeros():
    return zerofn.shard(zerofn.TrainState.create(params={"w": torch.zeros(4, 1)}, tx=optim.sgd(0.0)))


OBJECTS = {
    "an object": lambda: Pair(torch.ones(2, 4), torch.ones(2, 1)),
    "an object in a dict": lambda: {"pair": Pair(torch.ones(2, 4), torch.ones(2, 1))},
    "a function": lambda: {"pair": lambda x: x},
    "a module": lambda: {"pair": torch.nn.Linear(4, 1)},
}


@pytest.mark.parametrize("what", OBJECTS)
def test_an_object_in_a_batch_is_refused(what):
    """It would be a constant: every step would train on the first one."""
    batch = OBJECTS[what]()
    kind = type(batch["pair"] if isinstance(batch, dict) else batch).__name__
    with pytest.raises(TypeError, match=rf"squares: batch .*is a {kind}, but leaves must be tensors, numbers, strings"):
        zerofn.compile(squares)(on_zeros(), batch)


class TorchNode(Pair):
    pass


class OptreeNode(Pair):
    pass


torch.utils._pytree.register_pytree_node(
    TorchNode, lambda p: ([p.x, p.y], ["a list"]), lambda children, _: TorchNode(*children)
)
optree.register_pytree_node(OptreeNode, lambda p: ((p.x, p.y), None), lambda _, c: OptreeNode(*c), namespace="zerofn")


@dataclasses.dataclass
class DataNode:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("node", [TorchNode, OptreeNode, DataNode])
def test_an_object_that_is_registered_is_read_anew_at_each_step(node):
    step, state, found = zerofn.compile(squares), on_zeros(), []
    for k in (1.0, 2.0, 5.0):
        state, loss = step(state, node(torch.ones(2, 4), torch.full((2, 1), k)))
        found.append(loss.item())
    assert found == [1.0, 4.0, 25.0] and len(captures_of(step)) == 1


@dataclasses.dataclass
class Normed:
    x: torch.Tensor
    shift: dataclasses.InitVar[float] = 0.0

    def __post_init__(self, shift):
        self.x = self.x / 2 + shift
        self.total = self.x.sum()


class Rows(dict):
    def __init__(self, items, weight=1.0):
        super().__init__({k: x * 2 for k, x in items.items()})
        self.weight = weight


class Pairs(collections.namedtuple("Pairs", "x y")):
    def __new__(cls, x, y):
        return super().__new__(cls, x / 2, y)


MADE = {
    "a dataclass": (lambda x: Normed(x, 1.0), lambda b: b.x.sum() * b.total),
    "a dict": (lambda x: Rows({"x": x}, weight=x.max().item()), lambda b: b["x"].sum() * b.weight),
    "a namedtuple": (lambda x: Pairs(x, 3.0), lambda b: b.x.sum() * b.y),
}


@pytest.mark.parametrize("what", MADE)
def test_a_step_has_what_a_class_has_made_of_its_arguments_once(what):
    make, value = MADE[what]
    step, state = zerofn.compile(lambda state, batch: value(batch["of"])), on_zeros()
    for k in (1.0, 2.0):
        batch = {"of": make(torch.full((3,), k))}
        assert torch.equal(step(state, batch), value(batch["of"]))


class Doubled(torch.Tensor):
    """Tensors whose products are twice what they are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out + out if func is torch.Tensor.mul else out


def test_a_tensor_with_operations_of_its_own_is_refused():
    step, x = zerofn.compile(lambda state, batch: state["w"] * batch["x"]), torch.ones(2).as_subclass(Doubled)
    with pytest.raises(TypeError, match=r"batch entry 'x' is a Doubled, .* Pass x.as_subclass\(torch.Tensor\)"):
        step({"w": torch.ones(2)}, {"x": x})
    with pytest.raises(TypeError, match="state entry 'w' is a Doubled"):
        step({"w": x}, {"x": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused(layout):
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    with pytest.raises(TypeError, match="batch entry 'x' is a nested tensor, .*to_padded_tensor"):
        zerofn.compile(lambda state, batch: state["w"].sum())({"w": torch.ones(2)}, {"x": rows})


def a_sparse_matrix(form, seed):
    numbers = torch.Generator().manual_seed(seed)
    dense = torch.randn(5, 5, generator=numbers) * (torch.rand(5, 5, generator=numbers) < 0.4)
    return {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}[form]()


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize(
    "form, where", [*((form, "in the batch") for form in ("coo", "csr", "csc")), ("coo", "a constant")]
)
def test_sparse_matrices_give_the_bits_of_plain_torch(form, where):
    """Their numbers of elements may change from step to step."""
    x, w = torch.arange(15.0).view(5, 3) / 7, torch.eye(3) + 0.1
    known = a_sparse_matrix(form, 0)

    def loss_fn(params, batch):
        return ((batch.get("matrix", known) @ (batch["x"] @ params["w"])) ** 2).mean()

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), (loss, grads["w"])

    run, state = zerofn.compile(step, donate=False), zerofn.TrainState.create(params={"w": w}, tx=optim.sgd(0.1))
    for seed in (1, 2, 3):
        given = {"x": x + seed} | ({"matrix": a_sparse_matrix(form, seed)} if where == "in the batch" else {})
        leaf = w.clone().requires_grad_()
        expected = loss_fn({"w": leaf}, given)
        expected.backward()
        _, (loss, grad) = run(state, given)
        assert torch.equal(loss, expected.detach())
        assert torch.equal(grad, leaf.grad)
    assert len(captures_of(run)) == 1


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_a_compressed_sparse_constant_is_refused():
    matrix = a_sparse_matrix("csr", 1)
    with pytest.raises(RuntimeError, match="pass it in the batch, or close over x.to_sparse_coo"):
        zerofn.compile(lambda state, x: matrix @ state["w"] + x)({"w": torch.ones(5, 2)}, torch.ones(()))


def test_an_attribute_of_a_batchs_tensor_that_may_change_is_refused():
    step, state, x = zerofn.compile(lambda state, x: state["w"] * x), {"w": torch.ones(2)}, torch.ones(2)
    step(state, x)
    x.scale = torch.tensor(4.0)
    with pytest.raises(TypeError, match="batch has an attribute scale, a Tensor, .*Pass it as an entry of the batch"):
        step(state, x)


def test_a_parameter_in_a_batch_is_one_in_the_step():
    def step(state, x):
        return state["w"] * (2.0 if isinstance(x, torch.nn.Parameter) else 1.0)

    run, state = zerofn.compile(step), {"w": torch.ones(2)}
    for x in (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)):
        assert torch.equal(run(state, x), step(state, x))


def first_entry(state, batch):
    return state["w"] * list(batch["data"].values())[0] + list(state["extra"].values())[0]


ORDERED = {
    "a dict": lambda items: {"data": dict(items)},
    "a dict in a list in a dict": lambda items: {"data": {"z": torch.ones(()), **dict(items)}, "more": [dict(items)]},
    "a mapping": lambda items: {"data": collections.UserDict(items)},
    "a TensorDict": lambda items: {"data": TensorDict(dict(items), [])},
}


@pytest.mark.parametrize("make", ORDERED.values(), ids=ORDERED)
def test_a_step_sees_the_order_of_a_dict_as_it_is_given(make):
    items = [("q", torch.tensor(2.0)), ("p", torch.tensor(5.0))]
    state = {"w": torch.tensor(3.0), "extra": {"b": torch.tensor(1.0), "a": torch.tensor(2.0)}}
    other = {"w": torch.tensor(3.0), "extra": {"a": torch.tensor(2.0), "b": torch.tensor(1.0)}}
    step = zerofn.compile(first_entry)
    for pairs in (items, items[::-1], items):
        for each in (state, other):
            batch = make(pairs)
            assert step(each, batch) == first_entry(each, batch)
    assert len(captures_of(step)) == 4


def test_what_a_mapping_computes_is_computed_once():
    def step(state, batch):
        return state["w"] * batch["x"] + batch.scale

    run, state = zerofn.compile(step), {"w": torch.ones(2)}
    for scale in (3.0, 5.0):
        batch = Shown({"x": torch.arange(2.0)}, scale)
        assert torch.equal(run(state, batch), step(state, batch))
    assert len(captures_of(run)) == 2
    batch.kept["loader"] = object()
    with pytest.raises(TypeError, match="batch entry 'kept.loader' is a object"):
        run(state, batch)


def of_number(state, batch):
    return state["w"] * batch["x"] + math.copysign(1.0, batch["n"])


def test_numbers_that_are_equal_and_differ_are_captured_apart_and_nan_once():
    step, state = zerofn.compile(of_number), {"w": torch.ones(2)}
    for n in (0.0, -0.0, 0.0, float("nan"), float("nan"), -0.0):
        batch = {"x": torch.ones(2), "n": n}
        assert torch.equal(step(state, batch), of_number(state, batch))
    assert len(captures_of(step)) == 3


def test_conjugate_and_negative_views_are_numbers_like_others():
    state, z = {"w": torch.ones(2)}, torch.tensor([1 + 2j, 3 - 1j])
    conjugates = z, z.conj(), torch.stack([z, z])[1].conj(), z.conj()[::1]
    step = zerofn.compile(lambda state, z: state["w"] * z.imag)
    for batch in (*conjugates, *conjugates[::-1]):
        assert torch.equal(step(state, batch), batch.imag)
        assert torch.equal(zerofn.compile(lambda state, z: state["w"] * z.imag)(state, batch), batch.imag)
    negative = z.conj().imag
    assert negative.is_neg() and torch.equal(zerofn.compile(lambda state, x: state["w"] * x)(state, negative), negative)


def test_the_order_of_extra_in_a_training_state_is_seen():
    def step(state, x):
        return list(state.extra.values())[0] + x

    run, x = zerofn.compile(step), torch.zeros(())
    for names in ("ba", "ab", "ba"):
        extra = {name: torch.tensor(float(ord(name))) for name in names}
        state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(2)}, tx=optim.sgd(0.1), extra=extra))
        assert run(state, x) == ord(names[0])


def test_a_step_sees_whether_a_tensor_of_the_batch_requires_a_gradient_and_its_attributes():
    def step(state, x):
        return state["w"] * getattr(x, "scale", 1.0) * (2.0 if x.requires_grad else 1.0)

    run, state, scaled = zerofn.compile(step), {"w": torch.ones(2)}, torch.ones(2)
    scaled.scale = 3.0
    for x in (torch.ones(2), torch.ones(2, requires_grad=True), scaled, torch.ones(2)):
        assert torch.equal(run(state, x), step(state, x))
    assert len(captures_of(run)) == 3

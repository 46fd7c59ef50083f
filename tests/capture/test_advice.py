"""What a person reads after a common mistake: where it is, and what to write instead."""

import copy
import json
import logging
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._higher_order_ops.scan import scan
from torch.func import functional_call

import zerofn
from tests.support.small_steps import state_of
from zerofn import optim
from zerofn.capture import advice


def said(error):
    """The message of an error with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def failure(call):
    """What a call raises, in words."""
    with pytest.raises(Exception) as caught:
        call()
    return said(caught.value)


# --- a captured step that fails while it runs --------------------------------------------------------------------


class Picker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, x, y):
        logits = self.inner(x)
        return torch.nn.functional.cross_entropy(logits.float(), y)  # the label's line


def picking(n=1):
    module = Picker()

    def loss_fn(params, batch):
        return functional_call(module, params, (batch["x"], batch["y"]))

    def train_step(state, batch):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, n) if n > 1 else vg)(batch)
        return state.apply_gradients(grads), loss

    return module, train_step


def labels(last=2):
    return {"x": torch.ones(4, 4), "y": torch.tensor([0, 1, 2, last])}


@pytest.mark.part(n=[2], stage=[3])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_failing_operation_names_its_line(n, stage):
    module, train_step = picking(n)
    step, state = zerofn.compile(train_step), state_of(module, stage)
    state, _ = step(state, labels())
    with pytest.raises(IndexError, match="Target 7 is out of bounds") as caught:
        step(state, labels(7))
    text = said(caught.value).splitlines()[-1]
    assert re.search(r"^in train_step: aten.nll_loss_forward at .*test_advice.py:\d+ \(.*# the label's line\)$", text)


def test_a_dtype_that_does_not_fit_says_which_entry_to_cast():
    module, train_step = picking()
    text = failure(lambda: zerofn.compile(train_step)(state_of(module, 3, precision="bf16"), labels()))
    assert re.search(r"in train_step: aten.addmm at .*test_advice.py:\d+ \(logits = self.inner\(x\)\)", text)
    assert "computed in bfloat16; cast floating inputs of the batch to it, here 'x' (float32)" in text


def one_rank_fails(stage):
    module, train_step = picking()
    step, state = zerofn.compile(train_step), state_of(module, stage)
    state, _ = step(state, labels())
    return failure(lambda: step(state, labels(7 if dist.get_rank() == 1 else 2)))


@pytest.mark.part(stage=[1])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_other_ranks_read_the_line_too(ranks, stage):
    found = ranks(2, one_rank_fails, stage)
    ranks.stop()
    for text in found:
        assert "IndexError: Target 7" in text or "Target 7 is out" in text
        assert "# the label's line" in text


def calls_after_failure(stage):
    module, train_step = picking()
    step, state = zerofn.compile(train_step, donate=False), state_of(module, stage)
    first = failure(lambda: step(state, labels(7 if dist.get_rank() == 1 else 2)))
    calls = [
        lambda: step(state, labels()),
        lambda: zerofn.unshard(state),
        lambda: state_of(module, stage),
        lambda: zerofn.compile(train_step)(state, labels()),
    ]
    return [first, *map(failure, calls)]


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [1, 3])
def test_after_a_failure_every_call_says_why_the_group_is_gone(ranks, stage):
    found = ranks(2, calls_after_failure, stage)
    ranks.stop()
    for first, *later in found:
        assert "Target 7" in first
        for text in later:
            assert text.startswith("the process group was destroyed, because rank 1: train_step failed: IndexError")
            assert text.endswith("Restart the processes and load the last checkpoint.")


# --- functions of a leaf, functions of a name ---------------------------------------------------------------------


LEAF = zerofn.optim.LeafInfo("h.0.bias", (3,), torch.float32)


@pytest.mark.parametrize(
    ("mask", "kind", "advice"),
    [
        (lambda name: "bias" not in name, TypeError, "'bias' in leaf.name"),
        (lambda name: name == "h.0.bias", TypeError, "leaf.name == 'h.0.bias'"),
        (lambda name: name in ["h.0.bias"], TypeError, "leaf.name == 'h.0.bias'"),
        (lambda name: name != "h.0.bias", TypeError, "leaf.name == 'h.0.bias'"),
        (lambda name: name.endswith("bias"), AttributeError, "leaf.name.endswith"),
        (lambda p: p.dim() > 1, AttributeError, "ndim"),
    ],
)
def test_a_mask_on_names_is_told_to_ask_for_the_name(mask, kind, advice):
    with pytest.raises(kind, match=re.escape(advice)):
        mask(LEAF)
    with pytest.raises(kind, match=re.escape(advice)):
        tx = zerofn.optim.adamw(0.1, mask=mask)
        zerofn.shard(zerofn.TrainState.create(params={"h.0.bias": torch.ones(3)}, tx=tx))


def test_a_leaf_is_still_a_tuple():
    same = zerofn.optim.LeafInfo("h.0.bias", (3,), torch.float32)
    assert same == LEAF and hash(same) == hash(LEAF) and LEAF == ("h.0.bias", (3,), torch.float32)
    assert (3,) in LEAF and not hasattr(LEAF, "weights")
    import copy
    import pickle

    assert pickle.loads(pickle.dumps(LEAF)) == copy.deepcopy(LEAF) == LEAF


@pytest.mark.parametrize("option", ["frozen", "unit"])
def test_a_function_of_a_name_that_asks_for_a_leaf_is_told_so(option):
    params = {"a.bias": torch.ones(3), "b": torch.ones(3)}
    tx, wants = zerofn.optim.sgd(0.1), {option: lambda leaf: leaf.name.startswith("a")}

    def call():
        frozen = {"frozen": wants["frozen"]} if "frozen" in wants else {}
        unit = {"unit": wants["unit"]} if "unit" in wants else {}
        return zerofn.shard(zerofn.TrainState.create(params=params, tx=tx, **frozen), **unit)

    text = failure(call)
    assert f"{option} receives names: its argument is a str such as 'a.bias'" in text


NAMES = {"h.0.attn.weight": torch.ones(3, 3), "h.0.attn.bias": torch.ones(3), "out.bias": torch.ones(3)}


def created(tx=None, **options):
    return zerofn.TrainState.create(params=NAMES, tx=tx or optim.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: created(frozen=lambda name: name.startswith("layers.0")), "The leaves are 'h.0.attn.bias'"),
        (lambda: created(frozen=lambda name: "h.0.atn" in name), "did you mean 'h.0.attn'?"),
        (lambda: created(frozen=lambda name: name in ("out.bais",)), "did you mean 'out.bias'?"),
        (
            lambda: zerofn.value_and_grad(lambda p: p["out.bias"].sum(), frozen=lambda name: "oot" in name)(NAMES),
            "value_and_grad: frozen selects none",
        ),
        (lambda: created(optim.adamw(0.1, mask=lambda leaf: leaf.ndim > 2)), "adamw: mask selects none of the 3"),
        (
            lambda: created(
                optim.chain(optim.clip(1.0), optim.masked(optim.sgd(0.1), lambda leaf: "hed" in leaf.name))
            ),
            "masked: mask selects none",
        ),
    ],
)
def test_a_choice_of_leaves_that_selects_none_is_an_error(make, says):
    with pytest.raises(ValueError, match="selects none of the 3 leaves, so it has no effect") as caught:
        make()
    assert says in str(caught.value)


def test_choices_that_select_nothing_in_a_part_are_fine():
    matrices = lambda leaf: leaf.ndim > 1  # noqa: E731
    group = lambda rate: optim.adamw(rate, mask=matrices)  # noqa: E731
    labels = lambda leaf: "out" if leaf.name.startswith("out") else "body"  # noqa: E731
    created(optim.multi_transform({"out": group(0.1), "body": group(0.2)}, labels))
    created(optim.adamw(0.1, mask=matrices), frozen=lambda name: name.endswith("weight"))


def test_a_unit_is_a_name():
    with pytest.raises(TypeError, match=r"unit\('h.0.attn.bias'\) returns None, but it must return the name of a unit"):
        zerofn.shard(created(), unit=lambda name: None)


def test_a_misspelt_entry_of_the_parameters_gets_the_nearest_names():
    params = zerofn.shard(created()).params
    with pytest.raises(
        KeyError, match=r"no leaf is named 'h.0.attn.wieght' or below it; did you mean 'h.0.attn.weight'"
    ):
        params["h.0.attn.wieght"]
    with pytest.raises(KeyError, match=r"no leaf is named 'h.0.atn' or below it; did you mean 'h.0.attn'"):
        params["h.0.atn"]
    with pytest.raises(KeyError, match=r"no leaf is named 'xyz' or below it; the units are"):
        params["xyz"]


# --- mistakes in a step --------------------------------------------------------------------------------------------

MODULE = torch.nn.Sequential(torch.nn.Linear(4, 3))
SKELETON = zerofn.skeleton(lambda: torch.nn.Sequential(torch.nn.Linear(4, 3)))
BATCH = {"x": torch.ones(2, 4)}


def loss_fn(params, batch):
    return functional_call(SKELETON, params, (batch["x"],)).square().mean()


def steps(body):
    """A step that trains and returns what `body(state, batch, loss)` returns besides."""

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), body(state, batch, loss)

    return train_step


def losing(loss_fn):
    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    return train_step


def swapped(state, batch):
    grads, loss = state.value_and_grad(loss_fn)(batch)
    return state.apply_gradients(grads), loss


def make_state():
    return zerofn.shard(zerofn.TrainState.create(params=dict(MODULE.named_parameters()), tx=optim.sgd(0.1)))


def scanning(params, batch):
    rows = batch["x"] * params["0.weight"].sum()
    return scan(lambda total, row: (total + row, total * row), torch.zeros(4), rows)[0].sum()


def sparse(params, batch):
    return torch.nn.functional.embedding(batch["x"].long(), params["0.weight"], sparse=True).mean()


BUFFERS = "params=dict(model.named_parameters()), extra=dict(model.named_buffers())"
CALLED = "all the step as step(state, batch), in this order"
with warnings.catch_warnings(action="ignore"):  # "in beta state"
    CSR = torch.eye(4).to_sparse_csr()
MISTAKES = {
    "a skeleton": (
        losing(lambda params, batch: SKELETON(batch["x"]).mean()),
        "write torch.func.functional_call(model, params, (x,))",
    ),
    "on meta": (
        losing(lambda params, batch: (params["0.bias"] * torch.ones(3, device="meta")).sum()),
        """a tensor on "meta" has a shape and no values. If it is a parameter of a skeleton, do not""",
    ),
    "aux": (
        losing(lambda params, batch: (loss_fn(params, batch), {"n": 1})),
        "loss_fn returned (loss, dict).*has_aux=True",
    ),
    "backward": (
        steps(lambda state, batch, loss: loss.backward()),
        "cannot call .backward(), because gathered parameters require no grad: write loss, grads = ",
    ),
    "sharded": (
        steps(lambda state, batch, loss: loss_fn(state.params, batch)),
        "write functional_call(model, zerofn.gather(state.params), ...)",
    ),
    "numpy": (
        steps(lambda state, batch, loss: np.round(loss.item(), 3)),
        "a number read from one, cannot be written to a file, used as a key, or passed to NumPy: return it in the "
        "metrics",
    ),
    "json": (steps(lambda state, batch, loss: json.dumps({"loss": loss})), "return it in the metrics and read"),
    "float": (steps(lambda state, batch, loss: [float(loss)]), "store the value, return it in the metrics"),
    "key": (steps(lambda state, batch, loss: {batch["x"].long().sum().item(): 1}), "return it in the metrics"),
    "round": (steps(lambda state, batch, loss: round(loss, 2)), "write x.round(decimals=n)"),
    "pickle": (steps(lambda state, batch, loss: pickle.dumps(batch)), "cannot be pickled, shared or read from"),
    "shared": (steps(lambda state, batch, loss: batch["x"].share_memory_()), "cannot be pickled, shared or read"),
    "storage": (steps(lambda state, batch, loss: batch["x"].untyped_storage().tolist()), "or read from memory"),
    "deepcopy": (steps(lambda state, batch, loss: copy.deepcopy(batch)), "To copy a tensor, write x.clone()"),
    "range": (
        steps(lambda state, batch, loss: torch.arange(loss).sum()),
        "needs the value of a tensor, as torch.arange(x.sum()) does: use a constant size and a mask",
    ),
    "onednn": (steps(lambda state, batch, loss: batch["x"].to_mkldnn().to_dense()), "leave to_mkldnn() out"),
    "tensor": (
        steps(lambda state, batch, loss: torch.tensor([loss, loss])),
        "write torch.stack([x, y]) instead of torch",
    ),
    "held": (
        steps(lambda state, batch, loss: state.params["0.weight"].norm()),
        "Write zerofn.gather(params)['0.weight'].norm, or .local",
    ),
    "held by torch": (
        steps(lambda state, batch, loss: torch.linalg.norm(state.params["0.weight"])),
        "Write zerofn.gather(params)['0.weight'] for the leaf, zerofn.global_norm(params)",
    ),
    "scan": (losing(scanning), "torch cannot capture the gradient through a scan: write a Python loop"),
    "sparse": (losing(sparse), "nn.Embedding(..., sparse=False)"),
    "nested": (
        steps(lambda state, batch, loss: torch.nested.as_nested_tensor(list(batch["x"])).to_padded_tensor(0.0)),
        "jagged and nested tensors cannot be captured: pad and mask",
    ),
    "write to a storage": (steps(lambda state, batch, loss: batch["x"].untyped_storage().fill_(0)), "x.copy_(y)"),
    "compressed": (steps(lambda state, batch, loss: (CSR @ batch["x"].T).sum()), "close over x.to_sparse_coo()"),
    "swapped tensors": (
        steps(lambda state, batch, loss: torch.utils.swap_tensors(batch["x"], torch.ones(2, 4))),
        "assign x.data = y, or use the other variable",
    ),
    "shards": (steps(lambda state, batch, loss: state.params["0.bias"] * 2), 'zerofn.gather(state.params)["name"]'),
    "swapped": (swapped, "got one tensor of shape ().*write loss, grads = state.value_and_grad(loss_fn)(batch)"),
    "item": (
        steps(lambda state, batch, loss: {"loss": loss.item() * 2}),
        "returns '1.loss' as a number read from a tensor (.item(), float(...)) at .*test_advice.py:",
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch asks, in a scan
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_step_says_what_to_write_and_where(name):
    step, says = MISTAKES[name]
    text = failure(lambda: zerofn.compile(step)(make_state(), BATCH))
    assert all(part in text for part in says.split(".*")), text
    assert re.search(r" at .*test_advice.py:\d+ \(", text), text
    assert text.splitlines()[0].count(says.split(".*")[-1]) == 1


def test_buffers_among_the_parameters():
    norm = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    params = {name: x for name, x in norm.state_dict().items() if x.is_floating_point()}
    step = losing(lambda params, batch: functional_call(norm, params, (batch["x"],)).mean())
    with pytest.raises(ValueError, match=re.escape(BUFFERS)):
        zerofn.compile(step)(zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1))), BATCH)


def test_every_advice_is_given_for_a_mistake_here():
    """A pattern that torch's messages have left behind is found when its mistake is made again."""
    told = [BUFFERS, CALLED, *(part for _, text in MISTAKES.values() for part in text.split(".*"))]
    assert [x for _, _, x in advice._INSTEAD if not any(part in x for part in told)] == []


@pytest.mark.parametrize("name", ["a skeleton", "aux", "swapped"])
def test_a_mistake_in_an_eager_step_says_what_to_write(name):
    step, says = MISTAKES[name]
    text = failure(lambda: step(make_state(), BATCH))
    assert all(part in text for part in says.split(".*")), text


SPECIAL = {
    "quantised": (lambda x: torch.ops.aten.quantize_per_tensor(x, 0.1, 0, torch.qint8), "pass x.dequantize()"),
    "onednn": (lambda x: x.to_mkldnn(), "pass x.to_dense()"),
    "meta": (lambda x: x.to("meta"), "a shape but no values"),
}


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_tensor_without_plain_values_is_refused_by_name(kind):
    special, says = SPECIAL[kind]
    x, step = special(torch.ones(2, 4)), zerofn.compile(lambda state, batch: batch["x"])
    for args, name in ((({"w": torch.ones(2)}, {"x": x}), "batch entry 'x'"), (({"w": x}, BATCH), "state entry 'w'")):
        with pytest.raises(TypeError, match=f"{name} .*{re.escape(says)}"):
            step(*args)
    with pytest.raises(TypeError, match=f"leaf 'params.w' .*{re.escape(says)}"):
        zerofn.shard({"params": {"w": x}})


@pytest.mark.parametrize("args", [lambda: (None, BATCH), lambda: (BATCH, make_state()), lambda: (3, BATCH)])
def test_a_step_called_on_something_else_says_how_it_is_called(args):
    call = zerofn.compile(losing(loss_fn))
    assert CALLED in failure(lambda: call(*args()))


@pytest.mark.parametrize("state", [make_state, lambda: {"params": make_state().params}], ids=["state", "dict"])
def test_an_evaluation_whose_arguments_are_swapped_says_so_with_the_line_of_the_call(state):
    evaluate = zerofn.compile(lambda state, batch: batch)
    text = failure(lambda: evaluate(BATCH, state()))
    assert "the second argument, a" in text and "is the state, and the first, a dict, is not" in text
    assert "Call the step as step(state, batch), in this order" in text and "test_advice.py:" in text


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (MODULE, "a Sequential;"),
        (MODULE.named_parameters(), "a generator;"),
        ({"m": [MODULE]}, "a Sequential at 'm.0';"),
    ],
)
def test_parameters_are_a_tree_of_tensors(params, kind):
    with pytest.raises(TypeError, match=rf"got {kind} write params=dict\(model.named_parameters\(\)\)"):
        zerofn.TrainState.create(params=params, tx=optim.sgd(0.1))


def test_a_shape_that_does_not_fit_is_one_traceback_that_ends_in_the_users_line(capfd):
    import traceback

    with pytest.raises(RuntimeError, match=r"\[2, 5\]") as caught:
        zerofn.compile(losing(loss_fn))(make_state(), {"x": torch.ones(2, 5)})
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert sum("Traceback" in line for line in lines) == 1 and not any("/torch/" in line for line in lines)
    frames = [k for k, line in enumerate(lines) if line.startswith("  File")]
    assert "in loss_fn" in lines[frames[-1]]
    assert re.search(r"^in train_step at .*test_advice.py:\d+ \(return functional_call", lines[-1])
    assert "fake_tensor" not in capfd.readouterr().err


def test_an_impure_step_is_one_traceback():
    import traceback

    def impure(state, batch):
        return state, batch["x"].mul_(2)

    with pytest.raises(RuntimeError, match="writes to batch entry 'x'.*test_advice") as caught:
        zerofn.compile(impure)(make_state(), BATCH)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


# --- captured again and again ----------------------------------------------------------------------------------------


def test_a_number_that_changes_is_named_and_warned_of_once(caplog):
    def train_step(state, batch):
        loss, grads = state.value_and_grad(lambda p, b: loss_fn(p, b) * b["deep"][0])(batch)
        return state.apply_gradients(grads), loss

    call, state = zerofn.compile(train_step), make_state()
    with caplog.at_level(logging.INFO, "zerofn"):
        for k in range(10):
            state, _ = call(state, {**BATCH, "deep": (k / 10, "fixed")})
    captured = [r.getMessage() for r in caplog.records if r.name == "zerofn" and r.levelno == logging.INFO]
    assert "captured again (batch.deep.0 0.1 -> 0.2)" in captured[2] and len(captured) == 10
    (warned,) = [r.getMessage() for r in caplog.records if r.name == "zerofn" and r.levelno == logging.WARNING]
    assert warned.startswith("train_step: captured 8 times so far, 7 of them because batch.deep.0 changed")
    assert (
        "(batch.deep.0 0.6 -> 0.7); a step is captured again for every new number" in warned
        and "pass torch.tensor(...) instead" in warned
    )


def test_a_shape_that_changes_is_warned_of_once(caplog):
    call, state = zerofn.compile(losing(loss_fn)), make_state()
    for rows in range(1, 11):
        state, _ = call(state, {"x": torch.ones(rows, 4)})
    (warned,) = [r.getMessage() for r in caplog.records if r.name == "zerofn" and r.levelno == logging.WARNING]
    assert "batch.x [7, 4] float32 -> [8, 4] float32" in warned and "pad to a few shapes" in warned

import copy
import subprocess
import sys
from operator import attrgetter

import pytest
import torch

import zerofn
from tests.test_api import PUBLIC
from zerofn import collectives, moe, optim, parallel, passes, sparse
from zerofn.cli import main
from zerofn.util.names import attribute_of

STATE = zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=optim.sgd(0.1))


@pytest.mark.parametrize(
    ("package", "wrong", "meant"),
    [
        (zerofn, "Shard", "zerofn.shard"),
        (zerofn, "value_and_grads", "zerofn.value_and_grad"),
        (optim, "AdamW", "optim.adamw"),
        (optim, "clip_by_globalnorm", "optim.clip_by_global_norm"),
        (collectives, "allreduce", "collectives.all_reduce"),
        (moe, "expert", "moe.experts"),
        (parallel, "Tensor", "parallel.tensor"),
        (passes, "befor", "passes.before"),
        (sparse, "slidingwindow", "sparse.sliding_window"),
    ],
)
def test_a_wrong_name_of_a_package_says_the_right_one(package, wrong, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(package, wrong)
    text = f"module {package.__name__!r} has no attribute {wrong!r}. Did you mean {meant}?"
    assert str(caught.value) == text and caught.value.name == wrong


@pytest.mark.parametrize("package", PUBLIC, ids=lambda p: p.__name__)
def test_a_name_that_is_near_none_gets_no_hint(package):
    with pytest.raises(AttributeError, match=r"has no attribute 'qqqqqqq'$"):
        attrgetter("qqqqqqq")(package)
    assert not hasattr(package, "__wrapped__") and not hasattr(package, "_AdamW")


@pytest.mark.parametrize(
    ("package", "wrong", "hint"),
    [
        ("zerofn.optim", "AdamW", ". Did you mean adamw?"),
        ("zerofn", "Shard", ". Did you mean shard?"),
        ("zerofn.moe", "x", ""),
    ],
)
def test_a_wrong_import_says_the_right_one(package, wrong, hint):
    with pytest.raises(ImportError) as caught:
        exec(f"from {package} import {wrong}")
    assert str(caught.value) == f"cannot import name {wrong!r} from {package!r}{hint}"


def test_a_submodule_is_still_imported_by_its_name():
    code = "from zerofn.optim import leaf_runs; from zerofn.parallel import chunks; print(leaf_runs.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "zerofn.optim.leaf_runs\n"


def test_python_adds_no_second_hint():
    done = subprocess.run(
        [sys.executable, "-c", "from zerofn import optim; optim.AdamW"], capture_output=True, text=True, check=False
    )
    assert done.stderr.count("Did you mean") == 1 and "Did you mean optim.adamw?" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "meant"), [("apply_gradient", "apply_gradients"), ("parms", "params"), ("optstate", "opt_state")]
)
def test_a_wrong_name_of_a_state_says_the_right_one(wrong, meant):
    with pytest.raises(
        AttributeError, match=rf"'TrainState' object has no attribute '{wrong}'. Did you mean .{meant}\?"
    ):
        getattr(STATE, wrong)


def test_a_state_is_copied_as_before():
    for other in (copy.copy(STATE), copy.deepcopy(STATE)):
        assert isinstance(other, zerofn.TrainState) and torch.equal(other.params["w"], STATE.params["w"])


def test_a_property_that_fails_says_why():
    class Failing:
        __getattr__ = attribute_of

        @property
        def rate(self):
            return self.schedul

        def schedule(self): ...

    with pytest.raises(AttributeError, match=r"no attribute 'schedul'. Did you mean .schedule\?"):
        attrgetter("rate")(Failing())


@pytest.mark.parametrize(
    ("function", "wrong", "meant"),
    [
        (zerofn.shard, "stages", "stage"),
        (zerofn.accumulate, "reduces", "reduce"),
        (optim.adamw, "weight_deca", "weight_decay"),
        (optim.clip_by_global_norm, "max_nrm", "max_norm"),
        (optim.warmup_cosine_decay_schedule, "warmup_step", "warmup_steps"),
    ],
)
def test_a_wrong_argument_says_the_right_one(function, wrong, meant):
    with pytest.raises(TypeError, match=rf"{function.__name__} has no argument '{wrong}'. Did you mean '{meant}'"):
        function(**{wrong: 1})


@pytest.mark.parametrize(
    ("kind", "wrong", "meant"),
    [
        (zerofn.Offload, "optimiser", "optimizer"),
        (zerofn.Precision, "compue", "compute"),
        (zerofn.Wire, "gathr", "gather"),
        (zerofn.Pass, "scop", "scope"),
        (zerofn.DynamicLossScale, "hysterisis", "hysteresis"),
    ],
)
def test_a_wrong_field_says_the_right_one(kind, wrong, meant):
    with pytest.raises(TypeError) as caught:
        kind(**{wrong: 1})
    assert str(caught.value) == f"{kind.__name__} has no argument {wrong!r}. Did you mean {meant!r}?"


def test_a_wrong_field_to_replace_says_the_right_one():
    with pytest.raises(TypeError, match=r"TrainState has no argument 'stp'. Did you mean 'step'\?"):
        STATE.replace(stp=1)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["pln"], "argument command: 'pln' is not known; did you mean 'plan'?"),
        (["lanch", "train.py"], "argument command: 'lanch' is not known; did you mean 'launch'?"),
        (["plan", "train.py", "--wrld", "8"], "--wrld: not known to zerofn plan; did you mean --world?"),
        (["plan", "train.py", "--wrld=8"], "--wrld=8: not known to zerofn plan; did you mean --world?"),
        (["xyzzy"], "invalid choice: 'xyzzy'"),
        (["plan", "train.py", "--xyzzy"], "--xyzzy: not known to zerofn plan; arguments of your script come last"),
    ],
)
def test_the_command_line_says_what_was_meant(typed, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(typed)
    assert caught.value.code == 2 and said in capsys.readouterr().err

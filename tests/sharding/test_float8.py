"""The rule of float8 products, and the devices that have them."""

import pickle
import re

import pytest
import torch

import zerofn
from zerofn.sharding.float8 import Fp8, check_device


def weight(*shape):
    return torch.empty(*shape, device="meta")


def test_the_rule_takes_linear_layers_but_heads_and_odd_sizes():
    rule = Fp8()
    assert rule.why_not("up", weight(64, 32), 96) == ""
    assert rule.why_not("head", weight(96, 32), 96).startswith("a head")
    assert rule.why_not("odd", weight(64, 24), 96) == "its sizes [64, 24] are not multiples of 16"


def test_a_rule_of_ones_own_is_asked_for_names():
    rule = Fp8(lambda name: name != "down")
    assert rule.why_not("head", weight(96, 32), 96) == ""  # one's own word counts
    assert rule.why_not("down", weight(64, 32), 96) == "Fp8(where) leaves it out"
    with pytest.raises(
        ValueError, match=r"selects 'odd', a weight of \[64, 24\], but .* let where\('odd'\) return False"
    ):
        rule.why_not("odd", weight(64, 24), 96)
    with pytest.raises(TypeError, match="where must be a function of 1 argument"):
        Fp8("down")


@pytest.mark.parametrize("answer", [torch.tensor(True), None, "yes", 1])
def test_an_answer_is_true_or_false(answer):
    init = zerofn.TrainState.create(params={"w": torch.zeros(32, 32)}, tx=zerofn.optim.sgd(0.1))
    precision = zerofn.Precision(torch.float32, torch.bfloat16, fp8=Fp8(lambda name: answer))
    with pytest.raises(TypeError, match=r"where\('w'\) must return True or False, got .*Write bool\("):
        zerofn.shard(init, precision=precision)


def test_a_state_keeps_the_answers_and_states_with_equal_ones_share_captures():
    kept, asked = {"a"}, []
    params = {"a": torch.zeros(32, 16), "b": torch.zeros(16, 32), "c": torch.zeros(3, 5), "bias": torch.zeros(16)}
    init = zerofn.TrainState.create(params=params, tx=zerofn.optim.adamw(0.1))

    def sharded():
        rule = Fp8(lambda name: asked.append(name) or name in kept)
        return zerofn.shard(init, precision=zerofn.Precision(torch.float32, torch.bfloat16, fp8=rule)).params.spec

    first, other = sharded(), sharded()
    assert asked == ["a", "b", "c"] * 2  # once each, and matrices alone
    kept = {"b"}
    changed = sharded()
    for spec, name in ((first, "a"), (other, "a"), (changed, "b")):
        assert [x for x in params if spec.precision.fp8.where(x)] == [name]
    assert first.signature == other.signature != changed.signature
    assert pickle.loads(pickle.dumps(first.precision)) == first.precision


def of_each_rank():
    init = zerofn.TrainState.create(params={"w": torch.zeros(32, 32), "v": torch.zeros(32, 32)}, tx=zerofn.optim.sgd(1))

    def shard(where):
        zerofn.shard(init, precision=zerofn.Precision(torch.float32, torch.bfloat16, fp8=Fp8(where)))

    elsewhere = [lambda name: True for _ in range(1 + zerofn.rank())]  # functions at another address on each rank
    shard(elsewhere[-1])
    with pytest.raises(RuntimeError, match=r"v \[32, 32\].*, in float8"):
        shard(lambda name: name == "w" or zerofn.rank() == 0)


def test_ranks_agree_about_the_answers(ranks):
    ranks(2, of_each_rank)


def test_the_cpu_emulates():
    check_device(torch.device("cpu"))


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match=f"needs an NVIDIA GPU .*; this device is {device}. Write precision='bf16'"):
        check_device(torch.device(device))


@pytest.mark.parametrize("capability, fits", [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_gpus_have_float8_from_compute_capability_8_9_on(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    partition = zerofn.sharding.partition.Partition.zero(zerofn.Mesh.make(data=1), precision="fp8")
    if fits:
        assert partition.at(torch.device("cuda", 0)).precision.fp8 == Fp8()
        return
    with pytest.raises(ValueError, match=re.escape("this device is NVIDIA A100 of compute capability 8.0.")):
        partition.at(torch.device("cuda", 0))


def test_layers_around_compute_in_bfloat16():
    with pytest.raises(ValueError, match=r"compute=torch.float16, fp8=.*which is precision='fp8'"):
        zerofn.Precision(torch.float32, torch.float16, torch.float32, fp8=Fp8())


def test_masters_and_checkpoints_are_those_of_bf16():
    init = zerofn.TrainState.create(params={"w": torch.randn(32, 32)}, tx=zerofn.optim.adamw(1e-3))
    states = [zerofn.shard(init, precision=precision) for precision in ("bf16", "fp8")]
    ours, theirs = ([(x.dtype, x.shape) for x in zerofn.tree.leaves(s)] for s in states)
    assert ours == theirs


def test_what_is_gathered_in_float8_is_chosen_before_a_step_is_seen():
    with pytest.raises(ValueError, match=r"Fp8\(gather=True\) needs the argument"):
        Fp8(gather=True)
    rule = Fp8(lambda name: name != "down", gather=True)
    assert rule.gathers("up", (64, 32)) and not rule.gathers("down", (64, 32))
    assert not rule.gathers("up", (64,)) and not rule.gathers("up", (64, 24)) and not Fp8().gathers("up", (64, 32))

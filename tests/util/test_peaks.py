"""Names of devices, and what their data sheets promise."""

import pytest

import zerofn
from tests.support.small_steps import batch_of, build, train_step_of
from zerofn import optim
from zerofn.cost.machine import KNOWN
from zerofn.util.peaks import peak_of


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0), ("NVIDIA A10", 125.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0),
        ("NVIDIA GB200", 2500.0), ("NVIDIA GeForce RTX 4090", 165.2), ("AMD Instinct MI300X", 1307.4), ("cpu", None),
    ],
)  # fmt: skip
def test_devices(name, teraflops):
    assert peak_of(name) == (None if teraflops is None else pytest.approx(1e12 * teraflops))


def test_machines_reach_less_than_their_data_sheets_promise():
    for machine in KNOWN.values():
        peak = peak_of(machine.name)
        assert peak is None or 0.2 * peak < machine.flops.get("bfloat16", machine.flops["float16"]) < peak, machine.name


def test_a_plan_for_a_known_machine_says_its_share():
    module = build(2)
    init = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.sgd(0.1))
    found = zerofn.plan(train_step_of(module), init, batch_of(), machine="H100-8", world=8)
    plan = found.best.plan
    assert "MFU" in plan.text() and 0 < plan.mfu < 1

"""Plans for machines that are not there, beside what there is."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

import zerofn
from tests.support.small_steps import WIDTH, batch_of, build, loss_of, state_of, step_with, train_step_of, unit_of
from tests.support.some import some_of
from zerofn import Offload, optim
from zerofn.capture.capture import CaptureError
from zerofn.cost.machine import KNOWN, machine_of
from zerofn.cost.simulator import limit_in_words
from zerofn.planning.wide_table import wide_cells
from zerofn.util.sizes import in_words, time_in_words

NORMED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
HERE = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e9, host_memory=32e9,
                      host_rate=4e10, disk=1e11, disk_read=1e9, disk_write=1e9)  # fmt: skip
LAYERS = 4


def init_state(tx=NORMED):
    return zerofn.TrainState.create(params=dict(build(LAYERS).named_parameters()), tx=tx)


def planned(**options):
    options = {"machine": HERE, "offload": None, "precision": None, "remat": None, **options}
    return zerofn.plan(train_step_of(build(LAYERS)), init_state, batch_of(), unit=unit_of, **options)


def real(stage, precision, folder):
    """(peak by kind, host, disk, transfers) of a step of this rank, and the most it was measured to hold."""
    offload = Offload(optimizer="nvme", path=folder) if folder else None
    state = state_of(build(LAYERS), stage, NORMED, precision=precision, offload=offload)
    step = zerofn.compile(train_step_of(build(LAYERS)))
    plan = step.lower(state, batch_of(dist.get_rank() if dist.is_initialized() else 0))
    memory = plan.memory()
    return memory.peak, memory.host, memory.disk, sorted(plan.transfers().items())


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plan_is_what_the_step_on_such_a_machine_is(ranks, tmp_path, size):
    for stage, precision, folder in (
        (0, None, None),
        (1, "bf16", None),
        (2, None, None),
        (3, "fp16", None),
        (3, "fp8", None),
        (3, None, tmp_path),
    ):
        here = ranks(size, real, stage, precision, folder)[0]
        offload = Offload(optimizer="nvme", path=tmp_path) if folder else None
        row = planned(world=size, stage=stage, precision=precision, offload=offload)[0]
        memory = row.plan.memory()
        assert (memory.peak, memory.host, memory.disk, sorted(row.plan.transfers().items())) == here
        assert row.needs == (memory.total, memory.host, memory.disk)


def budgeted(memory):
    """What `lower` says, on this rank, of a step with a budget on the machine that is planned for."""
    step = zerofn.compile(train_step_of(build(LAYERS)), memory=memory, machine=HERE)
    plan = step.lower(state_of(build(LAYERS), 3, NORMED), batch_of(dist.get_rank(), rows=512))
    return plan.memory().peak, sorted(plan.transfers().items()), [n.name for n in plan.graph.graph.nodes]


def test_budgets_choose_for_the_machine_that_is_named(ranks):
    whole = planned(world=2, stage=3, rows=512)[0].needs.device
    row = planned(world=2, stage=3, rows=512, remat="budget", memory=int(0.96 * whole))[0]
    here = ranks(2, budgeted, int(0.96 * whole))[0]
    names = [n.name for n in row.plan.graph.graph.nodes]
    assert (row.plan.memory().peak, sorted(row.plan.transfers().items()), names) == here


def named_apart():
    by_name = "H100-8" if dist.get_rank() else "A100-8"
    nearly_equal = dataclasses.replace(HERE, link=1e9 + dist.get_rank())
    told = {"machine: H100-8: 8 x cuda, ": by_name, "machine in full: .*1000000001.0": nearly_equal}
    for which, machine in told.items():
        step = zerofn.compile(train_step_of(build(2)), machine=machine)
        with pytest.raises(RuntimeError, match=f"(?s)ranks differ.*rank 1: {which}"):
            step.lower(state_of(build(2), 3), batch_of())


def test_ranks_that_name_different_machines_are_told(ranks):
    ranks(2, named_apart)


@pytest.mark.parametrize(("machine", "written"), [("A100-8", "'A100-8'"), (KNOWN["A100-8"], "'A100-8'"),
                                                  (HERE, "machine")])  # fmt: skip
def test_the_line_to_write_names_the_machine(machine, written):
    assert planned(machine=machine, stage=3, world=1)[0].config.call().endswith(f"machine={written})")


def test_no_step_is_placed_on_a_machine_that_is_not_known():
    with pytest.raises(ValueError, match="machine 'H100-9' is not known; did you mean 'H100-8'"):
        zerofn.compile(lambda state, batch: state, machine="H100-9")


@pytest.mark.whole
def test_gpus_without_bfloat16_are_planned_in_float16():
    for name in ("V100-16", "V100", "TitanRTX-2", "T4"):
        assert {row.config.precision for row in planned(machine=name, world=1, stage=3, precision="all")} == {
            "fp16",
            None,
        }
    for name in ("H100", "H200-8", "B200-8", "L40S", "A10", "5090", "MI300X-8"):
        assert {row.config.precision for row in planned(machine=name, world=1, stage=3, precision="all")} == {
            "bf16",
            None,
        }


def test_bytes_of_state_are_those_of_the_closed_form():
    units = init_state().params
    numel = sum(
        -(-sum(x.numel() for n, x in units.items() if unit_of(n) == u) // 8192) * 8192
        for u in dict.fromkeys(map(unit_of, units))
    )  # shards of 2,048 on each of 4 ranks
    for stage, offload, kept in ((0, None, (12, 0, 0)), (3, None, (3, 0, 0)), (3, "cpu", (0, 3, 0))):
        row = planned(world=4, machine="H100-8", stage=stage, offload=offload)[0]
        state = row.plan.memory().peak["state"], row.needs.host, row.needs.disk
        per_rank = [numel * share for share in kept]
        assert [abs(a - b) < 64 for a, b in zip(state, per_rank, strict=True)] == [True] * 3, (stage, state, per_rank)


def test_an_accelerators_host_is_another_memory():
    table = planned(world=2, machine="A100-8", offload=[None, "cpu", "nvme"], stage=3, precision="bf16")
    here, host, drives = (row.plan.memory() for row in table)
    assert here.host == here.disk == host.disk == 0
    assert host.host > 0 and drives.disk > 0
    assert host.peak["state"] < 100 < here.peak["state"]  # numbers stay
    moved = {x.how for x in table[1].plan.transfers()}
    assert moved == {"sent", "to the device", "to the host"}


def test_nothing_is_allocated_for_a_large_model():
    wide = 1 << 14
    module = zerofn.skeleton(lambda: torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(8))))

    def init():
        params = dict(torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(8))).named_parameters())
        return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))

    train_step = step_with(lambda p, x: functional_call(module, p, (x,)).square().mean())

    before = psutil.Process().memory_info().rss
    row = zerofn.plan(train_step, init, torch.empty(4, wide, device="meta"), world=512, machine="A100-8", stage=3,
                      offload=None, precision="bf16")[0]  # fmt: skip
    assert psutil.Process().memory_info().rss - before < 200e6
    assert row.plan.memory().peak["state"] == pytest.approx(8 * (wide * wide + wide) * 12 / 512, rel=0.01)


def test_the_best_row_is_the_fastest_that_fits():
    table = planned(world=2, stage=(0, 3))
    assert table.best is max((row for row in table if row.fits), key=lambda row: row.speed) or \
        table.best.speed > 0.98 * max(row.speed for row in table)  # fmt: skip
    needs = sorted(row.needs.device for row in table)
    tight = planned(world=2, stage=(0, 3), memory=needs[0])
    assert [row.fits for row in tight] == [row.needs.device == needs[0] for row in tight]
    assert tight.best.config == next(row.config for row in tight if row.fits)
    assert tight.memory().total == needs[0]
    assert tight.best.config.call() in tight.text(wide=True)
    assert json.loads(json.dumps(tight.json()))["best"] == [row.fits for row in tight].index(True)


def test_shard_takes_what_is_recommended():
    table = planned(stage=(0, 3), world=1)
    state = zerofn.shard(init_state, stage="auto", plan=table, unit=unit_of)
    assert state.params.spec.stage == table.best.config.stage
    with pytest.raises(ValueError, match="needs stage='auto'. Write table = zerofn.plan"):
        zerofn.shard(init_state, stage="auto")
    with pytest.raises(ValueError, match="needs plan="):
        zerofn.shard(init_state, stage=3, plan=table)
    for given in ({"precision": "bf16"}, {"wire": "bf16"}):
        with pytest.raises(ValueError, match="reads precision, offload, hpz and wire from the plan"):
            zerofn.shard(init_state, stage="auto", plan=table, **given)


def test_what_is_sent_in_fewer_bytes_is_planned_so():
    """Stage 3 of four ranks: half the bytes of float32, and the call says how."""
    found = [planned(stage=3, world=4, precision=zerofn.Precision(wire=wire)).best for wire in (None, "bf16")]
    assert sum(found[1].sent.values()) / sum(found[0].sent.values()) == pytest.approx(0.5, abs=0.01)
    assert "precision=zerofn.Precision(wire=zerofn.Wire(gather='bf16', reduce='bf16'))" in found[1].config.call()
    (plain, coded) = planned(stage=3, world=4, wire=[None, "bf16"])
    assert [plain.sent, coded.sent] == [x.sent for x in found]
    assert "wire='bf16'" in coded.config.call() and "wire bf16" in repr(coded) and "wire" not in plain.config.call()
    table = planned(stage=3, world=1, wire="bf16")
    wire = zerofn.Wire("bf16", "bf16")
    assert zerofn.shard(init_state, stage="auto", plan=table).params.spec.precision.wire == wire
    (coded,) = planned(stage=3, world=4, wire=[{"data": zerofn.Wire("int4", "int8", smallest=0)}])
    assert "wire={'data': zerofn.Wire(gather='int4', reduce='int8', smallest=0)}" in coded.config.call()
    assert sum(coded.sent.values()) < 0.3 * sum(plain.sent.values())
    with pytest.raises(ValueError, match="wire='bf61' is not known"):
        planned(stage=3, world=4, wire="bf61")


def test_a_plan_for_other_ranks_is_not_taken():
    with pytest.raises(ValueError, match=r"the plan is for 2 ranks, but this job has 1"):
        zerofn.shard(init_state, stage="auto", plan=planned(stage=3, world=2))


@pytest.mark.parametrize(("given", "said"), [
    ({"device": "gpu"}, "expected 'cpu' or 'cuda'"),
    ({"flops": {"fp32": 1e13}}, "'float32' among them"),
    ({"memory": "24GiB"}, "memory='24GiB'.*expected a number"),
    ({"ranks": 0}, "ranks=0"),
])  # fmt: skip
def test_machines_that_cannot_be(given, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(HERE, **given)


def test_one_ranks_profile_says_nothing_of_several():
    with pytest.raises(ValueError, match="measured by one rank"):
        planned(world=2, machine=dataclasses.replace(HERE, link=0.0))


def test_rates_of_a_host_are_asked_for_where_they_matter():
    gpu = zerofn.Machine("mine", "cuda", 2, 8e9, 1e12, {"float32": 1e13}, link=1e10, network=1e9, host_memory=1e12,
                         disk=1e12)  # fmt: skip
    assert planned(machine=gpu, world=2, stage=3).best.seconds > 0
    with pytest.raises(ValueError, match=r"machine 'mine': 'host_\w+' .* is not known.*zerofn.Machine\(..., host_"):
        planned(machine=gpu, world=2, stage=3, offload="cpu").text()
    with pytest.raises(
        ValueError, match=r"'disk_read' .* is not known, .* Measure it with `zerofn profile FILE --folder"
    ):
        planned(machine=dataclasses.replace(HERE, disk_read=0.0), world=2, stage=3, offload="nvme").text()


def test_what_the_step_brings_along_is_there_too():
    module, teacher = build(LAYERS), torch.nn.Linear(WIDTH, 999 * WIDTH).requires_grad_(False)

    def train_step(state, batch):
        said = functional_call(teacher, dict(teacher.named_parameters()), batch["x"])
        known = {**batch, "y": batch["y"] + said.sum()}
        loss, grads = state.value_and_grad(loss_of(module))(known)
        return state.apply_gradients(grads), loss

    plain, taught = (
        zerofn.plan(step, init_state, batch_of(), unit=unit_of, machine=HERE, stage=3, offload=None)[0]
        for step in (train_step_of(module), train_step)
    )
    more = sum(x.nbytes for x in teacher.parameters())
    assert taught.plan.memory().peak["other"] >= plain.plan.memory().peak["other"] + more
    assert taught.needs.device >= plain.needs.device + more


def test_where_nothing_fits_the_nearest_miss_is_told():
    table = planned(stage=(0, 3), world=1, memory="10kB", remat="all")
    with pytest.raises(MemoryError, match=r"nothing fits on 1 rank of here. The nearest is .*stage=.*too little"):
        table.best  # noqa: B018
    with pytest.raises(MemoryError, match="nothing fits"):
        zerofn.shard(init_state, stage="auto", plan=table)
    assert "Nothing fits" in table.text()


def deep(**more):
    """Plans of a model whose activations can be computed again."""
    module = build(12, dropout=0.1)
    state = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=NORMED)
    return zerofn.plan(train_step_of(module), lambda: state, batch_of(), unit=unit_of, world=1, stage=3, rows=512,
                       machine=HERE, offload=None, precision=None, **more)  # fmt: skip


@pytest.mark.slow
def test_what_does_not_fit_is_planned_with_recomputation():
    whole = deep()[0]
    tight = deep(memory=whole.needs.device - 1)
    assert [row.config.remat for row in tight] == [None, "auto", "full"]
    assert tight[2].needs.device < whole.needs.device and tight.best in tight.rows[1:]
    assert tight[2].plan.memory().peak["activations"] < whole.plan.memory().peak["activations"]


def test_a_budget_is_what_a_device_has():
    whole = deep(remat=None)[0].needs.device
    row = deep(remat="budget", memory=int(0.9 * whole))[0]
    assert row.fits and 0.5 * whole < row.needs.device <= 0.9 * whole
    assert f"zerofn.compile(train_step, memory={int(0.9 * whole)}, machine=machine)" in row.config.call()
    row = deep(remat="budget", memory=row.plan.memory().there + 1000)[0]
    assert not row.fits and "it needs at least" in row.lacks


def test_arguments_are_written_as_they_are_given():
    offload = Offload(optimizer="cpu", params="cpu", update="cpu")
    row = planned(machine="A100-8", stage=3, offload=offload, world=2)[0]
    assert "offload=zerofn.Offload(optimizer='cpu', params='cpu', update='cpu'))" in row.config.call()
    assert "optimizer=cpu, params=cpu, update=cpu" in wide_cells(row)


def test_the_state_alone_is_what_the_plan_says_of_it():
    for stage in some_of(range(4), 0, 2):
        memory = planned(world=3, stage=stage, rows=8)[0].plan.memory()
        there = memory.there - memory.static_buffers - 2 * 8 * WIDTH * 4  # but for the batch
        too_little = planned(world=3, stage=stage, rows=8, memory=1000)[0]
        assert too_little.needs.device == there and "for the state alone" in too_little.lacks


def test_rows_are_those_of_a_ranks_batch():
    few, many = (planned(world=1, stage=3, rows=rows)[0] for rows in (8, 800))
    assert many.needs.device - few.needs.device > 792 * WIDTH * 4 * LAYERS
    assert (few.tokens, many.tokens) == (8, 800)


@pytest.mark.parametrize(("options", "said"), [
    ({"machine": "H100-9"}, "machine 'H100-9' is not known; did you mean 'H100-8'"),
    ({"machine": "nowhere.json"}, "the file 'nowhere.json' does not exist; `zerofn profile nowhere.json` writes it"),
    ({"world": 0}, r"world=0\): expected the number of ranks"),
    ({"rows": 0}, r"rows=0\): expected a number above 0"),
    ({"stage": 4}, "stage=4.* is not known"),
    ({"remat": "some"}, "remat='some'.* is not known"),
    ({"precision": "bf8"}, "bf8"),
    ({"precision": "fp8", "machine": "A100-8"}, "needs an NVIDIA GPU.*this device is machine 'A100-8', which has no "
                                                "'float8"),
    ({"memory": "some"}, "plan: memory='some' is not an amount of memory"),
])  # fmt: skip
def test_bad_input(options, said):
    with pytest.raises(ValueError, match=said):
        planned(**options)


def test_a_step_that_cannot_be_captured_is_told_by_its_line():
    loss_fn = loss_of(build(LAYERS))

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        if loss > 0:  # branches on data
            grads = None
        return state.apply_gradients(grads), loss

    with pytest.raises(CaptureError, match=r"test_planner.py:\d+"):
        zerofn.plan(train_step, init_state, batch_of(), world=2, stage=3, machine=HERE, unit=unit_of)


def test_machines_are_kept_in_files(tmp_path):
    HERE.save(tmp_path / "here.json")
    assert machine_of(tmp_path / "here.json").flops == HERE.flops
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the profile of a machine .*zerofn profile"):
        machine_of(tmp_path / "other.json")
    for name, machine in KNOWN.items():
        assert machine.name == name and machine.memory > 0 and machine.rank_link(64) > 0


def test_a_profile_of_another_machine_is_refused():
    state = state_of(build(2), 3)
    plan = zerofn.compile(train_step_of(build(2))).lower(state, batch_of())
    for other in ("H100-8", HERE):
        with pytest.raises(ValueError, match="this machine is .* Measure this machine with `zerofn profile FILE`"):
            plan.timeline(other)
    with pytest.raises(ValueError, match="needs measurements of this machine"):
        plan.timeline()
    with pytest.raises(ValueError, match="this step was planned for here"):
        planned(stage=3, world=1).plan.timeline("H100-8")


def test_precisions_are_written_as_text():
    table = planned(world=2, stage=3, precision=zerofn.Precision(torch.float32, torch.bfloat16, torch.bfloat16))
    (row,) = json.loads(json.dumps(table.json()))["rows"]
    assert row["precision"].startswith("Precision(") and row["offload"] is None


def test_pictures_and_pages(tmp_path):
    table = planned(world=2, stage=(0, 3))
    table.picture(tmp_path / "table.png")
    assert (tmp_path / "table.png").stat().st_size > 5000
    page = ElementTree.fromstring(table._repr_html_().partition("<svg")[0].removesuffix("</div>") + "</div>")
    head, *rows = [[x.text or "" for x in line] for line in page.iter("tr")]
    assert head[0] == "stage" and len(rows) == len(table) and all(len(row) == len(head) for row in rows)
    bold = [k for k, line in enumerate(page.iter("tr")) if "bold" in line.get("style", "")]
    shown = "".join(page.itertext())
    assert bold == [table.rows.index(table.best) + 1] and shown.startswith(table.verdict())
    assert table.best.config.call().replace("; ", "\n") in shown
    assert re.search("compute-bound|limited by bytes", repr(table.best.plan))


def test_reprs_have_units():
    row = planned(world=2, stage=3, precision="bf16", offload=Offload(optimizer="nvme"))[0]
    time = row.plan.timeline()
    assert repr(row) == (
        f"stage 3, offload optimizer=nvme, bf16, 4 rows: {row.needs}; {time_in_words(time.seconds)} a step, "
        f"{limit_in_words(time.bound)}, {row.rate}; fits"
    )
    needs = row.needs
    assert repr(needs) == (f"{in_words(needs.device)} on the device, {in_words(needs.disk)} on drives")
    assert repr(needs._replace(host=1500, disk=0)) == f"{in_words(needs.device)} on the device, 1.5 kB in host memory"
    assert repr(time).startswith(f"{time_in_words(time.seconds)} a step on here, {limit_in_words(time.bound)} (")
    memory = row.plan.memory()
    assert repr(memory).startswith(f"{in_words(memory.total)} at the peak, in {memory.where} (state ")
    assert repr(memory).endswith(" on drives")
    small = planned(world=1, stage=0, machine=dataclasses.replace(HERE, memory=1000.0))[0]
    assert repr(small) == f"stage 0, 4 rows: more than {small.needs}; {small.lacks}"


def test_a_machine_reads_with_units():
    assert repr(KNOWN["A100-8"]) == (
        "A100-8: 8 x cuda, 85.9 GB at 2 TB/s each; bfloat16 155 TFLOP/s, float16 155 TFLOP/s, float32 75 TFLOP/s, "
        "float64 37.5 TFLOP/s; between ranks 240 GB/s, between nodes 25 GB/s, host to device 26 GB/s; "
        "host 2 TB at 330 GB/s; drives 15 TB, read at 25 GB/s, written at 12 GB/s"
    )
    plain = zerofn.Machine("plain", "cpu", 1, 8e9, 1e10, {"float32": 1e10}, 0, 0, measured_on="2 x CPU")
    assert repr(plain) == "plain: 1 x cpu, 8 GB at 10 GB/s each; float32 10 GFLOP/s; measured on 2 x CPU"


def test_a_weight_that_is_a_number_is_planned_for_ranks_that_are_not_there():
    """The sum of the weights is a transfer of a constant, which a capture must not run."""
    model = build(LAYERS)

    def train_step(state, batch):
        def loss_fn(params, x):
            return functional_call(model, params, (x,)).square().sum(), float(x.numel())

        loss, grads = state.value_and_grad(loss_fn)(batch["x"])
        return state.apply_gradients(grads), loss

    (row,) = zerofn.plan(
        train_step, init_state, batch_of(), machine=HERE, offload=None, precision=None, remat=None, world=2, stage=3
    )
    assert sum(1 for x in row.plan.graph.graph.nodes if "all_gather" in str(x.target)) > LAYERS

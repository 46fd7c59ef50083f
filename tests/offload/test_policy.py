"""State on drives: the same bits as in memory, in three units' buffers, and errors that say where."""

import dataclasses
import os
import types
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import apart, batch_of, build, fake_ranks, loss_of, scheduled, state_of, train_step_of
from zerofn import Offload, optim, tree
from zerofn.cost import host_share
from zerofn.graph.nested import graphs_of
from zerofn.graph.node_kinds import codec_operations, is_fetch
from zerofn.offload.disk import DiskError, pages
from zerofn.ops import cpu

ops, aten = torch.ops.zerofn, torch.ops.aten
NORMED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2, weight_decay=0.1))
TIERS = [{"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}, {"params": "nvme"}]


RULES = [
    optim.adamw(1e-2, moments="8bit"),
    optim.adamw(1e-2, moments="bf16"),
    optim.lion(1e-3, moments="8bit"),
    optim.adamw(1e-2, moments="fp8"),
    optim.sgd(0.1, 0.9),
    optim.lamb(1e-2),
    optim.multi_transform(
        {"a": optim.adamw(1e-2), "b": optim.sgd(0.1, 0.9)}, lambda leaf: "a" if leaf.name.startswith("0") else "b"
    ),
]


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def half(batch, precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return batch if dtype is None else tree.tree_map(lambda x: x.to(dtype), batch)


def step_of(module, num_microbatches=1, on_nonfinite="skip"):
    def step(state, batch):
        vg = state.value_and_grad(loss_of(module))
        loss, grads = (zerofn.accumulate(vg, num_microbatches) if num_microbatches > 1 else vg)(batch)
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite), {"loss": loss}

    return step


def results(make_state, step, batches):
    """Losses, and the whole state after these steps."""
    run, losses, state = zerofn.compile(step), [], make_state()
    for batch in batches:
        state, aux = run(state, batch)
        losses.append(aux["loss"].clone())
    return losses, zerofn.unshard(state)


def assert_bits_of_memory(path, stage, tiers, precision, num_microbatches, tx, on_nonfinite="skip"):
    """A step with its state in each of these tiers against the step with all of it in memory."""
    module = build(4)
    batches = [half(batch_of(rank(), seed=k), precision) for k in range(4)]
    if precision == "fp16":
        batches[1] = tree.tree_map(lambda x: x * 1e4, batches[1])  # its gradients overflow: the step is skipped
    step = step_of(module, num_microbatches, on_nonfinite)
    make = partial(state_of, module, stage, tx, precision=precision)
    expected = results(make, step, batches)
    for each in tiers:
        offload = Offload(path=path if "nvme" in each.values() else None, **each)
        what = f"{stage=}, {each}, {precision=}, {num_microbatches=}, {on_nonfinite=}"
        assert_same_trees(results(partial(make, offload=offload), step, batches), expected, what, equal_nan=True)


def every_tier(path, stage, precision, num_microbatches):
    on_all = dist.get_world_size() if dist.is_initialized() else 1
    tiers = [t for t in TIERS if "params" not in t or stage in (0, 3) or on_all == 1]
    assert_bits_of_memory(path, stage, tiers, precision, num_microbatches, NORMED)


@pytest.mark.part(stage=[3], precision=["bf16"])
@pytest.mark.quick(stage=[3], precision=["bf16"])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_has_the_bits_of_memory(tmp_path, stage, precision):
    every_tier(tmp_path, stage, precision, 1)


@pytest.mark.part(num_ranks=[2], stage=[3], precision=[None])
@pytest.mark.parametrize(
    ("num_ranks", "stage", "precision", "num_microbatches"),
    [
        (2, 3, None, 1),
        (2, 3, "bf16", 2),
        (2, 2, "bf16", 1),
        (2, 1, None, 2),
        (2, 0, "fp16", 1),
        (3, 3, "fp16", 2),
        (3, 2, None, 1),
        (4, 3, "bf16", 1),
        (4, 0, None, 1),
    ],
)
def test_several_ranks_have_the_bits_of_memory(ranks, tmp_path, num_ranks, stage, precision, num_microbatches):
    ranks(num_ranks, every_tier, tmp_path, stage, precision, num_microbatches)


@pytest.mark.part(number=[0])
@pytest.mark.parametrize("number", range(len(RULES)))
def test_every_rule_has_the_bits_of_memory(tmp_path, number):
    """Each precision with each way to treat a gradient that is not finite, by turns."""
    ways = ("skip", "ignore") if number % 2 else ("ignore", "skip")
    for precision, on_nonfinite in zip(("fp32", "bf16"), ways, strict=True):
        assert_bits_of_memory(tmp_path, 3, TIERS, precision, 1, RULES[number], on_nonfinite)


def test_a_fraction_takes_the_units_that_are_used_last(tmp_path):
    state = state_of(build(4), 3, offload=Offload(optimizer="nvme", path=tmp_path, fraction=0.5))
    placement = [x.storage.placement is not None for x in state.opt_state.mu.stored]
    assert placement == [False, False, True, True] and not any(x.storage.placement for x in state.params.stored)
    assert_bits_of_memory(tmp_path, 3, [{"optimizer": "nvme", "fraction": 0.5}], None, 1, NORMED)


def lowered(path, num_layers, tiers, on_nonfinite="skip", precision="bf16", world=1):
    module = build(num_layers)
    with fake_ranks(world):
        state = state_of(
            module,
            3,
            NORMED if on_nonfinite == "skip" else None,
            precision=precision,
            offload=Offload(path=path, **tiers),
        )
        return scheduled(step_of(module, 1, on_nonfinite), state, half(batch_of(), precision), donating=True)


def drive_buffers(program):
    """Bytes of each buffer that drives read to."""
    return [x.nbytes for x in program.buffers if x.device is None]


@pytest.mark.part(tiers=TIERS[1:2], world=[2], on_nonfinite=["skip"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("on_nonfinite", ["skip", "ignore"])
@pytest.mark.parametrize("tiers", TIERS[:2])
def test_three_units_of_buffers_whatever_the_depth(tmp_path, tiers, on_nonfinite, world):
    programs = [lowered(tmp_path, n, tiers, on_nonfinite, world=world) for n in (8, 16)]
    nbytes = [sum(drive_buffers(program)) for program in programs]
    gradient = 4 if on_nonfinite == "skip" else 0
    parameter = 2 if "params" in tiers else 0
    unit = pages(2 * 2048) + 2 * pages(4 * 2048) + (pages(gradient * 2048) + pages(parameter * 2048))
    most = 3 * unit + (3 * pages(2 * 2048) if parameter else 0)
    assert max(nbytes) <= most, (nbytes, most)  # not equal: packing leaves holes here and there


def test_rounds_of_a_loop_read_for_themselves(tmp_path):
    """Between the layers of a microbatch, too, no more than three units' buffers are in memory: both halves of the
    master, and the sum of the gradients, on its way to the drive or back."""
    sizes = []
    for n in (8, 16):
        with fake_ranks(1):
            state = state_of(build(n), 3, NORMED, precision="bf16", offload=Offload(params="nvme", path=tmp_path))
            program = scheduled(step_of(build(n), 2), state, half(batch_of(), "bf16"), donating=True)
        _, body = graphs_of(program.gm)
        reads = [x for x in body.graph.nodes if is_fetch(x)]
        assert n < len(reads) <= 2 * n and all(len(x.args[3]) == 2 for x in reads)
        sizes.append(drive_buffers(program))
    assert sizes[0] == sizes[1] and max(sizes[0]) <= 3 * (2 * pages(2 * 2048) + pages(4 * 2048))


def test_updates_work_in_the_buffers():
    """Nothing is decoded, copied or cast on its way from the drive and back."""
    gm = lowered(os.environ.get("TMPDIR", "/tmp"), 4, TIERS[1]).gm
    targets = [n.target for n in gm.graph.nodes]
    assert targets.count(ops.adamw_.default) == 4 and ops.write_drive.default not in targets
    assert not {*codec_operations(), aten.copy_.default} & set(targets)
    fetches = [n for n in gm.graph.nodes if is_fetch(n)]
    assert all(len(n.args[3]) == 2 for n in fetches)  # each has its place


def test_without_a_finite_check_units_are_updated_inside_the_backward_pass(tmp_path):
    nodes = list(lowered(tmp_path, 4, TIERS[0], "ignore").gm.graph.nodes)
    products = [k for k, n in enumerate(nodes) if n.target in (aten.mm.default, aten.mm.out)]
    updates = [k for k, n in enumerate(nodes) if n.target is ops.adamw_.default]
    assert len(updates) == 4 and sum(k < products[-1] for k in updates) == 3


# --- host memory, for a model that computes elsewhere -----------------------------------------------------------
# There is no accelerator here: the host stands for both, so that what is brought and put is copied.

ON_HOSTS = [
    {"optimizer": "cpu"},
    {"optimizer": "cpu", "params": "cpu"},
    {"params": "cpu"},
    {"optimizer": "nvme", "params": "cpu"},
    {"optimizer": "cpu", "params": "nvme"},
]


def on_hosts(path, stage, precision, num_microbatches, share):
    tiers = [t for t in ON_HOSTS if "params" not in t or stage in (0, 3)]
    with pytest.MonkeyPatch.context() as patch:
        apart(patch, share)
        assert_bits_of_memory(path, stage, tiers, precision, num_microbatches, NORMED)


@pytest.mark.part(share=[0.5], precision=["fp16"], stage=[0])
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("precision", "share"), [(None, 0.0), ("bf16", 0.0), ("bf16", 0.5), ("fp16", 0.5), ("fp16", 1.0), (None, 1.0)]
)
def test_what_is_brought_and_put_has_the_bits_of_memory(tmp_path, precision, share, stage):
    on_hosts(tmp_path, stage, precision, 1, share)


@pytest.mark.whole
@pytest.mark.parametrize(("num_ranks", "stage", "shares"), [(2, 3, (0.0, 1.0)), (2, 2, (1.0,)), (3, 3, (0.5,))])
def test_what_is_brought_and_put_on_several_ranks_has_the_bits_of_memory(ranks, tmp_path, num_ranks, stage, shares):
    for share in shares:
        ranks(num_ranks, on_hosts, tmp_path, stage, "bf16", 2, share)


def moved(path, share, tiers, on_nonfinite="ignore"):
    module = build(4)
    with pytest.MonkeyPatch.context() as patch:
        apart(patch, share)
        state = state_of(module, 3, precision="bf16", offload=Offload(**tiers))
        return scheduled(step_of(module, 1, on_nonfinite), state, half(batch_of(), "bf16"), donating=True).gm


def test_the_host_updates_where_state_lies(tmp_path):
    """Gradients and upper halves come down, upper halves go up; moments and lower halves stay."""
    gm = moved(tmp_path, 1.0, ON_HOSTS[0])
    nodes = list(gm.graph.nodes)
    rules = [n for n in nodes if n.target is ops.adamw_.default]
    assert all(n.meta.get("aside") for n in rules)
    assert all(x.op == "placeholder" for n in rules for x in (n.args[0][1], *n.args[2], *n.args[3]))
    assert sum(n.target is ops.put_.default for n in nodes) == 4
    big = [n for n in nodes if n.target is ops.bring.default and n.meta["val"].numel() > 1]
    assert len(big) == 8


def test_the_device_updates_what_is_streamed_to_it(tmp_path):
    nodes = list(moved(tmp_path, 0.0, ON_HOSTS[0]).graph.nodes)
    assert not any(n.meta.get("aside") for n in nodes)
    assert sum(n.target is ops.bring.default for n in nodes) == 12  # lower halves and two moments
    assert sum(n.target is ops.put_.default for n in nodes) == 12


def test_what_fails_aside_is_told(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        apart(patch, 1.0)
        module = build(2)
        step, state = zerofn.compile(train_step_of(module)), state_of(module, 3, offload=Offload(optimizer="cpu"))

        def broken(*args, **kwargs):
            raise ValueError("no more memory")

        patch.setattr(cpu, "update_", broken)
        with pytest.raises(ValueError, match="no more memory"):
            for _ in range(2):
                state, _ = step(state, batch_of())


@pytest.mark.parametrize(
    ("dram", "link", "lossy", "share", "rate"),
    [
        (40, 26, False, 0.0, 1.67),
        (65, 26, False, 0.18, 2.55),
        (160, 26, False, 0.72, 5.4),
        (400, 55, False, 0.78, 13.2),
        (62, 55, False, 0.0, 2.6),
        (450, 370, False, 0.0, 18.8),
        (65, 26, True, 0.13, 6.91),
        (160, 26, True, 0.74, 10.3),
    ],
)
def test_which_processor_updates(dram, link, lossy, share, rate):
    """Closed forms of the formula's minimum, for desktops, servers and a machine whose link is as fast as its memory:
    elements a second, in billions, with exact and with 8-bit moments."""
    on_host, streamed = (14.06, 4.03) if lossy else (28, 12)
    assert host_share.best_share(on_host, streamed, dram, link) == pytest.approx(share, abs=0.03)
    assert 1 / host_share.seconds(share, on_host, streamed, dram, link) == pytest.approx(rate, rel=0.05)


# --- beside a compiled step -------------------------------------------------------------------------------------


def test_eager_arithmetic_says_what_to_write(tmp_path):
    state = state_of(build(2), 3, offload=Offload(optimizer="nvme", path=tmp_path))
    with pytest.raises(RuntimeError, match=r"opt_state.mu\['0'\] is on a drive.*zerofn.compile.*zerofn.unshard"):
        train_step_of(build(2))(state, batch_of())
    assert "on a drive" in repr(state.opt_state.mu) and state.opt_state.mu.stored[0].nbytes == 0


def test_a_step_that_keeps_the_old_state_is_refused(tmp_path):
    state = state_of(build(2), 3, offload=Offload(optimizer="nvme", path=tmp_path))
    step = zerofn.compile(train_step_of(build(2)), donate=False)
    with pytest.raises(RuntimeError, match="is on a drive, .*donate=False"):
        step(state, batch_of())
    zerofn.unshard(state)  # it is as it was


def test_evaluation_reads_what_lies_on_the_drive(tmp_path):
    module = build(3)
    state = state_of(module, 3, offload=Offload(params="nvme", path=tmp_path))
    evaluate = zerofn.compile(lambda state, batch: loss_of(module)(zerofn.gather(state.params), batch))
    expected = loss_of(module)(dict(module.named_parameters()), batch_of()).detach()
    for _ in range(3):
        assert torch.equal(evaluate(state, batch_of()), expected)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_eager_gather_reads_the_drive(tmp_path, precision):
    module = build(3)
    here, there = (
        state_of(module, 3, precision=precision, offload=offload)
        for offload in (None, Offload(params="nvme", optimizer="nvme", path=tmp_path))
    )
    assert_same_trees(zerofn.gather(there.params), zerofn.gather(here.params))
    some, name = zerofn.gather(there.params, only="0"), next(n for n, _ in module.named_parameters())
    assert torch.equal(some[name], zerofn.gather(here.params)[name]) and None in some.values()


def checkpoints(path, tiers):
    """Saved from one tier, loaded into another, and trained on: as if it had stayed in memory."""
    module, step = build(3), None
    step = zerofn.compile(train_step_of(module))
    make = partial(state_of, module, 3, NORMED, precision="bf16")
    placement = partial(make, offload=Offload(path=path, **tiers))
    batches = [half(batch_of(rank(), seed=k), "bf16") for k in range(4)]
    expected = make()
    for batch in batches:
        expected, _ = step(expected, batch)
    for k, (first, second) in enumerate([(placement, make), (make, placement), (placement, placement)]):
        state = first()
        for batch in batches[:2]:
            state, _ = step(state, batch)
        zerofn.save(path / f"saved{k}", state)
        state = zerofn.load(path / f"saved{k}", like=second())
        for batch in batches[2:]:
            state, _ = step(state, batch)
        assert_same_trees(zerofn.unshard(state), zerofn.unshard(expected), f"{tiers}, way {k}")


@pytest.mark.whole
@pytest.mark.part(num_ranks=[2], tiers=TIERS[1:2])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_checkpoints_from_any_tier_to_any(ranks, tmp_path, num_ranks, tiers):
    ranks(num_ranks, checkpoints, tmp_path, tiers)


# --- bad input, and drives that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offload", "stage", "message"),
    [
        ("disk", 3, "offload='disk' is not known; did you mean"),
        (3, 3, "expected None, 'cpu', 'nvme' or a zerofn.Offload, got int"),
        (Offload(fraction=0.5), 3, r"fraction=0.5.* offloads nothing. Write optimizer='cpu'"),
        (Offload(optimizer="nvme", update="gpu"), 3, "no other processor could run the update"),
        (Offload(optimizer="nvme", update="cpu"), 3, r"update='cpu'\) has no effect"),
        (Offload(optimizer="nvme", path="/nowhere/at/all"), 3, "/nowhere/at/all does not exist"),
    ],
)
def test_what_cannot_be_is_a_sentence(offload, stage, message):
    with pytest.raises((ValueError, TypeError, DiskError), match=message):
        state_of(build(2), stage, offload=offload)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "ssd"}, r"Offload\(optimizer='ssd'\) is not known; expected None, 'cpu' or 'nvme'"),
        ({"optimizer": "cpu", "path": "/tmp"}, "has no effect without 'nvme'"),
        ({"optimizer": "cpu", "update": "npu"}, r"Offload\(update='npu'\) is not known; expected 'auto', 'cpu'"),
        ({"optimizer": "nvme", "fraction": 0}, "above 0 and at most 1"),
        ({"optimizer": "nvme", "fraction": "0.5"}, "expected a number.*got str"),
        ({"optimizer": "nvme", "path": 3}, "expected a folder or a list of folders, got int"),
        ({"optimizer": "nvme", "path": ""}, "one or more folders, each only once"),
        ({"optimizer": "nvme", "path": ["/tmp", "/tmp/../tmp"]}, "one or more folders, each only once"),
    ],
)
def test_an_offload_that_cannot_be_is_a_sentence(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Offload(**given)


def test_what_keeps_nothing_has_nothing_to_offload(tmp_path):
    with pytest.raises(ValueError, match=r"has no effect: the optimizer has no state.*Offload\(params=\.\.\.\)"):
        state_of(build(2), 3, optim.sgd(0.1), offload=Offload(optimizer="nvme", path=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_folder_in_memory_is_told(caplog, monkeypatch):
    where = types.SimpleNamespace(mountpoint="/", fstype="tmpfs")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [where])
    state_of(build(2), 3, offload=Offload(optimizer="nvme", path="/tmp"))
    assert "/tmp is in memory itself (tmpfs)" in caplog.text


def test_less_memory_than_is_needed_is_a_table_of_what_fits(monkeypatch):
    monkeypatch.setattr(zerofn.offload.policy, "free_memory", lambda: 4 * 3 * 2048)
    monkeypatch.setattr(zerofn.offload.policy, "lies_there", lambda tier, device: False)
    table = r"as asked +0.00 GB  does not fit.*optimizer='nvme'\) +0.00 GB  fits.*moments='8bit'"
    with pytest.raises(MemoryError, match=f"(?s)0.00 GB are free. Nothing was allocated.*{table}"):
        state_of(build(3), 3, offload="cpu")
    state_of(build(3), 3)  # what is not offloaded is not judged


def no_effect(path):
    with pytest.raises(ValueError, match="no effect at stages 1 and 2.*stage=3"):
        state_of(build(2), 2, offload=Offload(params="nvme", path=path))


def test_parameters_beside_a_gathered_copy_stay(ranks, tmp_path):
    ranks(2, no_effect, tmp_path)


def failing_drive(path):
    module = build(3)
    step = zerofn.compile(train_step_of(module))
    state = state_of(module, 3, offload=Offload(optimizer="nvme", path=path))
    state, _ = step(state, batch_of(rank()))
    zerofn.save(path / "saved", state)

    def broken(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(os, "pwritev", broken)
        try:
            for _ in range(3):
                state, _ = step(state, batch_of(rank()))
        except Exception as error:
            return str(error)
    return "no error"


def test_a_drive_that_fails_ends_the_step_on_all_ranks(ranks, tmp_path):
    """Each has the path and the unit; the checkpoint before is whole."""
    messages = ranks(2, failing_drive, tmp_path)
    ranks.stop()  # their group is gone
    for message in messages:
        assert str(tmp_path) in message and "Input/output error" in message
        assert "opt_state." in message or "the gradient of params[" in message
    like = state_of(build(3), 3)
    assert int(zerofn.load(tmp_path / "saved", like=like).step) == 1


@pytest.mark.parametrize(
    ("offload", "kept"),
    [
        ("cpu", Offload()),
        (Offload("cpu"), Offload()),
        (Offload(optimizer="nvme", params="cpu"), Offload(optimizer="nvme")),
    ],
)
def test_host_memory_beside_a_model_on_the_host_is_a_warning(tmp_path, offload, kept):
    module = build(2)
    if kept.optimizer:
        offload = dataclasses.replace(offload, path=str(tmp_path))
    with pytest.warns(UserWarning, match="'cpu' has no effect, because the parameters are on the CPU"):
        state = state_of(module, 3, offload=offload)
    assert ("on drives" in repr(state)) == bool(kept.optimizer)
    state, _ = zerofn.compile(train_step_of(module))(state, batch_of())
    plain, _ = train_step_of(module)(state_of(module, 3), batch_of())
    assert_same_trees(zerofn.unshard(state.params), zerofn.unshard(plain.params))

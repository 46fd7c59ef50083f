"""The CPU kernels beside torch, float64 and the same in torch's operations."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support import kernel_cases as cases
from tests.support.kernel_cases import HYPER, RUNS, SIZE
from tests.support.same import assert_same_trees
from zerofn.ops import cpu, reference

needs_library = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
each_isa = pytest.mark.parametrize("isa", cpu.isas())


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def stepped(case, options, update=cpu.update_):
    p, g, moments = cases.copies(*case)
    update(options.pop("rule"), p, g, moments, **options)
    return cases.tensors(p, moments)


@needs_library
@each_isa
@pytest.mark.parametrize("rule, master, moment, gradient", cases.COMBINATIONS)
def test_every_form_equals_torchs_operations(rule, master, moment, gradient, isa, monkeypatch):
    monkeypatch.setenv("ZEROFN_ISA", isa)
    case, options = cases.shard(rule, master, moment, gradient), cases.options(rule) | {"rule": rule}
    expected = stepped(case, dict(options), reference.update_)
    for new, want, old in zip(stepped(case, options), expected, cases.tensors(*case[::2]), strict=True):
        assert cases.same_bits(new, want)
        assert new.numel() < 100 or not torch.equal(new, old)


@pytest.mark.parametrize("rule, master, moment, gradient", [x for x in cases.COMBINATIONS if x[3] == torch.float16])
def test_torchs_operations_take_little_memory_beside(rule, master, moment, gradient, monkeypatch):
    """They work a piece at a time, with the bits of the whole: a run is cut where its vectors end, or not at all."""
    runs, size = [(0, 1003), (1024, 3001), (3333, 4200), (4200, 6101)], 6200
    case = cases.shard(rule, master, moment, gradient, size)
    options = cases.options(rule, runs) | {"rule": rule}
    expected = stepped(case, dict(options), reference.update_)
    monkeypatch.setattr(reference, "PIECE", 2048)
    assert reference._windows(size, [(*run, 0.0, 0.0) for run in runs]) == [(0, 2048), (2048, 6144), (6144, size)]
    assert all(map(cases.same_bits, stepped(case, options, reference.update_), expected))


def test_what_torchs_operations_take_beside_a_shard_does_not_grow_with_it(monkeypatch):
    """Of 16 pieces, less than one int64 for each element."""
    size = 1 << 18
    case = cases.shard("adamw", "split", "8-bit", torch.bfloat16, size)
    monkeypatch.setattr(cpu, "missing", lambda: "not there")
    monkeypatch.setattr(reference, "PIECE", size // 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        cpu.update_("adamw", *case, **cases.options("adamw", [(0, size)]))
    live = most = 0
    for event in sorted(found.profiler.kineto_results.events(), key=lambda x: x.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    assert 0 < most < 8 * size


@needs_library
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 255, 256, 257, 513, 2048 + 17])
@pytest.mark.parametrize("moment", cases.MOMENTS)
def test_odd_sizes(size, moment):
    case = cases.shard("adamw", "split", moment, torch.bfloat16, size)
    options = cases.options("adamw", [(0, size)]) | {"rule": "adamw"}
    expected = stepped(case, dict(options), reference.update_)
    assert all(map(cases.same_bits, stepped(case, options), expected))


@needs_library
@pytest.mark.parametrize("moment", cases.MOMENTS)
def test_the_number_of_threads_changes_no_bit(moment, threads):
    size = 300_001
    case = cases.shard("adamw", "split", moment, torch.bfloat16, size)
    options = cases.options("adamw", [(0, 100_003), (100_010, size)]) | {"rule": "adamw"}
    threads(1)
    expected = stepped(case, dict(options))
    threads(2)
    assert all(map(cases.same_bits, stepped(case, options), expected))


@needs_library
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("b1, decay, size", [(0.9, 0.1, 6400), (0.9, 0.0, 4099), (0.3, 0.1, 1001), (0.5, 0.0, 13)])
def test_adam_in_fp32_is_torchs_fused_one(decoupled, b1, decay, size):
    """Over three steps, in values from denormal to huge."""
    p, m, v = cases.wild(size, 0), torch.zeros(size), torch.zeros(size)
    ours = [x.clone() for x in (p, m, v)]
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    hyper = {"b1": b1, "b2": 0.999, "eps": 1e-8}
    for count in (1, 2, 3):
        g = cases.wild(size, 10 + count)
        fused(
            [p],
            [g],
            [m],
            [v],
            [],
            [torch.tensor(float(count))],
            lr=1e-3,
            beta1=b1,
            beta2=0.999,
            weight_decay=decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        cpu.update_(
            "adamw" if decoupled else "adam",
            ours[:1],
            g,
            [[ours[1]], [ours[2]]],
            starts=[0],
            stops=[size],
            rates=[1e-3],
            decays=[decay],
            hyper=hyper,
            count=count,
        )
        assert_same_trees(ours, (p, m, v))


@pytest.mark.parametrize("moment, tolerance", [("fp32", 1e-6), ("bf16", 1e-3), ("8-bit", 1e-3)])
def test_adamw_is_the_papers_in_float64(moment, tolerance):
    """Loshchilov and Hutter 2019, Algorithm 2, from what the moments are when decoded."""
    p, g, moments = cases.shard("adamw", "fp32", moment, torch.float32)
    rng = torch.Generator().manual_seed(5)
    g.copy_(torch.randn(SIZE, generator=rng))
    wide = []
    for i, (stored, x) in enumerate(zip(moments, (0.1 * g, g.square()), strict=True)):
        new = {
            "fp32": lambda x, i: (x,),
            "bf16": lambda x, i: (x.bfloat16(),),
            "8-bit": lambda x, i: cpu.encode(x, i == 0),
        }[moment](x, i)
        for old, fresh in zip(stored, new, strict=True):
            old.copy_(fresh)
        wide.append((cpu.decode(*stored, i == 0) if moment == "8-bit" else stored[0]).double())
    expected = p[0].double() * (1 - 1e-2 * 0.1)
    m, v = 0.9 * wide[0] + 0.1 * g.double(), 0.999 * wide[1] + 0.001 * g.double().square()
    change = 1e-2 * (m / (1 - 0.9**3)) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
    cpu.update_(
        "adamw", p, g, moments, starts=[0], stops=[SIZE], rates=[1e-2], decays=[0.1], hyper=HYPER["adamw"], count=3
    )
    size = change.abs() + expected.abs() * 2.0**-22 / tolerance  # and p and 1 - lr * decay are rounded, too
    assert ((p[0].double() - (expected - change)).abs() <= tolerance * size).all()


@pytest.mark.parametrize("moment", cases.MOMENTS)
@pytest.mark.parametrize("master", cases.MASTERS)
def test_elements_outside_of_all_runs_stay(master, moment):
    case = cases.shard("adamw", master, moment, torch.float32)
    p, g, moments = cases.copies(*case)
    outside = torch.ones(SIZE, dtype=torch.bool)
    for start, stop in RUNS:
        outside[start:stop] = False
    g[outside] = torch.nan
    for i, stored in enumerate(moments):  # padding is zero, and stays zero under any scale
        fresh = cpu.encode(cases.wild(SIZE, i).abs() * ~outside, i == 0) if moment == "8-bit" else stored
        for x, y in zip(stored, fresh, strict=True):
            x.copy_(y)
    before = [x.clone() for x in cases.tensors(p, moments)]
    cpu.update_("adamw", p, g, moments, **cases.options("adamw"))
    for x, y in zip(cases.tensors(p, moments), before, strict=True):
        if x.numel() == SIZE:
            assert torch.equal(x[outside], y[outside])


@needs_library
def test_misaligned_memory():
    case = cases.shard("adamw", "split", "8-bit", torch.bfloat16)
    shifted = (
        [cases.odd_address(x) for x in case[0]],
        cases.odd_address(case[1]),
        [[cases.odd_address(x) for x in moment] for moment in case[2]],
    )
    options = cases.options("adamw")
    cpu.update_("adamw", *shifted, **options)
    expected = stepped(case, options | {"rule": "adamw"}, reference.update_)
    assert all(map(cases.same_bits, cases.tensors(*shifted[::2]), expected))


@pytest.mark.parametrize("moment", cases.MOMENTS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows(bad, moment):
    """In p and in its moments; nowhere else but in its block of 8-bit codes."""
    p, g, moments = cases.shard("adamw", "split", moment, torch.bfloat16)
    g[600] = bad
    cpu.update_("adamw", p, g, moments, **cases.options("adamw"))
    decoded = [cpu.decode(*x, i == 0) if moment == "8-bit" else x[0] for i, x in enumerate(moments)]
    block = slice(512, 768) if moment == "8-bit" else slice(600, 601)
    for x in decoded:
        assert not x[block].isfinite().any()
        assert x.isfinite().sum() == SIZE - (block.stop - block.start)
    cpu.update_("adamw", p, g, moments, **cases.options("adamw", count=4))
    assert not p[0][600].isfinite() and cpu.join(*p)[:512].isfinite().all()


def test_stochastic_rounding_lets_small_changes_through():
    """v = 0.999 v each step: a nearest rounding would keep bf16 and 8-bit v for ever."""
    size, steps = 8192, 500
    for moments in (
        [[torch.zeros(size).bfloat16()], [torch.ones(size).bfloat16()]],
        [list(cpu.encode(torch.zeros(size), True)), list(cpu.encode(torch.ones(size), False))],
    ):
        p, g = [torch.zeros(size)], torch.zeros(size)
        for count in range(1, steps + 1):
            cpu.update_(
                "adamw",
                p,
                g,
                moments,
                starts=[0],
                stops=[size],
                rates=[0.0],
                decays=[0.0],
                hyper=HYPER["adamw"],
                count=count,
            )
        v = moments[1][0].float() if len(moments[1]) == 1 else cpu.decode(*moments[1], False)
        assert v.mean().item() == pytest.approx(0.999**steps, rel=0.01)


def test_a_keys_draws_fill_every_stratum_once_and_look_random_in_their_order():
    for key in (1, 2, 77):
        draws = reference.draws(key, 0, 2048, 0)
        assert torch.equal((draws >> 21).sort().values, torch.arange(2048))
        parts = torch.bincount(draws >> 12 & 0x1FF, minlength=512).double()  # the next bits are not stratified
        assert ((parts - 4).square() / 4).sum() < 620  # chi-square, 511 degrees: once in 2,000
        for distance in (*range(1, 33), 64, 128, 256, 512, 1024):
            pairs = torch.stack([draws, draws.roll(distance)]).double()
            assert abs(torch.corrcoef(pairs)[0, 1]) < 0.1
            cells = (pairs / 2**29).long()
            square = torch.bincount(8 * cells[0] + cells[1], minlength=64).double()
            assert ((square - 32).square() / 32).sum() < 130


def test_other_counts_and_places_draw_other_bits():
    """Of one element over 4,096 counts, of m and v, of neighbours and of two units: uniform and uncorrelated."""
    counts = range(1, 4097)
    m = torch.stack([reference.draws(count, 0, 4096, 0)[[5, 6, 7, 2053]] for count in counts], 1).double() / 2**32
    v = torch.stack([reference.draws(count, 0, 4096, 1)[[5]] for count in counts], 1).double() / 2**32
    for row in torch.cat([m, v]):
        parts = torch.bincount((row * 16).long(), minlength=16).double()
        assert ((parts - 256).square() / 256).sum() < 40  # chi-square, 15 degrees: once in 2,000
        assert abs(torch.corrcoef(torch.stack([row[:-1], row[1:]]))[0, 1]) < 0.06
    assert (torch.corrcoef(torch.cat([m, v])) - torch.eye(5)).abs().max() < 0.06


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"rule": "adagrad"}, ValueError, "there is no rule 'adagrad'"),
        ({"starts": [10, 5, 1010, 3333]}, ValueError, "in order, apart"),
        ({"stops": [1003, 1007, 2560, 9999]}, ValueError, "inside"),
        ({"rates": [0.1]}, ValueError, "equally long"),
        ({"factors": (1.0, 1.0, 1.0)}, ValueError, "at most two factors"),
        ({"offset": 100}, ValueError, "multiple of 2048"),
        ({"g": torch.zeros(SIZE, dtype=torch.float64)}, TypeError, "got torch.float64"),
        ({"g": torch.zeros(2 * SIZE)[::2]}, TypeError, "contiguous"),
        ({"g": torch.zeros(SIZE - 1)}, ValueError, f"{SIZE - 1} elements"),
        ({"p": [torch.zeros(SIZE, dtype=torch.bfloat16)]}, TypeError, "got torch.bfloat16"),
        ({"moments": []}, ValueError, "has 2 moments"),
        ({"moments": [[torch.zeros(SIZE)], [torch.zeros(SIZE).bfloat16()]]}, ValueError, "one format"),
    ],
)
def test_mistakes_raise_before_anything_is_written(change, error, words):
    p, g, moments = cases.shard("adamw", "fp32", "fp32", torch.float32)
    before = p[0].clone()
    given = {"rule": "adamw", "p": p, "g": g, "moments": moments} | cases.options("adamw") | change
    with pytest.raises(error, match=words):
        cpu.update_(given.pop("rule"), given.pop("p"), given.pop("g"), given.pop("moments"), **given)
    assert torch.equal(p[0], before)


def test_can_update():
    p, g, moments = cases.shard("adamw", "split", "8-bit", torch.bfloat16)
    assert cpu.can_update("adamw", p, g, moments)
    assert not cpu.can_update("adamw", [p[0].double()], g.double(), [[g.double()], [g.double()]])
    assert not cpu.can_update("adamw", p, g.to("meta"), moments)
    assert not cpu.can_update("rmsprop", p, g, moments)


PROGRAM = """
import torch
from zerofn.ops import adamw, cpu
print(cpu.missing())
p, g, m, v = [torch.ones(300)], torch.ones(300), torch.zeros(300), torch.zeros(300)
cpu.update_("adamw", p, g, [[m], [v]], starts=[0], stops=[300], rates=[0.5], decays=[0.0],
               hyper={"b1": 0.9, "b2": 0.99, "eps": 0.0}, count=1)
print(cpu.isa(), p[0].unique().tolist(), cpu.checksum(g), cpu.norm2_and_extreme([g])[0])
"""


def run_program(**environment):
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_without_the_library_torch_does_it():
    (reason, result), _ = run_program(ZEROFN_NATIVE="0")
    assert reason == "The CPU kernels are not used: ZEROFN_NATIVE is 0."
    name, rest = result.split(" ", 1)
    assert name == "torch" and rest.startswith("[0.5]")
    if cpu.missing() is None:
        with contextlib.redirect_stdout(io.StringIO()) as here:
            exec(PROGRAM, {})
        assert here.getvalue().splitlines()[1].split(" ", 1)[1] == rest


@pytest.mark.whole
@pytest.mark.slow
@needs_library
def test_an_isa_that_is_not_there_is_refused():
    _, error = run_program(ZEROFN_ISA="z80")
    assert "ZEROFN_ISA is 'z80', and this machine has" in error


@pytest.mark.whole
@pytest.mark.slow
def test_a_thread_updates_after_the_main_thread_has_ended():
    """Python's executors refuse work by then."""
    script = """if True:
        import threading, torch
        from zerofn.ops import cpu, sgd
        torch.set_num_threads(2)

        def train():
            main.join()
            size = 1 << 18
            p, g = torch.zeros(size), torch.ones(size)
            cpu.update_("sgd", [p], g, [], starts=[0], stops=[size], rates=[1.0], decays=[0.0], hyper={}, count=1)
            print("updated:", bool((p == -1).all()))

        main = threading.main_thread()
        threading.Thread(target=train).start()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "updated: True\n", done.stderr

"""The GPU kernels: compiled for every architecture, run thread by thread on the CPU, and on a GPU if there is one."""

import contextlib
import ctypes
import importlib.metadata
import itertools
import re
import sys
import types

import pytest
import torch

from tests.support import kernels_on_cpu
from zerofn.ops import adamw, cpu, cuda, formats, frozen_adamw, lion, reference, sgd, sign_rows, update_rule, wire_codes  # noqa: F401 - rules

ARCHITECTURES = {70: "nvidia-cuda-nvrtc-cu12"} | dict.fromkeys((75, 80, 86, 89, 90, 100, 120), "nvidia-cuda-nvrtc")
HYPER = {
    "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
    "adam": {"b1": 0.4, "b2": 0.999, "eps": 1e-5},
    "lion": {"b1": 0.9, "b2": 0.99},
    "sgd": {},
    "sgd_momentum": {"b1": 0.9, "nesterov": True},
}
GPU = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(not torch.cuda.is_available() or bool(cuda.missing()), reason="needs a GPU and CuPy"),
)


# --- compiled ----------------------------------------------------------------------------------


def nvrtc(package):
    """The package's NVRTC; each lies in a folder of its own, so both versions can be installed."""
    name = [f for f in importlib.metadata.files(package) if f.name.startswith("libnvrtc.so")]
    return ctypes.CDLL(str(name[0].locate()))


def compiled(architecture):
    """(NVRTC's result, its log, the program, its PTX), with the options that CuPy's NVRTC is given."""
    library, program, size = nvrtc(ARCHITECTURES[architecture]), ctypes.c_void_p(), ctypes.c_size_t()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), cuda.source().encode(), b"cuda.cu", 0, None, None)
    options = [o.encode() for o in (*cuda.OPTIONS, f"--gpu-architecture=sm_{architecture}")]
    result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    codes = []
    for kind in ("CUBIN", "PTX"):
        getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        codes.append(ctypes.create_string_buffer(size.value))
        getattr(library, f"nvrtcGet{kind}")(program, codes[-1])
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode(), codes[0].raw, codes[1].value.decode()


@pytest.mark.part(architecture=[70])
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_a_warning(architecture):
    result, log, cubin, ptx = compiled(architecture)
    warnings = [x for x in log.splitlines() if x.strip() and "Architectures prior to" not in x]
    assert (result, warnings) == (0, [])
    assert cubin[:4] == b"\x7fELF"
    assert [name for name in cuda.KERNELS if f".text.zf_{name}\0".encode() not in cubin] == []
    assert "fma.rn.f32" in ptx and "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    assert re.findall(r"\S+(?:\.ftz|\.approx)\S*\.f32", ptx) == []  # small numbers keep their bits
    assert re.findall(r"(?:mul|add|sub)\.f32", ptx) == []  # these might be joined into one fma, unlike mul.rn.f32


# --- run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return kernels_on_cpu.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=["cpu", GPU])
def device(request, monkeypatch):
    """Where the kernels run: on a GPU, or on the CPU thread by thread."""
    if request.param == "cpu":
        launch = kernels_on_cpu.launcher(request.getfixturevalue("library"), most_blocks=2)
        monkeypatch.setattr(cuda, "launch", launch)
    return request.param


def floats(size, seed, *, strange=True):
    """float32 of many magnitudes; `strange`: also denormals, zeros, inf, NaN and what is next to inf."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=random) * torch.exp2(torch.randint(-12, 3, (size,), generator=random).float())
    if strange and size:
        odd = [0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e38, -3.4028235e38, float("inf"), float("-inf"), float("nan"), 1e20]
        where = torch.randint(0, size, (size // 300 + 3,), generator=random)
        x[where] = torch.tensor(odd)[torch.randint(0, len(odd), where.shape, generator=random)]
    return x


def bits(x):
    """As whole numbers, all NaN the same one."""
    if x.is_floating_point():
        x = x.masked_fill(x.isnan(), float("nan"))
        return x.view({4: torch.int32, 2: torch.int16}[x.element_size()]).cpu()
    return x.cpu()


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        different = (bits(x) != bits(y)).nonzero().flatten().tolist()
        assert different == [], [(i, x.cpu()[i].item(), y[i].item()) for i in different[:5]]


def within(x, device, shift=0):
    """`x` on the device, `shift` elements into memory whose other elements are noted: (the tensor, all of it)."""
    memory = torch.full((x.numel() + shift + 16,), 77, dtype=x.dtype, device=device)
    inside = memory[shift : shift + x.numel()]
    return inside.copy_(x), memory


def kept_moment(x, form, signed):
    if form == "fp32":
        return [x]
    return [x.bfloat16()] if form == "bf16" else list(cpu.encode(x, signed))


def update_case(name, master, form, dtype, size, seed, strange=True):
    """(p, g, moments, runs) on the CPU. Runs begin and end anywhere; some are empty, one is longer than a block."""
    num_moments = {"sgd": 0, "lion": 1, "sgd_momentum": 1}.get(name, 2)
    p = floats(size, seed, strange=strange)
    g = floats(size, seed + 1, strange=strange).to(dtype)
    m, v = floats(size, seed + 2, strange=strange), floats(size, seed + 3, strange=strange).abs()
    moments = [kept_moment(x, form, i == 0) for i, x in enumerate([m, v][:num_moments])]
    cuts = torch.randint(0, size + 1, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    ends = sorted([0, *cuts, cuts[0], size])
    starts, stops = ends[:-1], ends[1:]
    chosen = [i for i in range(len(starts)) if i % 4 != 1]
    runs = {
        "starts": [starts[i] for i in chosen],
        "stops": [stops[i] for i in chosen],
        "rates": [1e-2 / (1 + i % 3) for i in chosen],
        "decays": [0.1 * (i % 2) for i in chosen],
    }
    return [p] if master == "fp32" else list(cpu.split(p)), g, moments, runs


FORMS = [("sgd", "fp32"), *itertools.product(["adamw", "adam", "lion", "sgd_momentum"], ["fp32", "bf16", "8bit"])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["g32", "gb16", "g16"])
@pytest.mark.parametrize("master", ["fp32", "split"])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_update_is_the_cpus_bit_for_bit(device, name, form, master, dtype):
    """Against torch's operations, in rounds on what the last one left, with memory at hand and not at hand for wide
    accesses."""
    for size, shift, count, lr, factor in [(5000, 0, 1, None, None), (2049, 1, 7, 0.5, 0.125), (17, 8, 1000, 1.5, 3.0)]:
        p, g, moments, runs = update_case(name, master, form, dtype, size, seed=size)
        flat = [*p, g, *(x for moment in moments for x in moment)]
        held = [within(x, device, shift) for x in flat]
        inside, parts = [x for x, _ in held], iter([x for x, _ in held][len(p) + 1 :])
        cuda.update_(
            name,
            inside[: len(p)],
            inside[len(p)],
            [[next(parts) for _ in m] for m in moments],
            **runs,
            hyper=HYPER[name],
            count=torch.tensor(count, device=device),
            offset=4096,
            lr=None if lr is None else torch.tensor(lr, dtype=torch.float64, device=device),
            factor=None if factor is None else torch.tensor(factor, device=device),
            finite=torch.tensor(True, device=device),
        )
        rates = [(1.0 if lr is None else lr) * x for x in runs["rates"]]
        reference.update_(
            name,
            p,
            g,
            moments,
            **runs | {"rates": rates},
            hyper=HYPER[name],
            count=count,
            offset=4096,
            factors=() if factor is None else (factor,),
        )
        assert_same(inside, flat)
        for (_, memory), x in zip(held, flat, strict=True):
            assert (memory[:shift] == 77).all() and (memory[shift + x.numel() :] == 77).all()


def test_an_update_that_is_not_finite_changes_nothing(device):
    for form in ("fp32", "bf16", "8bit"):
        p, g, moments, runs = update_case("adamw", "split", form, torch.float32, 700, seed=3)
        flat = [x.to(device) for x in (*p, *(x for moment in moments for x in moment))]
        old, parts = [x.clone() for x in flat], iter(flat[2:])
        now = {"hyper": HYPER["adamw"], "count": torch.tensor(3, device=device)}
        held = [[next(parts) for _ in m] for m in moments]
        cuda.update_("adamw", flat[:2], g.to(device), held, **runs, **now, finite=torch.tensor(False, device=device))
        assert_same(flat, old)
        cuda.update_("adamw", flat[:2], g.to(device), held, **runs, **now, finite=torch.tensor(True, device=device))
        assert not torch.equal(flat[0].cpu(), old[0].cpu())


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_what_is_in_no_run_keeps_its_bits(device, form):
    """Bits of any kind, NaN in all its patterns too; of 8-bit blocks those that no run enters."""
    random = torch.Generator().manual_seed(11)
    hi, lo, m, v = (torch.randint(-(1 << 15), 1 << 15, (1024,), generator=random).short() for _ in range(4))
    codes = [torch.randint(0, 100, (1024,), generator=random).to(torch.uint8) for _ in range(2)]
    moments = [[m.view(torch.bfloat16)], [v.view(torch.bfloat16)]]
    if form == "8bit":  # whose scales are larger than they have to be
        moments = [[x, torch.tensor([1.0, 0.0, float("nan"), 64.0])] for x in codes]
    flat = [x.clone().to(device) for x in (hi.view(torch.bfloat16), lo, *(x for m in moments for x in m))]
    parts = iter(flat[2:])
    cuda.update_(
        "adamw",
        flat[:2],
        torch.ones(1024).to(device),
        [[next(parts) for _ in m] for m in moments],
        starts=[256, 600],
        stops=[512, 700],
        rates=[1.0, 1.0],
        decays=[0.0, 0.0],
        hyper=HYPER["adamw"],
        count=9,
    )
    for old, new in zip([hi, lo, *(x for m in moments for x in m)], flat, strict=True):
        kept = torch.ones(len(old), dtype=torch.bool)
        of_blocks = form == "8bit" and new.dtype in (torch.uint8, torch.float32)
        for start, stop in [(256, 512), (512, 768)] if of_blocks else [(256, 512), (600, 700)]:
            kept[start // (1024 // len(old)) : stop // (1024 // len(old))] = False
        as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[old.element_size()]
        assert torch.equal(old.view(as_bits)[kept], new.cpu().view(as_bits)[kept])
        assert not torch.equal(old.view(as_bits), new.cpu().view(as_bits))


def test_scalars_may_be_numbers_or_of_another_dtype(device):
    results = []
    for lr, count, factor in [(0.25, 3, 0.5), (torch.tensor(0.25), torch.tensor(3), torch.tensor(0.5).double())]:
        p, g, moments, runs = update_case("adamw", "fp32", "fp32", torch.float32, 300, seed=5, strange=False)
        flat = [x.to(device) for x in (*p, g, *(m[0] for m in moments))]
        moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in (lr, count, factor)]
        cuda.update_(
            "adamw",
            flat[:1],
            flat[1],
            [[flat[2]], [flat[3]]],
            **runs,
            hyper=HYPER["adamw"],
            lr=moved[0],
            count=moved[1],
            factor=moved[2],
        )
        results.append(flat)
    assert_same(results[0], [x.cpu() for x in results[1]])


def test_rules_and_formats_reach_the_kernels(device, monkeypatch):
    """The operations of a captured graph, which on this device go to `cpu` or here."""
    called, launch = [], cuda.launch
    if device == "cpu":
        monkeypatch.setattr(update_rule, "kernels", lambda x: cuda)
        monkeypatch.setattr(formats, "kernels", lambda x: cuda)
    monkeypatch.setattr(cuda, "launch", lambda name, *rest: (called.append(name), launch(name, *rest)))
    p, g, moments, runs = update_case("adamw", "split", "fp32", torch.float32, 900, seed=8, strange=False)
    places = [runs["starts"], runs["stops"], runs["rates"], runs["decays"]]
    scalars = [torch.tensor(2), torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25), None, *places]
    for blocks in (False, True):
        flat = [x.clone() for x in (*p, g, *(m[0] for m in moments))]
        moved = [x.clone().to(device) for x in flat]
        now = [x.to(device) if isinstance(x, torch.Tensor) else x for x in scalars]
        hyper = [*HYPER["adamw"].values(), True, "8bit" if blocks else None, 0]
        torch.ops.zerofn.adamw_(moved[:2], moved[2], [moved[3]], [moved[4]], *now, *hyper)
        coded = [list(cpu.encode(x, i == 0)) if blocks else [x] for i, x in enumerate(flat[3:])]
        cpu.update_(
            "adamw",
            flat[:2],
            flat[2],
            coded,
            **runs | {"rates": [0.5 * x for x in runs["rates"]]},
            hyper=HYPER["adamw"],
            count=2,
            factors=(0.25,),
        )
        decoded = [cpu.decode(*x, i == 0) if blocks else x[0] for i, x in enumerate(coded)]
        assert_same(moved, [*flat[:3], *decoded])
    assert {"runs", "update_whole", "update_blocks", "encode", "decode"} <= set(called)
    x = floats(300, 4).to(device)
    halves = cpu.split(x.cpu())
    assert_same([torch.ops.zerofn.high(x), *torch.ops.zerofn.split(x)], [halves[0], *halves])
    assert_same([torch.ops.zerofn.join(*(y.to(device) for y in halves))], [x.cpu()])
    assert {"split", "joined"} <= set(called)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_and_extremes(device, dtype):
    g, memory = within(floats(300_000, 1, strange=False).to(dtype), device, shift=1)
    starts, stops = [0, 5, 5, 5000, 40_001, 299_999], [4, 5, 4999, 40_000, 290_003, 300_000]
    for factor in (None, 0.125):
        given = None if factor is None else torch.tensor(factor, device=device)
        norms, extremes = cuda.norms_and_extremes(g, starts, stops, given)
        for a, b, norm, extreme in zip(starts, stops, norms.cpu(), extremes.cpu(), strict=True):
            part = g[a:b].cpu().double() * (factor or 1.0)
            torch.testing.assert_close(norm.double(), part.norm(), rtol=2e-7, atol=0)
            assert extreme.item() == (part.abs().max().item() if b > a else 0.0)
            assert torch.equal(norm, cuda.norms_and_extremes(g, [a], [b], given)[0][0].cpu())


def test_what_is_not_finite_is_seen_in_its_part(device):
    g = floats(9000, 2, strange=False)
    g[100], g[5000], g[5001], g[8000] = float("inf"), float("nan"), float("-inf"), 1e30
    parts = [0, 3000, 5500, 7000], [3000, 5500, 7000, 9000]
    norms, extremes = cuda.norms_and_extremes(g.to(device), *parts)
    assert extremes.isnan().tolist() == [False, True, False, False]
    assert extremes.isinf().tolist() == [True, False, False, False]
    assert extremes.isfinite().tolist()[2:] == [True, True]
    by_inf = cuda.norms_and_extremes(torch.ones(5).to(device), [0], [5], float("inf"))
    assert by_inf[1].isinf().all() and by_inf[0].isinf().all()


@pytest.mark.parametrize(("size", "shift"), [(0, 0), (1, 0), (2048, 0), (5003, 0), (777, 1)])
def test_formats_are_the_cpus_bit_for_bit(device, size, shift):
    x = floats(size, 6)
    there = within(x, device, shift)[0]
    halves = cuda.split(there)
    assert_same([*halves, cuda.high(there)], [*cpu.split(x), cpu.split(x)[0]])
    assert_same([cuda.join(*halves)], [x])
    for signed in (True, False):
        for numbers in (x if signed else x.abs(), floats(size, 7, strange=False).abs()):
            coded = cuda.encode(within(numbers, device, shift)[0], signed)
            expected = torch.empty(size, dtype=torch.uint8), torch.empty(-(-size // 256))
            reference.encode(numbers, signed, expected)
            assert_same(coded, expected)
            assert_same([cuda.decode(*coded, signed)], [cpu.decode(*expected, signed)])


def test_casts_are_torchs(device):
    every_half = torch.arange(1 << 16).to(torch.int16)
    numbers = {dtype: every_half.view(dtype) for dtype in (torch.float16, torch.bfloat16)}
    finite = numbers[torch.float16].float()[:0x7C00]
    halfway = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(halfway, finite[1:]), torch.nextafter(halfway, finite[:-1])]
    ends = torch.tensor([65519.996, 65520.0, 2e-8, 3e-8, 2.98e-8])
    numbers[torch.float32] = torch.cat([finite, halfway, *near, floats(3000, 9), ends])
    for x, dtype, factor in itertools.product(numbers.values(), numbers, (None, 0.37, -1024.0)):
        expected = (x.float() * torch.tensor(1.0 if factor is None else factor)).to(dtype)
        assert_same([cuda.cast(x.to(device), dtype, factor)], [expected])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [128, 2048])
def test_signs_that_are_mixed_are_the_cpus_bit_for_bit(device, block, kind, monkeypatch):
    size, gaps = 4 * block, [3, 40, 2 * block - 8, 3 * block + 8, 4 * block - 1, 4 * block]
    added, before, left = floats(size, 25).to(kind), floats(size, 26, strange=False), floats(size, 27, strange=False)
    how = sign_rows.Mix(0.1, 0.45, 0.3)

    def rows(num, row, where="cpu", gaps=gaps):
        sent = torch.zeros(num, sign_rows.row_bytes(row, block), dtype=torch.uint8, device=where)
        return sign_rows.Signs(sent, row, block, gaps)

    came = rows(2, 2 * block)
    sign_rows.encode(before, came)
    given = [
        (added, before, left, 2, gaps),
        (added, came, left, 2, []),
        (came, before[2 * block :], left[: 2 * block], 1, [9, 17]),
    ]
    for *numbers, num, between in given:
        sent, rest = rows(num, 2 * block, gaps=between), torch.empty_like(numbers[2])
        sign_rows.mix(*numbers, how, sent, rest)
        with monkeypatch.context() as there:
            there.setattr(sign_rows, "on_cpu", lambda x: False)
            there.setattr(sign_rows, "on_gpu", lambda x: True)
            for finite in (None, True, False):
                at = rows(num, 2 * block, device, between)
                moved = [
                    x._replace(rows=x.rows.to(device)) if isinstance(x, sign_rows.Signs) else x.to(device)
                    for x in numbers
                ]
                found = moved[2].clone() if finite is None else torch.empty_like(moved[2])
                moved[2] = found if finite is None else moved[2]  # in the place of what was left
                sign_rows._mix_on_gpu(
                    *moved, how, at, found, None if finite is None else torch.tensor(finite, device=device)
                )
                if finite is not False:
                    assert_same([at.rows], [sent.rows])
                assert_same([found], [numbers[2] if finite is False else rest])


@pytest.mark.parametrize("block", [128, 256, 2048])
@pytest.mark.parametrize("draws", [None, wire_codes.Draws(2**64 - 3, 2**41)], ids=["nearest", "drawn"])
@pytest.mark.parametrize("format", wire_codes.FORMATS)
def test_what_is_sent_is_the_cpus_bit_for_bit(device, format, block, draws, monkeypatch):
    size = 7 * block
    num = size * wire_codes.bits(format) // 8

    def room(where):  # as a rank's rows lie
        rows = torch.full((3, num + 2 * 7 + 2), 77, dtype=torch.uint8, device=where)
        return [wire_codes.Codes(x[:num], x[num:-2].view(torch.bfloat16), format, block) for x in rows]

    kinds = (torch.float32, torch.bfloat16, torch.float16)
    numbers = [floats(size, 20), floats(size, 21, strange=False).bfloat16(), floats(size, 22).half()]
    expected, there = room("cpu"), room(device)
    for x, row in zip(numbers, expected, strict=True):
        wire_codes.encode(x, row, draws)
    decoded = [torch.empty(size, dtype=kind) for kind in kinds]
    for row, out in zip(expected, decoded, strict=True):
        wire_codes.decode(row, out)
    total = torch.empty(size)
    wire_codes.sum_(expected, total)
    if device == "cpu":
        monkeypatch.setattr(wire_codes, "on_cpu", lambda x: False)
        monkeypatch.setattr(wire_codes, "on_gpu", lambda x: True)
    for x, row in zip(numbers, there, strict=True):
        wire_codes.encode(x.to(device), row, draws)
    assert_same([x for row in there for x in row[:2]], [x for row in expected for x in row[:2]])
    found = [torch.empty(size, dtype=kind, device=device) for kind in kinds]
    for row, out in zip(there, found, strict=True):
        wire_codes.decode(row, out)
    assert_same(found, decoded)
    apart = wire_codes.Codes(*(x.clone() for x in there[2][:2]), format, block)
    for rows in (there, [*there[:2], apart]):  # evenly apart in memory, and not
        summed = torch.empty(size, device=device)
        wire_codes.sum_(rows, summed)
        assert_same([summed], [total])


# --- refused -----------------------------------------------------------------------------------


def test_bad_arguments_are_refused_before_anything_is_launched(monkeypatch):
    monkeypatch.setattr(cuda, "launch", lambda *a: pytest.fail("launched"))
    x, one = torch.zeros(8), {"starts": [0], "stops": [9], "rates": [1.0], "decays": [0.0], "hyper": {}, "count": 1}
    with pytest.raises(ValueError, match=r"inside \[0, 8\)"):
        cuda.update_("sgd", [x], x, [], **one)
    with pytest.raises(ValueError, match=r"inside \[0, 8\)"):
        cuda.norms_and_extremes(x, [0], [9])
    with pytest.raises(TypeError, match="must be torch.float32"):
        cuda.split(x.double())
    with pytest.raises(TypeError, match="contiguous and on the CPU"):
        cuda.join(torch.zeros(8, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int16)[::2])
    assert not cuda.can_update("sgd", [x], torch.zeros(9), []) and cuda.can_update("sgd", [x], x, [])


def pretend(monkeypatch, *, version="14.2.0", torchs="13.0", runtime=13020, driver=13020, capability=(9, 0)):
    cupy = types.ModuleType("cupy")
    cupy.__version__ = version
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(runtimeGetVersion=lambda: runtime, driverGetVersion=lambda: driver),
        nvrtc=types.SimpleNamespace(getSupportedArchs=lambda: (75, 80, 90)),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.version, "cuda", torchs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.delenv("ZEROFN_NATIVE", raising=False)
    return cuda.missing.__wrapped__()


def test_reasons_for_doing_without_name_what_to_install(monkeypatch):
    assert pretend(monkeypatch) is None
    assert pretend(monkeypatch, torchs="12.8", runtime=12090, driver=13000) is None
    assert "without CUDA" in pretend(monkeypatch, torchs=None)
    other = pretend(monkeypatch, torchs="12.8")
    assert "pip uninstall cupy-cuda13x" in other and 'pip install "zerofn[cuda12]"' in other
    assert "CuPy is 13.6.0" in pretend(monkeypatch, version="13.6.0")
    assert "no driver" in pretend(monkeypatch, driver=0)
    old = pretend(monkeypatch, driver=12040)
    assert "driver is for CUDA 12" in old and "zerofn[cuda12]" in old
    volta = pretend(monkeypatch, capability=(7, 0))
    assert "sm_75 and newer, and this GPU is of sm_70" in volta and "zerofn[cuda12]" in volta
    monkeypatch.setitem(sys.modules, "cupy", None)
    absent = cuda.missing.__wrapped__()
    assert "CuPy cannot be imported" in absent and 'pip install "zerofn[cuda13]"' in absent
    monkeypatch.setenv("ZEROFN_NATIVE", "0")
    assert "ZEROFN_NATIVE is 0" in cuda.missing.__wrapped__()


def test_a_driver_that_is_not_there_is_told(monkeypatch):
    def fail():
        raise RuntimeError("cudaErrorInsufficientDriver")

    pretend(monkeypatch)
    sys.modules["cupy"].cuda.runtime.driverGetVersion = fail
    assert "cudaErrorInsufficientDriver" in cuda.missing.__wrapped__()


@pytest.mark.parametrize(("capability", "wanted"), [((9, 0), "sm_90"), ((12, 1), "compute_90")])
def test_kernels_are_launched_on_torchs_stream(monkeypatch, capability, wanted):
    """With a CuPy that notes what it is asked for."""
    pretend(monkeypatch, capability=capability)
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"torch's on {device}")
    processors = types.SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    launched, compilations, gpu = [], [], sys.modules["cupy"].cuda
    gpu.Device, gpu.Stream = contextlib.nullcontext, types.SimpleNamespace(from_external=lambda stream: stream)
    gpu.nvrtc.createProgram = lambda text, name, headers, names: text
    gpu.nvrtc.compileProgram = lambda program, options: compilations.append((program, options))
    gpu.nvrtc.destroyProgram, gpu.nvrtc.NVRTCError = lambda program: None, RuntimeError
    gpu.nvrtc.getCUBIN, gpu.nvrtc.getPTX = lambda program: b"sm", lambda program: b"compute"

    class Module:
        def load(self, code):
            assert wanted.startswith(code.decode())

        def get_function(self, name):
            return lambda *launch, **stream: launched.append((name, *launch, stream["stream"]))

    gpu.Module = Module
    monkeypatch.setitem(sys.modules, "cupy.cuda", gpu)
    monkeypatch.setattr(cuda, "_kernels", cuda._kernels.__wrapped__)
    monkeypatch.setattr(cuda, "_num_processors", cuda._num_processors.__wrapped__)
    x = torch.zeros(4)
    cuda.launch("cast", torch.device("cuda", 1), 20, x, True, None, 0.5, 7)
    cuda.launch("cast", torch.device("cuda", 1), 10**9)
    cuda.launch("cast", torch.device("cuda", 1), 0)
    assert launched == [
        ("zf_cast", (3,), (256,), (x.data_ptr(), 1, 0, 0.5, 7), "torch's on 1"),
        ("zf_cast", (24,), (256,), (), "torch's on 1"),
    ]
    assert type(launched[0][3][1]) is int  # a bool would go as one byte
    assert compilations[0] == (cuda.source(), (*cuda.OPTIONS, f"--gpu-architecture={wanted}"))

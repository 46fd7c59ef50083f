"""`zerofn.Wire`: what is sent in which form, and what is no such thing."""

import pytest
import torch

import zerofn
from zerofn import Precision, Wire
from zerofn.comm.axes import BETWEEN
from zerofn.comm.mesh import Axis, Mesh
from zerofn.sharding.partition import Partition
from zerofn.sharding.wire import along, given

STATE = {"params": {"w": torch.ones(3)}}
BOTH, DRAWN = Wire("int8", "int8"), "stochastic"


@pytest.mark.parametrize(
    "asked, sent",
    [
        ({"wire": "bf16"}, Wire("bf16", "bf16")),
        ({"wire": "int8", "precision": "bf16"}, BOTH),
        ({"precision": Precision(wire="int8")}, BOTH),
        ({"precision": Precision(wire="int8"), "wire": "int8"}, BOTH),
        ({"wire": Wire(gather="int4")}, Wire(gather="int4")),
        ({"wire": {"data": "int8"}}, {"data": BOTH}),
        ({"wire": "gather=int4, reduce=none"}, Wire(gather="int4")),
        ({"wire": {"data": None}}, {}),
        ({}, None),
    ],
)
def test_the_wire_is_an_option_of_shard_and_of_precision(asked, sent):
    assert zerofn.shard(STATE, **asked)["params"].spec.precision.wire == sent


@pytest.mark.parametrize("make", [lambda x: Precision(wire=x), lambda x: zerofn.shard(STATE, wire=x)])
def test_an_unknown_form_is_answered_with_those_there_are(make):
    with pytest.raises(ValueError, match="wire='fp4' is not known; did you mean 'fp8'"):
        make("fp4")
    with pytest.raises(
        ValueError, match="wire='int4' works for gathers only, because sums of gradients need more than 4 bits. Write"
    ):
        make("int4")
    with pytest.raises(TypeError, match="wire: expected a word such as 'int8', a zerofn.Wire, a dict"):
        make(8)
    with pytest.raises(ValueError, match="wire='INT8' is not known; did you mean 'int8'"):
        make("INT8")
    with pytest.raises(TypeError, match=r"keys of a dict must be names of mesh axes, such as .*; got 0"):
        make({0: "int8"})
    with pytest.raises(ValueError, match="wire='int3' is not known; did you mean 'int8'"):
        make({"data": "int3"})


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"gather": "int3"}, "gather='int3' is not possible: the codecs are bf16, fp8, int8, int4 and None"),
        (
            {"reduce": "int4"},
            "reduce='int4' is not possible: a sum needs more than 4 bits, or feedback=True. Write reduce='int8'",
        ),
        (
            {"gather": "int8", "feedback": True},
            "but reduce=None sends gradients without rounding. Write reduce='int8', or leave",
        ),
        ({"reduce": "int8", "rounding": "stochastic", "feedback": True}, "which has the smallest error to feed back"),
        (
            {"block": 100},
            "zerofn.Wire: block=100 is not possible, because shards must divide into whole blocks. Write "
            "one of 128, 256",
        ),
        ({"smallest": -1}, "zerofn.Wire: smallest=-1 elements cannot be negative; write smallest=0"),
        ({"rounding": "random"}, "zerofn.Wire: rounding='random' is not known; write rounding='nearest'"),
        (
            {"gather": "int8", "rounding": "stochastic"},
            "works only for gradients in 8-bit codes, but with reduce=None gradients are sent without a codec. Write",
        ),
        ({"reduce": "bf16", "rounding": "stochastic"}, "reduce='bf16' gradients are sent in bfloat16, rounded to"),
    ],
)
def test_what_is_no_wire_says_so(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Wire(**options)
    with pytest.raises(TypeError):
        Wire(block="256")


@pytest.mark.parametrize(
    "name, why", [("tensor", "activations only. Leave this axis out"), ("node", "mesh has no axis 'node'")]
)
def test_an_axis_along_which_no_unit_is_sent_is_refused(name, why):
    mesh = Mesh.planned({"data": 2, "tensor": 2})
    with pytest.raises(ValueError, match=why):
        Partition.zero(mesh, 3, wire={name: "int8"})


def test_axes_of_one_transfer_have_one_form():
    mesh = Mesh.planned({"data": 2, "context": 2})
    with pytest.raises(ValueError, match=r"same wire codec. Write wire={'data': 'int8', 'context': 'int"):
        Partition.zero(mesh, 3, wire={"data": "int8"})
    both = {"data": "int8", "context": "int8"}
    assert along(Partition.zero(mesh, 3, wire=both).precision.wire, mesh.shards) == BOTH
    assert along(given(both), Axis(f"data{BETWEEN}context", 4)) == along(given("int8"), Axis("data", 2)) == BOTH
    assert along(given({"replicate": "int8"}), Axis("data", 2)) is None


def test_what_is_left_out_has_a_place_in_a_state():
    wire = Wire(reduce="int4", feedback=True)
    with pytest.raises(
        ValueError, match="stores the rounding errors of gradients in the state, and only a zerofn.TrainSta"
    ):
        zerofn.shard(STATE, wire=wire)
    with pytest.raises(NotImplementedError, match="experts' gradients yet, and the mesh has experts on expert=2"):
        Partition.zero(Mesh.planned({"data": 2, "expert": 2}), 3, wire=wire)


def test_gathers_have_one_form():
    rule = zerofn.Fp8(lambda name: True, gather=True)
    f32, bf16 = torch.float32, torch.bfloat16
    with pytest.raises(
        ValueError, match=r"Fp8\(gather=True\) say in which form parameters are gathered. Leave one of them out"
    ):
        Precision(f32, bf16, f32, wire="int8", fp8=rule)
    assert Precision(f32, bf16, f32, wire=Wire(reduce="int8"), fp8=rule).wire == Wire(reduce="int8")


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8", "int4"])
def test_what_is_coded(form):
    """Floating-point units, in half precision with blocks alone; of them the leaves that are large enough."""
    params = {"a": torch.ones(300, 64), "b": torch.ones(100), "c": torch.ones(64, 300)}
    (unit,) = zerofn.shard({"params": params}, unit=lambda name: "all", wire=Wire(form))["params"].layout.units
    found = {x: Wire(form).codec(unit, x, "gather", 2048) for x in (torch.float32, torch.bfloat16, torch.float16)}
    coded = {"bf16": "bf16"}.get(form, f"{form}.256:0-75,76-152")
    assert list(found.values()) == [coded, *[coded if form != "bf16" else ""] * 2]
    for dtype in (torch.float64, torch.int64, torch.complex64):
        assert Wire(form).codec(unit, dtype, "gather", 2048) == ""
    assert (
        Wire(form).codec(unit, torch.float32, "reduce", 2048) == Wire().codec(unit, torch.float32, "gather", 128) == ""
    )
    if form != "bf16":
        assert Wire(form).codec(unit, torch.float32, "gather", 3 * 128).startswith(f"{form}.128:")
        assert Wire(form, block=1024, smallest=20_000).codec(unit, torch.float32, "gather", 2048) == ""


def test_how_it_is_printed():
    assert [str(x) for x in (BOTH, Wire("int4", "fp8"), Wire(reduce="int8"), Wire(reduce="fp8", rounding=DRAWN))] == [
        "int8",
        "int4 to gather, fp8 to reduce",
        "none to gather, int8 to reduce",
        "none to gather, fp8 to reduce with stochastic rounding",
    ]
    assert str(given({"data": "int8", "replicate": None})) == "int8 along data"
    assert repr(Wire("int8", block=128)) == "zerofn.Wire(gather='int8', block=128)"
    assert hash(given({"data": "int8"})) == hash(given({"data": BOTH}))

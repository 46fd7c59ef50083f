"""What every declared codec promises, and that declarations are complete."""

import pytest
import torch

from tests.support import kernel_cases as cases
from zerofn.graph.node_kinds import codec_operations
from zerofn.ops.codecs import CODECS, MASTERS, MOMENTS, PLAIN, SPLIT, master_of

each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@each_codec
def test_parts_are_as_declared(codec):
    x = cases.wild(1000, 2).abs().clamp(max=1e30)
    parts = codec.encode(x)
    assert [(p.dtype, p.numel()) for p in parts] == codec.sizes(torch.float32, 1000)
    assert codec.stores(parts) and codec.parts[0].grain == 1 and codec.grain in (1, 256)
    decoded = codec.decode(parts)
    assert decoded.dtype == (codec.holds or torch.float32)
    assert cases.same_bits(codec.decode(codec.encode(decoded)), decoded)


@each_codec
def test_fake_parts_are_real_ones(codec):
    from torch._subclasses import FakeTensorMode

    real = codec.encode(torch.ones(1000))
    with FakeTensorMode():
        fake = codec.encode(torch.ones(1000))
        assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]
        assert codec.decode(fake).shape == (1000,) and codec.decode(fake).dtype == torch.float32


def test_codecs_are_told_apart():
    assert len({codec.name for codec in CODECS}) == len(CODECS)
    assert not PLAIN.stores([torch.ones(1), torch.ones(1)]) and not SPLIT.stores([torch.ones(1)])
    assert all(codec in CODECS for form in MOMENTS.values() for codec in form.codecs) and set(MASTERS) <= set(CODECS)
    with pytest.raises(TypeError, match="stored plain or split, got tensors of"):
        master_of([torch.ones(1), torch.ones(1)])


def test_passes_know_every_codec():
    for codec in CODECS[1:]:
        decodes, encodes = codec.operations
        assert {decodes, encodes} <= codec_operations()

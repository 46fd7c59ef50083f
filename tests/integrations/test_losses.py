"""Losses in half precision are those of autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zerofn.integrations.losses import LOSSES, LossesInFloat32

X, Y = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
CLASSES = torch.arange(6) % 5
CASES = [
    (F.cross_entropy, (X, CLASSES)),
    (nn.CrossEntropyLoss(label_smoothing=0.1), (X, CLASSES)),
    (F.mse_loss, (X, Y)),
    (F.smooth_l1_loss, (X, Y)),
    (nn.KLDivLoss(reduction="batchmean"), (X, Y.exp())),
    (F.binary_cross_entropy_with_logits, (X, Y.sigmoid())),
]


@pytest.mark.parametrize("loss, args", CASES, ids=lambda x: getattr(x, "__name__", type(x).__name__))
def test_as_under_autocast(loss, args):
    with LossesInFloat32():
        mine = loss(*args)
    assert mine.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        theirs = loss(*args)
    torch.testing.assert_close(mine, theirs.float(), rtol=1e-6 if theirs.dtype == torch.float32 else 1e-2, atol=0)
    torch.testing.assert_close(mine, loss(*(x.float() if x.is_floating_point() else x for x in args)), rtol=0, atol=0)


def test_nothing_else_changes():
    assert len(LOSSES) == 18
    with LossesInFloat32():
        assert (X @ Y.T).dtype == torch.bfloat16 and F.cross_entropy(X.double(), CLASSES).dtype == torch.float64

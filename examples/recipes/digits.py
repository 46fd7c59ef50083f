"""scikit-learn's digits, the data of these recipes: 1,797 images of 8 x 8 pixels."""

import torch
from sklearn.datasets import load_digits

import zerofn


def batches(steps, rows):
    """Yield this rank's rows of each batch: x [rows, 1, 8, 8] in [-1, 1], y [rows]."""
    data, draw = load_digits(), torch.Generator().manual_seed(0)
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(data.target)
    for _ in range(steps):
        mine = torch.randperm(len(x), generator=draw)[zerofn.rank("rows") * rows :][
            :rows
        ]
        yield {"x": x[mine], "y": y[mine]}

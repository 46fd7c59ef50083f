"""How a batch's sequences are cut."""

import torch

from zerofn.comm.mesh import Axis, Mesh
from zerofn.parallel import split_sequence

IDS = torch.arange(24).view(2, 12) + 3
LABELS = torch.where(IDS % 5 == 0, -100, IDS)


def parts(num, **options):
    batch = {"input_ids": IDS, "labels": LABELS, "attention_mask": torch.ones_like(IDS)}
    return [split_sequence(batch, Mesh((Axis("context", num, r),)), **options) for r in range(num)]


def test_ranks_have_all_tokens_once_and_each_its_label():
    for num in (1, 2, 3):
        seen = torch.zeros(2, 12, dtype=torch.int64)
        for part in parts(num):
            assert part["input_ids"].shape == (2, 12 // num) and "attention_mask" not in part
            for row in range(2):
                for token, label, place in zip(
                    part["input_ids"][row], part["labels"][row], part["position_ids"][row], strict=True
                ):
                    assert token == IDS[row, place]
                    assert label == (LABELS[row, place + 1] if place < 11 else -100)
                    seen[row, place] += 1
            assert torch.equal(part["labels"], part["shift_labels"])
            assert torch.equal(part["items_per_row"], (LABELS[:, 1:] != -100).sum(1))
        assert bool((seen == 1).all())


def test_a_rank_has_an_early_and_a_late_chunk():
    places = [x["position_ids"][0].tolist() for x in parts(3)]
    assert places == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_labels_of_their_own_tokens_stay_where_they_are():
    for part in parts(2, shift=False):
        assert "shift_labels" not in part
        assert torch.equal(part["labels"] == -100, part["input_ids"] % 5 == 0)


def test_other_rows_have_another_digest():
    mesh = Mesh((Axis("context", 1),))
    digests = {
        split_sequence({"input_ids": x}, mesh)["row_digest"].item()
        for x in (
            IDS[:1],
            IDS[:1] + 1,
            IDS[:1].flip(1),
            IDS[:1].roll(1, 1),
            IDS[:1].clone().index_fill_(1, IDS[0, :1], 0),
            IDS[:1] + torch.tensor([2, -1] + [0] * 10),  # the same sum of places times tokens
        )
    }
    assert len(digests) == 6


def test_a_digest_is_of_all_that_was_given():
    mesh = Mesh((Axis("context", 1),))
    whole = {"input_ids": IDS, "labels": LABELS, "weights": IDS / 7}
    others = {name: {**whole, name: x + (x == x[0, 0])} for name, x in whole.items()}
    first, *more = (split_sequence(x, mesh)["row_digest"] for x in (whole, *others.values()))
    for digest in more:
        assert digest[0] != first[0] and digest[1] == first[1]

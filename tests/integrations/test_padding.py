"""Rows of other lengths than other ranks' and than those before."""

from types import SimpleNamespace

import pytest
import torch

from zerofn.integrations.transformers.padding import Padding

MODEL = SimpleNamespace(config=SimpleNamespace(pad_token_id=7))


def batch(length, target=3):
    ones = torch.ones(2, length, dtype=torch.int64)
    return {"input_ids": ones, "attention_mask": ones, "labels": torch.ones(2, target, dtype=torch.int64), "x": 1.0}


def test_the_first_length_stays_and_others_are_rounded_up():
    padding = Padding(MODEL, None, -100)
    first = batch(5)
    assert padding(first) == first
    found = padding(batch(6))
    assert found["input_ids"][0].tolist() == [1] * 6 + [7] * 10
    assert found["attention_mask"][0].tolist() == [1] * 6 + [0] * 10
    assert found["labels"][0].tolist() == [1] * 3 + [-100] * 13 and found["x"] == 1.0
    assert padding(batch(16))["input_ids"].shape == (2, 16) and padding(first)["labels"].shape == (2, 3)


def test_the_microbatches_of_an_update_are_as_long_as_the_longest():
    padding = Padding(MODEL, None, -100)
    given = [padding(batch(5)), padding(batch(40, target=4))]
    assert padding.added == 8  # 48 is a multiple of 16
    short, long = padding.as_long(given)
    assert short["input_ids"][0].tolist() == [1] * 5 + [7] * 43 and short["attention_mask"][0].sum() == 5
    assert short["labels"][0].tolist() == [1] * 3 + [-100] * 13 and short["x"] == 1.0
    assert long["input_ids"].shape == (2, 48) and long["labels"].shape == (2, 16) and padding.added == 8 + 43
    bare = [{k: x for k, x in y.items() if k != "attention_mask"} for y in given]
    assert [x["input_ids"].shape[1] for x in padding.as_long(bare)] == [5, 48], "nothing masks what would be added"


def kind_of(inputs):
    padding = Padding(MODEL, None, -100)
    padding(inputs)
    return padding.kind


def test_batches_of_one_kind_have_equal_shapes_once_they_are_padded():
    first = kind_of(batch(5))
    assert kind_of(batch(9, target=4)) == first and len(first) == 1
    boxes = torch.zeros(3, 4)
    others = [{k: x[:1] for k, x in batch(5).items() if k != "x"}, batch(5) | {"boxes": boxes}]
    others += [batch(5) | {"boxes": boxes[:2]}, batch(5) | {"labels": torch.ones(2, 3, dtype=torch.int32)}]
    assert len({first, *map(kind_of, others)}) == 5


def test_no_row_gets_longer_than_the_model_takes():
    padding = Padding(SimpleNamespace(config=SimpleNamespace(pad_token_id=0, max_position_embeddings=20)), None, -100)
    padding(batch(5))
    assert [padding(batch(n))["input_ids"].shape[1] for n in (9, 17, 20)] == [16, 20, 20]


def test_the_tokenizers_side_and_token():
    padding = Padding(MODEL, SimpleNamespace(pad_token_id=9, padding_side="left"), -1)
    padding(batch(20))
    found = padding(batch(15))
    assert found["input_ids"][0].tolist() == [9] + [1] * 15 and found["labels"][0].tolist() == [-1] * 13 + [1] * 3


def test_outputs_lose_what_was_added():
    padding = Padding(MODEL, None, -100)
    padding(batch(20))
    before = batch(6)
    after = padding(before)
    outputs = {
        "logits": torch.zeros(2, 16, 11),
        "encoder_last_hidden_state": torch.zeros(2, 16, 4),
        "hidden_states": (torch.zeros(2, 16, 4),),
        "loss": torch.zeros(()),
    }
    found = padding.cut(outputs, before, after)
    assert found["logits"].shape == (2, 3, 11) and found["encoder_last_hidden_state"].shape == (2, 6, 4)
    assert found["hidden_states"][0].shape == (2, 3, 4) and found["loss"].shape == ()


def on_two_ranks(mask):
    import torch.distributed as dist

    given = batch(5 + 3 * dist.get_rank())
    if not mask:
        del given["attention_mask"]
    return {k: v for k, v in Padding(MODEL, None, -100)(given).items() if k != "x"}


def test_ranks_get_the_longest(ranks):
    for found in ranks(2, on_two_ranks, True):
        assert found["input_ids"].shape == found["attention_mask"].shape == (2, 8) and found["labels"].shape == (2, 3)


def test_without_a_mask_it_is_a_sentence(ranks):
    for failure in ranks(2, on_two_ranks, False, expect_errors=True):
        assert "rows of input_ids are 5 and 8 long on the ranks, and there is no attention_mask" in failure.message


@pytest.mark.parametrize("causal", [True, False])
def test_alone_nothing_is_added_where_nothing_masks_it(causal):
    class LlamaForCausalLM(SimpleNamespace):
        pass

    padding = Padding(LlamaForCausalLM() if causal else MODEL, None, -100)
    for length, found in ((5, 5), (6, 16 if causal else 6)):
        given = {"input_ids": torch.ones(2, length, dtype=torch.int64)}
        assert padding(given)["input_ids"].shape == (2, found)

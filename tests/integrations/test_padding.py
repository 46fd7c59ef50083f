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
    assert found["labels"].shape == (2, 3) and found["x"] == 1.0, "one value for each class, say"
    assert padding(batch(6, target=4))["labels"][0].tolist() == [1] * 4 + [-100] * 12
    assert padding(batch(16))["input_ids"].shape == (2, 16) and padding(first)["labels"].shape == (2, 3)


def updates(padding, *micro):
    """Return what `as_long` is given."""
    found = [(padding(x), padding.kind) for x in micro]
    return [x for x, _ in found], [kind for _, kind in found]


def lengths(batches):
    return [x["input_ids"].shape[1] for x in batches]


def test_the_microbatches_of_an_update_are_as_long_as_the_longest():
    padding = Padding(MODEL, None, -100)
    given, kinds = updates(padding, batch(5), batch(40, target=4))
    assert padding.added == 8  # 48 is a multiple of 16
    short, long = padding.as_long(given, kinds)
    assert short["input_ids"][0].tolist() == [1] * 5 + [7] * 43 and short["attention_mask"][0].sum() == 5
    assert short["labels"][0].tolist() == [1] * 3 + [-100] * 13 and short["x"] == 1.0
    assert long["input_ids"].shape == (2, 48) and long["labels"].shape == (2, 16) and padding.added == 8 + 43
    bare = [{k: x for k, x in y.items() if k != "attention_mask"} for y in given]
    assert lengths(padding.as_long(*updates(padding, *bare))) == [5, 48], "nothing masks what would be added"


def kind_of(inputs):
    padding = Padding(MODEL, None, -100)
    padding(inputs)
    return padding.kind


def test_batches_of_one_kind_have_equal_shapes_once_they_are_padded():
    first = kind_of(batch(5))
    assert kind_of(batch(9, target=4)) == first and len(first.shapes) == 1 and first.longer
    boxes = torch.zeros(3, 4)
    others = [{k: x[:1] for k, x in batch(5).items() if k != "x"}, batch(5) | {"boxes": boxes}]
    others += [batch(5) | {"boxes": boxes[:2]}, batch(5) | {"labels": torch.ones(2, 3, dtype=torch.int32)}]
    assert len({first, *map(kind_of, others)}) == 5


def test_no_row_gets_longer_than_the_model_takes():
    padding = Padding(SimpleNamespace(config=SimpleNamespace(pad_token_id=0, max_position_embeddings=20)), None, -100)
    padding(batch(5))
    assert [padding(batch(n))["input_ids"].shape[1] for n in (9, 17, 20)] == [16, 20, 20]


def test_the_tokenizers_token():
    padding = Padding(MODEL, SimpleNamespace(pad_token_id=9), -1)
    padding(batch(20))
    found = padding(batch(15, target=4))
    assert found["input_ids"][0].tolist() == [1] * 15 + [9] and found["labels"][0].tolist() == [1] * 4 + [-1] * 12


def side(where, length):
    """A batch of which one row is padded there, or none."""
    mask = torch.ones(2, length, dtype=torch.int64)
    if where is not None:
        mask[1, 0 if where == "left" else -1] = 0
    return batch(length) | {"attention_mask": mask}


@pytest.mark.parametrize("tokenizer", [None, "left", "right"])
def test_batches_that_are_padded_on_the_left_stay_as_they_are(tokenizer, caplog):
    padding = Padding(MODEL, tokenizer and SimpleNamespace(pad_token_id=0, padding_side=tokenizer), -100)
    longer = 16 if tokenizer != "left" else 6
    assert lengths([padding(side(None, n)) for n in (5, 6)]) == [5, longer]
    assert len(caplog.messages) == (tokenizer == "left")
    assert lengths([padding(side("left", n)) for n in (6, 7)]) == [6, 7] and not padding.added
    assert lengths([padding(side(None, 8)), padding.twin()(side(None, 9))]) == [8, 9], "as earlier batches were"
    assert lengths(padding.as_long(*updates(padding, side("left", 6), side("left", 7)))) == [6, 7]
    (said,) = caplog.messages
    assert "they are padded on the left" in said and "pad_to_multiple_of=16 in the collator" in said
    assert lengths([padding(side("right", 9)), padding(side(None, 9))]) == [16, 16], "a batch is what it shows"


def test_lengths_are_multiples_of_what_the_arguments_say(caplog):
    padding = Padding(MODEL, None, -100, multiple=4)
    assert lengths(padding(batch(n)) for n in (5, 6, 9)) == [5, 8, 12]
    padding = Padding(MODEL, None, -100, multiple=1)
    given = [batch(n) for n in (5, 6)]
    made, kinds = updates(padding, *given)
    assert made == given == padding.as_long(made, kinds) and kinds[0] != kinds[1] and not caplog.messages


def weighted(length, width=None, kind="w"):
    made = torch.arange(1.0, 1 + 2 * (width or length)).view(2, -1)
    return batch(length) | {kind: made, "fixed": torch.ones(2, 6)}


def test_an_entry_that_is_always_as_long_as_the_rows_is_padded_with_zeros():
    padding = Padding(MODEL, None, -100)
    first, second = (padding(weighted(n) | {"boxes": torch.ones(2, n, 4)}) for n in (6, 4))
    assert first["w"].shape == first["fixed"].shape == second["fixed"].shape == (2, 6)
    assert second["input_ids"].shape == (2, 16) and second["boxes"].shape == (2, 16, 4)
    assert second["w"].tolist() == [[1, 2, 3, 4] + [0] * 12, [5, 6, 7, 8] + [0] * 12]
    assert second["boxes"].sum() == 2 * 4 * 4


def test_so_it_is_in_the_microbatches_of_an_update():
    padding = Padding(MODEL, None, -100)
    given, kinds = updates(padding, weighted(16), weighted(32))
    assert kinds[0] == kinds[1] and kinds[0] != kind_of(weighted(16, 9))
    short, long = padding.as_long(given, kinds)
    assert short["w"].shape == long["w"].shape == (2, 32) and not short["w"][:, 16:].any()
    assert short["fixed"].shape == (2, 6)


@pytest.mark.parametrize(
    "widths, seen",
    [
        ([(5, 4), (6, 5)], "with rows of 5 and 6 tokens, its length was 4 and 5"),  # one for each next token
        ([(5, 5), (6, 6), (7, 6)], "with rows of 5, 6 and 7 tokens, its length was 5 and 6"),  # it was padded before
    ],
)
def test_an_entry_that_may_be_one_for_each_token_is_a_sentence(widths, seen):
    padding = Padding(MODEL, None, -100)
    *before, last = widths
    for given in before:
        padding(weighted(*given, kind="weights"))
    with pytest.raises(
        ValueError,
        match=rf"whether 'weights' has one value for each token and needs padding, too: {seen}.*multiple_of=1",
    ):
        padding(weighted(*last, kind="weights"))


def test_one_length_does_not_tell():
    padding = Padding(MODEL, None, -100)
    padding(batch(5))
    with pytest.raises(
        ValueError,
        match="'w' has one value for each token and needs padding, too: with rows of 7 tokens, its length was 7",
    ):
        padding(weighted(7))
    assert lengths([padding(batch(8))]) == [16], "a batch without it"


def test_outputs_lose_what_was_added():
    padding = Padding(MODEL, None, -100)
    padding(batch(20))
    before = batch(6, target=4)
    after = padding(before)
    outputs = {
        "logits": torch.zeros(2, 16, 11),
        "encoder_last_hidden_state": torch.zeros(2, 16, 4),
        "hidden_states": (torch.zeros(2, 16, 4),),
        "loss": torch.zeros(()),
    }
    found = padding.cut(outputs, before, after)
    assert found["logits"].shape == (2, 4, 11) and found["encoder_last_hidden_state"].shape == (2, 6, 4)
    assert found["hidden_states"][0].shape == (2, 4, 4) and found["loss"].shape == ()


def on_two_ranks(mask):
    import torch.distributed as dist

    given = batch(5 + 3 * dist.get_rank())
    if not mask:
        del given["attention_mask"]
    return {k: v for k, v in Padding(MODEL, None, -100)(given).items() if k != "x"}


def test_ranks_get_the_longest(ranks):
    for found in ranks(2, on_two_ranks, True):
        assert found["input_ids"].shape == found["attention_mask"].shape == (2, 8) and found["labels"].shape == (2, 3)


def test_without_a_mask_each_rank_keeps_its_length(ranks):
    assert lengths(ranks(2, on_two_ranks, False)) == [5, 8]


def other_entries_on_two_ranks():
    import torch.distributed as dist

    rank, padding = dist.get_rank(), Padding(MODEL, None, -100)
    own = (12, 16)[rank]  # of rank 0's batch alone, `fixed` might be one for each token
    made = padding(batch(own) | {"w": torch.ones(2, own), "fixed": torch.ones(2, 12)})
    left = padding(side("left" if rank else None, 6 + rank))
    try:
        Padding(MODEL, None, -100)(batch(own) | ({} if rank else {"x": torch.ones(2, 12)}))
    except ValueError as error:
        return made, left, padding.kind, str(error)


def test_ranks_agree_on_entries_sides_and_kinds(ranks):
    found = ranks(2, other_entries_on_two_ranks)
    for made, left, kind, error in found:
        assert made["w"].shape == (2, 16) and made["fixed"].shape == (2, 12)
        assert left["input_ids"].shape == (2, 6 + (made is not found[0][0]))
        assert kind == found[0][2] and not kind.longer and "pad_to_multiple_of=1" in error


@pytest.mark.parametrize("causal", [True, False])
def test_alone_nothing_is_added_where_nothing_masks_it(causal):
    class LlamaForCausalLM(SimpleNamespace):
        pass

    padding = Padding(LlamaForCausalLM() if causal else MODEL, None, -100)
    for length, found in ((5, 5), (6, 16 if causal else 6)):
        given = {"input_ids": torch.ones(2, length, dtype=torch.int64)}
        assert padding(given)["input_ids"].shape == (2, found)


def test_rows_with_positions_have_few_lengths_and_may_be_longer_than_any_position():
    class LlamaForCausalLM(SimpleNamespace):  # of a causal model: more on the right needs no mask
        pass

    config = SimpleNamespace(pad_token_id=7, max_position_embeddings=20)
    padding = Padding(LlamaForCausalLM(config=config), None, -100)

    def packed(n):
        return {"input_ids": torch.ones(1, n, dtype=torch.int64), "position_ids": torch.arange(n)[None] % 9}

    assert lengths([padding(packed(n)) for n in (5, 21, 300, 513)]) == [5, 32, 320, 576]
    assert padding(packed(300))["position_ids"][0, 300:].tolist() == [0] * 20
    assert len(set(lengths([padding(packed(n)) for n in range(512, 1025)]))) <= 9

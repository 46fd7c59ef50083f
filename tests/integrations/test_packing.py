"""Documents packed into rows by transformers' DataCollatorWithFlattening train as they do apart."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from tests.support.trainer_runs import MARKS, logged, ours, padded, rows, theirs
from zerofn.integrations.transformers.packing import packed_by_positions

pytestmark = MARKS


def apart(batch):
    """Documents of one batch, each in a row of its own; a document's first token is no label of another's."""
    made = padded(batch)
    made["labels"][:, 0] = -100
    return made


@pytest.mark.part(keys=[{"return_flash_attn_kwargs": True, "return_seq_idx": True}], length=[60])
@pytest.mark.parametrize("keys", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}], ids=str)
@pytest.mark.parametrize("length", [8, 60])
def test_packed_documents_train_as_they_do_apart(tmp_path, length, keys, caplog):
    caplog.set_level("INFO", "zerofn")
    data = [{k: x.tolist() for k, x in row.items()} for row in rows(20, length, odd=True)]
    more = {"per_device_train_batch_size": 4, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    given = {"train_dataset": data, "eval_dataset": data[:8]}
    collator = transformers.DataCollatorWithFlattening(**keys)
    mine = ours(tmp_path, more, data_collator=collator, **given)
    plain = theirs(
        tmp_path, more, data_collator=lambda b: apart([{k: torch.tensor(v) for k, v in x.items()} for x in b]), **given
    )
    names = ("loss", "learning_rate")
    np.testing.assert_allclose(logged(mine, *names), logged(plain, *names), rtol=2e-6)
    np.testing.assert_allclose(logged(mine, "grad_norm"), logged(plain, "grad_norm"), rtol=2e-5)
    captures = [x for x in caplog.messages if x.startswith("train_step: captured ")]
    assert len(captures) <= 2, captures


SDPA, FLASH = (SimpleNamespace(config=SimpleNamespace(_attn_implementation=x)) for x in ("sdpa", "flash_attention_2"))


def test_documents_are_said_by_positions_unless_flash_attention_reads_where_they_begin():
    data = [{"input_ids": list(range(3, 3 + n))} for n in (3, 1, 4)]
    given = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(data)
    found = packed_by_positions(given, SDPA)
    assert sorted(found) == ["input_ids", "labels", "position_ids", "seq_idx"]
    bare = packed_by_positions({k: x for k, x in given.items() if k != "position_ids"}, SDPA)
    assert torch.equal(bare["position_ids"], given["position_ids"]) and bare["position_ids"].dtype == torch.int64
    assert packed_by_positions(given, FLASH).keys() == given.keys()
    plain = {"input_ids": given["input_ids"]}
    assert packed_by_positions(plain, SDPA) == plain
    with pytest.raises(ValueError, match="Pass position_ids that start again"):
        packed_by_positions({**given, "input_ids": given["input_ids"].view(2, 4)}, SDPA)

"""python -m benchmarks.sparse.packed   (make bench): rows of packed documents beside the same documents apart.

A captured training step (forward, backward, AdamW) of a small GPT-2 in float32 on one thread: 8 rows of 512 tokens with
8 documents each, whose `position_ids` start again, beside 64 rows of one document. The model is transformers', as it
is. A third row has torch's kernel with the mask that the model makes, for all pairs of tokens. Each round runs every
row once, in an order that rotates; ratios are of one round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import zerofn
from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end
from benchmarks.common.statistic import ratio
from benchmarks.common.turns import in_turn
from zerofn import optim
from zerofn.capture import sparse_masks
from zerofn.ops import native

ROWS, LENGTH, DOCUMENTS, VOCAB = 8, 512, 8, 1024
LIMIT, SAME = 1.15, 1.0  # of the time apart; the greatest difference of a logit, in millionths of the greatest one
APART, PACKED, MASKED = "documents apart", "packed", "packed, torch's kernel with the mask"


def build() -> GPT2LMHeadModel:
    """A GPT of the size of `examples/gpt.py`."""
    torch.manual_seed(0)
    sizes = {"n_embd": 192, "n_layer": 4, "n_head": 6, "n_positions": LENGTH, "vocab_size": VOCAB}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ends, use_cache=False))


def batches() -> dict[str, dict[str, Tensor]]:
    """The same tokens of each row of the table. Labels are those of each token's next one, in its document."""
    draw = torch.Generator().manual_seed(0)
    size = LENGTH // DOCUMENTS
    tokens = torch.randint(VOCAB, (ROWS * DOCUMENTS, size), generator=draw)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    places = torch.arange(size).repeat(ROWS, DOCUMENTS)
    apart = {"input_ids": tokens, "position_ids": torch.arange(size).expand(ROWS * DOCUMENTS, -1).contiguous()}
    packed = {"input_ids": tokens.view(ROWS, LENGTH), "position_ids": places}
    rows = packed | {"targets": labels.view(ROWS, LENGTH)}
    return {APART: apart | {"targets": labels}, PACKED: rows, MASKED: rows}


def steps() -> dict[str, Any]:
    """(compiled step, state, batch) of each row. All of them have made one step."""
    model, found = build(), {}

    def loss_fn(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        logits = functional_call(model, params, (), {k: batch[k] for k in ("input_ids", "position_ids")}).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), logits.detach()

    def train_step(state: Any, batch: Any) -> Any:
        (loss, logits), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads), {"loss": loss, "logits": logits}

    for name, batch in batches().items():
        params = {k: x.detach().clone() for k, x in model.named_parameters()}
        state = zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))
        step, short = zerofn.compile(train_step), sparse_masks._SHORT
        sparse_masks._SHORT = LENGTH if name == MASKED else short
        try:
            state, first = step(state, batch)
        finally:
            sparse_masks._SHORT = short
        found[name] = [step, state, batch, first["logits"]]
    return found


def measured(rows: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each row's step, one a round, after one that does not count."""
    names = list(rows)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in in_turn(names, number):
            step, state, batch, _ = rows[name]
            began = time.perf_counter()
            rows[name][1] = step(state, batch)[0]
            if number:
                found[name].append(time.perf_counter() - began)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    add_end(parser, "packed.json")
    options, console = parser.parse_args(), Console(width=120 if not sys.stdout.isatty() else None)
    torch.set_num_threads(1)
    rows = steps()
    apart = rows[APART][3].view(ROWS, LENGTH, VOCAB)
    greatest = float(apart.abs().max())
    differences = {n: 1e6 * float((row[3].view_as(apart) - apart).abs().max()) / greatest for n, row in rows.items()}
    found = measured(rows, options.rounds)
    title = f"{ROWS} rows of {LENGTH} tokens, {DOCUMENTS} documents each; float32, 1 thread, {native.isa()}"
    table = Table(title=title)
    for name in ("", "ms a step", "of documents apart", "logits differ by, of a million"):
        table.add_column(name, justify="left" if not name else "right")
    for name, seconds in found.items():
        of_apart = str(ratio(seconds, found[APART]))
        table.add_row(name, f"{1e3 * statistics.median(seconds):.0f}", of_apart, f"{differences[name]:.2f}")
    time_ = ratio(found[PACKED], found[APART])
    held = [
        Check("packed: a step's time of that of documents apart", str(time_), time_.median, LIMIT),
        Check("packed: logits differ by, of a million", f"{differences[PACKED]:.2f}", differences[PACKED], SAME),
    ]
    console.print(table)
    console.print(report.check_table(held))
    run = {"surroundings": report.surroundings(), "isa": native.isa(), "rows": found, "differences": differences}
    return report.conclude(options.out, run, held, options.check)


if __name__ == "__main__":
    sys.exit(main())

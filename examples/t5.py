# torchrun --standalone --nproc-per-node 2 examples/t5.py      (or: python examples/t5.py)
"""transformers' T5, unmodified and from random weights, translates Django's messages to Romanian.

The data are some eight hundred sentence pairs from Django's message catalogues. That is little: the model
learns these pairs, and of new sentences it translates only the words and phrases that recur in the pairs.
It prints the loss for held-out sentences, and for comparison the loss for the same sentences, each
paired with the English of a different sentence.
"""

import argparse
import ast
import hashlib
import math
import random
import re
from pathlib import Path

import django
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.func import functional_call
from transformers import T5Config, T5ForConditionalGeneration

import zerofn
from zerofn import optim

PAD, EOS, IGNORED = 0, 1, -100


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--stage", type=int, default=3, choices=range(4))
    add("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    add("--steps", type=int, default=800)
    add("--batch", type=int, default=32, help="sentences a step, over all ranks")
    add("--accumulate", type=int, default=1, help="microbatches a rank's share is cut into")
    add("--length", type=int, default=32, help="tokens; longer sentences are left out")
    add("--layers", type=int, default=2, help="of the encoder, and as many of the decoder")
    add("--heads", type=int, default=4)
    add("--width", type=int, default=192)
    add("--dropout", type=float, default=0.1)
    add("--learning-rate", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--vocab", type=int, default=1000)
    add("--held-out", type=int, default=64, help="sentences for validation")
    add("--eval-every", type=int, default=100, help="steps between validations")
    add("--show", type=int, default=8, help="sentences of each kind to translate at the end")
    add("--out", type=Path, default=Path("runs/t5"), help="where the tokenizer goes")
    return parser.parse_args()


# ---- the data: English and Romanian from Django's catalogues


def catalogue(text: str) -> list[tuple[str, str]]:
    """The (msgid, msgstr) pairs of a .po file; a plural's first two forms, nothing marked fuzzy."""
    pairs = []
    for entry in text.split("\n\n"):
        if "#, fuzzy" in entry or "#~" in entry:
            continue
        fields = re.findall(r'^(\w+(?:\[\d\])?) ((?:".*"\n?)+)', entry, re.MULTILINE)
        said = {k: "".join(map(ast.literal_eval, v.splitlines())) for k, v in fields}
        pairs.append((said.get("msgid", ""), said.get("msgstr", said.get("msgstr[0]", ""))))
        pairs.append((said.get("msgid_plural", ""), said.get("msgstr[1]", "")))
    return [(source.strip(), target.strip()) for source, target in pairs if source and target]


def sentences(num_held_out: int, seed: int) -> tuple[list, list]:
    """Training and held-out pairs; no English sentence is in both."""
    modern = str.maketrans("şţŞŢ", "șțȘȚ")  # both spellings occur, a cedilla and the right comma
    found: dict[str, tuple[str, str]] = {}
    root = Path(django.__file__).parent
    for path in sorted(root.glob("**/locale/ro/LC_MESSAGES/django*.po")):
        for source, target in catalogue(path.read_text(encoding="utf-8")):
            found.setdefault(source.lower(), (source, target.translate(modern)))
    pairs = sorted(found.values(), key=lambda p: hashlib.md5(p[0].lower().encode()).digest())
    random.Random(seed).shuffle(pairs)
    words = [pair for pair in pairs if len(pair[0].split()) > 1]  # a single word cannot be guessed
    held_out = words[:num_held_out]
    unseen = set(held_out)
    return [pair for pair in pairs if pair not in unseen], held_out


def tokenizer_of(pairs: list[tuple[str, str]], vocab: int, path: Path, axis) -> Tokenizer:
    """A BPE tokenizer of both languages: trained by rank 0, read by all.

    T5's own kind is Unigram, but training that one twice gives two tokenizers.
    """
    if axis.rank == 0:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        special = ["<pad>", "</s>", "<unk>"]  # PAD, EOS, and what no token is there for
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    if axis.size > 1:
        dist.barrier()
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Tokenizer, pairs: list[tuple[str, str]], length: int):
    """(pairs that fit, {"x": [pairs, length] padded with PAD, "y": the same with IGNORED})."""
    fit, xs, ys = [], [], []
    for pair in pairs:
        x, y = (tokenizer.encode(text).ids + [EOS] for text in pair)
        if max(len(x), len(y)) <= length:
            fit.append(pair)
            xs.append(x + [PAD] * (length - len(x)))
            ys.append(y + [IGNORED] * (length - len(y)))
    return fit, {"x": torch.tensor(xs), "y": torch.tensor(ys)}


# ---- the steps: pure functions; stage, precision and ranks are nowhere in them


def make_steps(args, vocab: int):
    """(init_state, train_step, evaluate, next_tokens)."""
    config = T5Config(
        vocab_size=vocab,
        d_model=args.width,
        d_kv=args.width // args.heads,
        d_ff=4 * args.width,
        num_layers=args.layers,
        num_heads=args.heads,
        dropout_rate=args.dropout,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        use_cache=False,
    )
    model = zerofn.skeleton(lambda: T5ForConditionalGeneration(config).train())
    silent = zerofn.skeleton(lambda: T5ForConditionalGeneration(config)).eval()  # no dropout
    warmup = min(100, args.steps // 4)
    rate = optim.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, args.steps, 1e-5)
    tx = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(rate, weight_decay=0.1, mask=lambda leaf: len(leaf.shape) > 1)
    )

    def summed_loss(module, params, batch):
        """(sum over target tokens, their number): sentences differ in length, ranks in tokens."""
        real = batch["x"] != PAD
        inputs = {"input_ids": batch["x"], "attention_mask": real, "labels": batch["y"]}
        logits = functional_call(module, params, (), inputs).logits.float()
        total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
        return total, (batch["y"] != IGNORED).sum()

    def init_state():
        torch.manual_seed(args.seed)
        params = dict(T5ForConditionalGeneration(config).named_parameters())
        return zerofn.TrainState.create(params=params, tx=tx, seed=args.seed)

    def train_step(state, batch):
        vg = state.value_and_grad(lambda params, b: summed_loss(model, params, b))
        loss, grads = zerofn.accumulate(vg, args.accumulate)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    def evaluate(params, batch):
        total, weight = summed_loss(silent, zerofn.gather(params), batch)
        return zerofn.collectives.all_reduce(torch.stack([total, weight.to(total.dtype)]))

    def next_tokens(params, batch):
        """The likeliest token after position `at` of each row of the decoder's buffer."""
        inputs = {"input_ids": batch["x"], "attention_mask": batch["x"] != PAD, "decoder_input_ids": batch["written"]}
        logits = functional_call(silent, zerofn.gather(params), (), inputs).logits
        return logits.index_select(1, batch["at"])[:, 0].argmax(-1)

    return init_state, train_step, evaluate, next_tokens


def translate(next_tokens, params, tokenizer: Tokenizer, x: torch.Tensor) -> list[str]:
    """Greedy translations of the sentences [batch, length], in a buffer of that size: one capture.

    Every rank does the same, so that every rank takes part in the gathers.
    """
    written = torch.full_like(x, PAD)  # T5's decoder starts with the padding token
    for at in range(x.shape[1] - 1):
        tokens = next_tokens(params, {"x": x, "written": written, "at": torch.tensor([at])})
        written[:, at + 1] = tokens
    rows = [row[1:] + [EOS] for row in written.tolist()]
    return [tokenizer.decode(row[: row.index(EOS)]) for row in rows]


# ---- what is shown


def show(console: Console, title: str, pairs: list[tuple[str, str]], written: list[str]) -> None:
    table = Table("English", "Romanian, by Django's translators", "by the model", title=title)
    for (source, target), text in zip(pairs, written, strict=True):
        table.add_row(*map(escape, (source, target, text)), end_section=True)
    console.print(table)


def main() -> None:
    args = options()
    axis = zerofn.Mesh.of(None).axis()  # joins the other ranks under torchrun
    if args.batch % (axis.size * args.accumulate):
        parts = f"{axis.size} ranks times {args.accumulate} microbatches"
        raise SystemExit(f"--batch {args.batch} is not divisible by {parts}.")
    console = Console(quiet=axis.rank != 0, highlight=False)

    train, held_out = sentences(args.held_out, args.seed)
    tokenizer = tokenizer_of(train, args.vocab, args.out / "tokenizer.json", axis)
    total = len(train) + len(held_out)
    train, batch = encode(tokenizer, train, args.length)
    held_out, unseen = encode(tokenizer, held_out, args.length)
    left_out = total - len(train) - len(held_out)
    console.print(f"{len(train)} pairs to learn, {len(held_out)} held out, {left_out} too long")

    init_state, train_step, evaluate, next_tokens = make_steps(args, tokenizer.get_vocab_size())
    state = zerofn.shard(init_state, stage=args.stage, precision=args.precision)
    console.print(state, markup=False)
    step, evaluate, next_tokens = map(zerofn.compile, (train_step, evaluate, next_tokens))

    def validate(x: torch.Tensor) -> float:
        """Nats per held-out target token, given the English sentences `x`."""
        missing = -len(held_out) % axis.size  # rows without a target weigh nothing
        rows = {"x": F.pad(x, (0, 0, 0, missing), value=EOS)}
        rows["y"] = F.pad(unseen["y"], (0, 0, 0, missing), value=IGNORED)
        share = {k: v[axis.rank :: axis.size].contiguous() for k, v in rows.items()}
        loss, weight = evaluate(state.params, share).tolist()
        return loss / weight

    generator = torch.Generator().manual_seed(args.seed)
    num_epochs = math.ceil(args.steps * args.batch / len(train))
    order = torch.cat([torch.randperm(len(train), generator=generator) for _ in range(num_epochs)])
    before = validate(unseen["x"])
    console.print(f"step 0: validation {before:.3f}")
    mine = order[: args.steps * args.batch].view(args.steps, args.batch)[:, axis.rank :: axis.size]
    batches = ({k: v[rows] for k, v in batch.items()} for rows in mine)
    bar = zerofn.progress(batches, total=args.steps, tokens=lambda b: int((b["y"] != IGNORED).sum()))
    for now, rows in enumerate(bar, 1):
        state, metrics = step(state, rows)
        bar.log(metrics, state)
        if now % args.eval_every == 0 or now == args.steps:
            after = validate(unseen["x"])
            bar.print(f"step {now}: loss {metrics['loss']:.3f}, validation {after:.3f}")

    astray = validate(unseen["x"].roll(1, 0))  # each sentence beside another one's English
    longer = [i for i, (source, _) in enumerate(train) if len(source.split()) > 1][: args.show]
    kinds = {
        "learned": ([train[i] for i in longer], batch["x"][longer]),
        "held out": (held_out[: args.show], unseen["x"][: args.show]),
    }
    for title, (pairs, xs) in kinds.items():
        show(console, title, pairs, translate(next_tokens, state.params, tokenizer, xs))
    beside = f"{astray:.3f} beside another sentence's English"
    console.print(f"validation loss {before:.3f} before, {after:.3f} after; {beside}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

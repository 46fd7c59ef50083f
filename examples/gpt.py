# torchrun --standalone --nproc-per-node 2 examples/gpt.py      (or: python examples/gpt.py)
"""A small GPT learns Python from the sources of the standard library. Its state is sharded over the ranks.

It writes its tokenizer, tokens, checkpoints, log and loss curve to runs/gpt. If you start it again, it resumes from the
last checkpoint, on any number of ranks and at any --stage.
"""

import argparse
import contextlib
import hashlib
import json
import math
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--stage", type=int, default=3, choices=range(4))
    add("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    add("--moments", choices=["bf16", "8bit"], help="format of Adam's moments; by default the parameters' dtype")
    add("--offload", choices=["cpu", "nvme"], help="store the state in host memory or on drives")
    add("--steps", type=int, default=1200)
    add("--batch", type=int, default=8, help="sequences a step, over all ranks")
    sizes = {"context": 128, "layers": 4, "heads": 6, "width": 192, "vocab": 1024, "seed": 0}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default)
    add("--dropout", type=float, default=0.0)
    add("--learning-rate", type=float, default=2e-3)
    add("--megabytes", type=float, default=3.0, help="of source text; one file in ten is for validation")
    add("--eval-batches", type=int, default=32, help="batches of validation text")
    add("--eval-every", type=int, default=150, help="steps between validations")
    add("--save-every", type=int, default=400, help="steps between checkpoints")
    add("--sample", type=int, default=120, help="tokens to write at the end")
    add("--out", type=Path, default=Path("runs/gpt"))
    add("--stop-at", type=int, help="end after this step, as an interruption would")
    return parser.parse_args()


# ---- the model: plain PyTorch, knows nothing of ranks


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, width = x.shape
        qkv = self.qkv(self.attn_norm(x)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(b, t, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, vocab: int, context: int, layers: int, heads: int, width: int, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        for name, p in self.named_parameters():  # GPT-2's initialisation
            if p.dim() > 1:
                last = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x):
        """Tokens [batch, time] -> logits [batch, time, vocab]; the output layer is the embedding."""
        h = self.dropout(self.tokens(x) + self.positions.weight[: x.shape[1]])
        for block in self.h:
            h = block(h)
        return F.linear(self.norm(h), self.tokens.weight)


# ---- the data: the standard library's sources as tokens


def sources(megabytes: float) -> tuple[str, str]:
    """Training and validation text; every tenth file is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "encodings", "idle_test"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    files.sort(key=lambda p: hashlib.md5(str(p.relative_to(root)).encode()).digest())  # from everywhere
    texts = []
    while files and sum(map(len, texts)) < megabytes * 1e6:
        texts.append(files.pop().read_text(encoding="utf-8", errors="ignore"))
    return "".join(t for i, t in enumerate(texts) if i % 10), "".join(texts[::10])


def prepare(args, rank: int, size: int) -> tuple[Tokenizer, torch.Tensor, torch.Tensor]:
    """The tokenizer, training tokens and validation tokens: made by rank 0, read by all."""
    cache = args.out / f"data-{args.vocab}-{args.megabytes:g}"
    if rank == 0 and not cache.exists():
        train, validation = sources(args.megabytes)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        every_byte = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=args.vocab, initial_alphabet=every_byte, show_progress=False)
        tokenizer.train_from_iterator(train.splitlines(keepends=True), trainer)
        part = cache.with_name(f"{cache.name}.part")  # whoever finds the cache finds all of it
        part.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(part / "tokenizer.json"))
        for name, text in (("train", train), ("validation", validation)):
            np.save(part / name, np.array(tokenizer.encode(text).ids, dtype=np.int32))
        part.rename(cache)
    if size > 1:
        dist.barrier()
    tokens = [torch.from_numpy(np.load(cache / f"{x}.npy")).long() for x in ("train", "validation")]
    return Tokenizer.from_file(str(cache / "tokenizer.json")), *tokens


def windows(tokens, starts, context: int) -> dict[str, torch.Tensor]:
    """Inputs and next tokens [batch, context] from the given starts."""
    rows = tokens[starts[:, None] + torch.arange(context + 1)]
    return {"x": rows[:, :-1].contiguous(), "y": rows[:, 1:].contiguous()}


def bigram_loss(train, batches: list[dict[str, torch.Tensor]], vocab: int) -> tuple[float, float]:
    """(nats per token, k) of an add-k bigram model of `train`, with the k best on these very batches."""
    counts = torch.bincount(train[:-1] * vocab + train[1:], minlength=vocab**2).view(vocab, vocab)
    x, y = (torch.cat([b[name].flatten() for b in batches]) for name in ("x", "y"))
    pairs, totals = counts[x, y].double(), counts.sum(1)[x].double()
    ratios = {k: (totals + k * vocab) / (pairs + k) for k in (1, 0.3, 0.1, 0.03, 0.01)}
    return min((r.log().mean().item(), k) for k, r in ratios.items())


# ---- the steps: pure functions; stage, precision and ranks are nowhere in them


def make_steps(args):
    shape = (args.vocab, args.context, args.layers, args.heads, args.width, args.dropout)
    model, silent = zerofn.skeleton(lambda: GPT(*shape)), zerofn.skeleton(lambda: GPT(*shape)).eval()
    warmup = min(50, args.steps // 4)
    rate = optim.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, args.steps, 1e-5)
    decays = {"weight_decay": 0.1, "mask": lambda leaf: len(leaf.shape) > 1}
    adamw = optim.adamw(rate, b2=0.95, **decays, moments=args.moments)
    tx = optim.chain(optim.clip_by_global_norm(1.0), adamw)

    def loss_of(module, params, batch):
        logits = functional_call(module, params, (batch["x"],))
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())

    def init_state():
        torch.manual_seed(args.seed)
        params = dict(GPT(*shape).named_parameters())
        return zerofn.TrainState.create(params=params, tx=tx, seed=args.seed, extra={"num_sequences": 0})

    def train_step(state, batch):
        loss, grads = state.value_and_grad(partial(loss_of, model))(batch)
        seen = state.extra["num_sequences"] + args.batch  # where the loader stands
        state = state.apply_gradients(grads, extra={"num_sequences": seen})
        return state, {"loss": loss}

    def evaluate(params, batch):
        return zerofn.collectives.all_reduce(loss_of(silent, zerofn.gather(params), batch))  # the sum

    def next_logits(params, batch):
        logits = functional_call(silent, zerofn.gather(params), (batch["x"],))
        return logits[0].index_select(0, batch["at"]).float()

    return init_state, train_step, evaluate, next_logits


def write(next_logits, params, tokenizer: Tokenizer, args, prompt: str) -> str:
    """`prompt` and `args.sample` more tokens, from a window of fixed size: one capture."""
    generator = torch.Generator().manual_seed(args.seed)  # the same draws on every rank
    tokens = tokenizer.encode(prompt).ids
    for _ in range(args.sample):
        window = tokens[-args.context :]
        x = F.pad(torch.tensor([window]), (0, args.context - len(window)))
        logits = next_logits(params, {"x": x, "at": torch.tensor([len(window) - 1])})
        best = logits[0].div(0.8).topk(min(40, args.vocab))
        pick = torch.multinomial(best.values.softmax(0), 1, generator=generator)
        tokens.append(int(best.indices[pick]))
    return tokenizer.decode(tokens)


# ---- what is shown


def memory_of_ranks() -> str:
    """Resident megabytes of every rank."""
    here = torch.tensor([psutil.Process().memory_info().rss / 1e6])
    return "+".join(f"{x:.0f}" for x in zerofn.collectives.all_gather(here).tolist())


def draw(log: list[dict], bigram: float, path: Path) -> None:
    """The loss curve, with the bigram model's loss as a line."""

    def curve(name: str) -> tuple[list[int], list[float]]:
        return [r["step"] for r in log if name in r], [r[name] for r in log if name in r]

    axes = (figure := Figure(figsize=(7, 4.2), layout="constrained")).subplots()
    axes.plot(*curve("train"), color="tab:blue", alpha=0.35, linewidth=0.8, label="training, each step")
    axes.plot(*curve("validation"), "o-", color="tab:red", markersize=4, label="validation")
    axes.axhline(bigram, color="black", linestyle="--", linewidth=1, label="add-k bigram model, validation")
    axes.set(xlabel="step", ylabel="loss, nats per token", title="A small GPT on Python's sources")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    args = options()
    axis = zerofn.Mesh.of(None).axis()  # joins the other ranks under torchrun
    if args.batch % axis.size:
        raise SystemExit(f"--batch {args.batch} is not divisible by the {axis.size} ranks.")
    console = Console(quiet=axis.rank != 0, highlight=False, soft_wrap=True)
    tokenizer, train, validation = prepare(args, axis.rank, axis.size)
    mine = slice(axis.rank * args.batch // axis.size, (axis.rank + 1) * args.batch // axis.size)

    def batch_at(num_sequences: int) -> dict[str, torch.Tensor]:
        """The loader is a function of how many sequences were seen: resuming needs that number alone."""
        generator = torch.Generator().manual_seed((args.seed << 40) + num_sequences)
        starts = torch.randint(len(train) - args.context, (args.batch,), generator=generator)
        return windows(train, starts[mine], args.context)

    init_state, train_step, evaluate, next_logits = make_steps(args)
    state, log = zerofn.shard(init_state, stage=args.stage, precision=args.precision, offload=args.offload), []
    checkpoints = zerofn.Checkpoints(args.out / "checkpoints", every=args.save_every)
    state = checkpoints.restore_or(state)
    if checkpoints.step and (args.out / "log.json").exists():
        log = [r for r in json.loads((args.out / "log.json").read_text()) if r["step"] <= checkpoints.step]
        console.print(f"resuming after step {checkpoints.step} (delete {args.out} to start over)")
    console.print(state, markup=False)
    console.print(f"{len(train):,} training tokens, {len(validation):,} held out; ranks: {axis.size}")
    step, evaluate, next_logits = map(zerofn.compile, (train_step, evaluate, next_logits))

    spread = torch.linspace(0, len(validation) - args.context - 1, args.eval_batches * args.batch)
    held_out = [windows(validation, s, args.context) for s in spread.long().split(args.batch)]

    def validate() -> float:
        losses = [evaluate(state.params, {k: v[mine] for k, v in b.items()}) for b in held_out]
        return torch.stack(losses).mean().item() / axis.size

    first, last = checkpoints.step, min(args.steps, args.stop_at or args.steps)
    num_sequences = int(state.extra["num_sequences"])

    def write_log() -> None:
        if axis.rank == 0:
            (args.out / "log.json").write_text(json.dumps(log))

    tokens = args.batch * args.context // axis.size  # of a step, on this rank
    bar = zerofn.progress(range(first + 1, last + 1), initial=first, total=args.steps, tokens=lambda _: tokens)
    with contextlib.ExitStack() as at_end:
        at_end.callback(write_log)  # also where a signal ends the run
        for now in bar:
            state, metrics = step(state, batch_at(num_sequences))
            num_sequences += args.batch
            bar.log(metrics, state)
            log.append({"step": now, "train": (loss := metrics["loss"].item())})
            if now % args.eval_every == 0 or now == args.steps:
                log.append({"step": now, "validation": (held := validate())})
                bar.print(f"step {now}: loss {loss:.3f}, validation {held:.3f}, rss {memory_of_ranks()} MB")
            if now % args.save_every == 0:
                write_log()
            checkpoints.after_step(state, metrics)
    if last > first and last % args.save_every:
        checkpoints.save(state)
    checkpoints.close()
    if last < args.steps:
        return console.print(f"stopped after step {last}; start it again to resume")

    bigram, k = bigram_loss(train, held_out, args.vocab)
    if axis.rank == 0:
        draw(log, bigram, args.out / "loss.png")
    text = write(next_logits, state.params, tokenizer, args, "def read(self, size=-1):\n")
    console.print(f"a sample:\n{text}\n", markup=False)
    console.print(f"loss curve: {args.out / 'loss.png'}; checkpoints: {checkpoints.folder}")
    console.print(f"validation loss {validate():.3f}, add-k bigram model {bigram:.3f} (k={k:g})")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

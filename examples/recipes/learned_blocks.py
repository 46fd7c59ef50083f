"""Attention that learns where to look: each block of queries attends to itself and to
the 2 best blocks of keys. The best blocks have the highest scores of mean key and mean
query (top-k over pooled keys, as in MoBA, arXiv:2502.13189, and NSA, arXiv:2502.11089).

python examples/recipes/learned_blocks.py
torchrun --nproc-per-node 2 examples/recipes/learned_blocks.py
"""

import torch
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim, sparse

BLOCK, BLOCKS, TOP, NAMES = 8, 8, 2, 8


def batches(steps, rows):
    """This rank's rows: blocks of a name and its value. The last asks for one."""
    draw, everyone = torch.Generator().manual_seed(0), rows * zerofn.world_size("rows")
    mine = slice(zerofn.rank("rows") * rows, (zerofn.rank("rows") + 1) * rows)
    for _ in range(steps):
        names = torch.rand(everyone, NAMES, generator=draw).argsort(1)[:, : BLOCKS - 1]
        values = torch.randint(NAMES, 2 * NAMES, names.shape, generator=draw)
        pairs = torch.stack([names, values], 2).repeat(1, 1, BLOCK // 2).flatten(1)
        asked = torch.randint(BLOCKS - 1, (everyone, 1), generator=draw)
        tokens = torch.cat([pairs, names.gather(1, asked).expand(-1, BLOCK)], 1)
        yield {"tokens": tokens[mine], "answer": values.gather(1, asked)[mine, 0]}


def best_blocks(q, k):
    """Blocks of keys [batch, heads, blocks, 1 + TOP]: its own, and the best before."""
    q, k = (x.unflatten(2, (-1, BLOCK)).mean(3) for x in (q, k))
    at = torch.arange(q.shape[2])
    fit = (q @ k.transpose(2, 3)).masked_fill(at >= at[:, None], float("-inf"))
    fit, best = fit.topk(TOP)
    # the first blocks have fewer before them
    best = best.masked_fill(fit == float("-inf"), -1)
    own = at[:, None].expand(*best.shape[:2], -1, 1)
    return torch.cat([own, best], 3)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        layout = sparse.chosen(best_blocks(q, k), BLOCK)
        out = sparse.attention(q, k, v, layout, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


def build(width=64, heads=2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(2 * NAMES, width),
        Layer(width, heads),
        Layer(width, heads),
        nn.Linear(width, 2 * NAMES),
    )


def main(steps=600, rows=64):
    model = zerofn.skeleton(build)

    def init_state():
        return zerofn.TrainState.create(
            params=dict(build().named_parameters()), tx=optim.adamw(5e-3)
        )

    def loss_fn(params, batch):
        logits = functional_call(model, params, (batch["tokens"],))
        logits = logits[:, -BLOCK:].flatten(0, 1)  # each of these tokens asks
        answers = batch["answer"].repeat_interleave(BLOCK)
        right = (logits.argmax(1) == answers).double().mean()
        return nn.functional.cross_entropy(logits, answers), right

    def train_step(state, batch):
        (loss, right), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads), {"loss": loss, "right": right}

    state = zerofn.shard(init_state)
    step, losses = zerofn.compile(train_step), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        state, metrics = step(state, batch)
        bar.log(metrics, state)
        losses.append(metrics["loss"])
    return [float(x) for x in losses]


if __name__ == "__main__":
    main()

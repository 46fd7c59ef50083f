# torchrun --standalone --nproc-per-node 2 examples/explicit.py      (or: python examples/explicit.py)
"""`gather` and `scatter` written out, and the curvature of a loss whose parameters are sharded.

1. The step that `value_and_grad` writes for you, by hand with `torch.func`: the same parameters come out.
2. A Hessian-vector product through the shards, `jvp(grad(loss))`, against plain torch on the full parameters.
3. The largest eigenvalue of the Hessian by power iteration: 2 / eigenvalue bounds the learning rate.

Everything runs eagerly and compiled, at every --stage.
"""

import argparse
import functools
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jvp

import zerofn
from zerofn import optim

CONTEXT = 16  # bytes the model sees


class NextByte(nn.Module):
    """Bengio et al. 2003: the embeddings of the last bytes, hidden layers, the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 32)
        self.first, self.last = nn.Linear(32 * CONTEXT, width), nn.Linear(width, 256)
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        """Bytes [batch, CONTEXT] -> logits [batch, 256]."""
        y = self.first(self.bytes(x).flatten(1)).tanh()
        for layer in self.h:
            y = y + layer(y).tanh()
        return self.last(y)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--stage", type=int, default=3, choices=range(4))
    add("--steps", type=int, default=50, help="training steps of part 1")
    add("--iterations", type=int, default=30, help="power iterations of part 3")
    add("--batch", type=int, default=512, help="windows of text in a batch, over all ranks")
    add("--width", type=int, default=256)
    add("--layers", type=int, default=3)
    return parser.parse_args()


@functools.cache
def text() -> torch.Tensor:
    """Some of the standard library's sources, bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join((folder / name).read_bytes() for name in ("argparse.py", "typing.py", "inspect.py"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def windows(index: int, size: int) -> dict[str, torch.Tensor]:
    """Batch `index`, the same on every rank: windows of text, and the byte after each."""
    data = text()
    generator = torch.Generator().manual_seed(index)
    starts = torch.randint(len(data) - CONTEXT, (size, 1), generator=generator)
    rows = data[starts + torch.arange(CONTEXT + 1)]
    return {"x": rows[:, :-1].contiguous(), "y": rows[:, -1].contiguous()}


def largest(tree) -> float:
    """The largest entry of a tree of full tensors."""
    return max(t.abs().max().item() for t in tree.values())


def gap(a, b) -> float:
    """The largest difference between two trees of full tensors, relative to the largest entry."""
    return largest({k: a[k] - b[k] for k in a}) / largest(b)


def main() -> None:
    args = options()
    axis = zerofn.Mesh.of(None).axis()  # joins the other ranks under torchrun
    if args.batch % axis.size:
        raise SystemExit(f"--batch {args.batch} is not divisible by the {axis.size} ranks.")
    show = print if axis.rank == 0 else lambda *_: None
    model = zerofn.skeleton(lambda: NextByte(args.width, args.layers))

    def mine(batch):
        """This rank's rows."""
        return {k: v.chunk(axis.size)[axis.rank].clone() for k, v in batch.items()}

    def loss_fn(params, batch):
        return F.cross_entropy(functional_call(model, params, (batch["x"],)), batch["y"])

    def init_state():
        torch.manual_seed(0)
        params = dict(NextByte(args.width, args.layers).named_parameters())
        return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))

    # ---- 1. one step, twice

    def everyday_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    def explicit_step(state, batch):
        params = zerofn.gather(state.params)  # shards -> full parameters
        grads, loss = grad_and_value(loss_fn)(params, batch)  # local: this rank's rows
        grads = zerofn.scatter(grads, like=state.params)  # the mean over ranks, this rank's shard of it
        loss = zerofn.collectives.mean(loss)
        return state.apply_gradients(grads), {"loss": loss}

    def train(step):
        state = zerofn.shard(init_state, stage=args.stage)
        for k in range(args.steps):
            state, metrics = step(state, mine(windows(k, args.batch)))
        return state, metrics["loss"].item()

    state, loss = train(zerofn.compile(everyday_step))
    show(state.params)
    show(f"value_and_grad, compiled: loss {loss:.6f} after {args.steps} steps")
    for name, step in (("eager", explicit_step), ("compiled", zerofn.compile(explicit_step))):
        other, loss = train(step)
        apart = gap(zerofn.unshard(other.params), zerofn.unshard(state.params))
        show(f"gather and scatter, {name}: loss {loss:.6f}, parameters differ by {apart:.1e}")

    # ---- 2. a Hessian-vector product: jvp of grad, on trees of shards

    whole = windows(10_000, args.batch)

    def global_loss(params, batch):
        """This rank's share of a function of shards: its derivatives are those of the mean over ranks."""
        return loss_fn(zerofn.gather(params), batch)

    def hessian_times(v, params, batch):
        return jvp(grad(lambda p: global_loss(p, batch)), (params,), (v,))[1]

    def product(params, inputs):
        return hessian_times(inputs["v"], params, inputs["batch"])

    v = grad(global_loss)(state.params, mine(whole))  # a direction to look into: a `Sharded` like params
    full, full_v = zerofn.unshard(state.params), zerofn.unshard(v)
    plain = jvp(grad(lambda p: loss_fn(p, whole)), (full,), (full_v,))[1]
    for name, hvp in (("eager", product), ("compiled", zerofn.compile(product))):
        ours = zerofn.unshard(hvp(state.params, {"v": v, "batch": mine(whole)}))
        show(f"Hessian-vector product, {name}: relative difference to plain torch {gap(ours, plain):.1e}")

    # ---- 3. power iteration: its state is the vector, cut like the parameters

    def iterate(v, inputs):
        hv = hessian_times(v, inputs["params"], inputs["batch"])
        norm = zerofn.global_norm(hv)  # over all ranks
        eigenvalue = zerofn.vdot(v, hv)
        residual = zerofn.global_norm(zerofn.tree_map(lambda h, x: h - eigenvalue * x, hv, v))
        return zerofn.tree_map(lambda h: h / norm, hv), (eigenvalue, residual)

    inputs = {"params": state.params, "batch": mine(whole)}
    norm = zerofn.global_norm(v)
    v = zerofn.tree_map(lambda x: x / norm, v)
    _, (once, _) = iterate(v, inputs)
    power = zerofn.compile(iterate)
    for k in range(args.iterations):
        v, (eigenvalue, residual) = power(v, inputs)
        if k == 0:
            show(f"power iteration: {once.item():.6f} eager, {eigenvalue.item():.6f} compiled at first")
    sharpness = eigenvalue.item()
    show(
        f"largest Hessian eigenvalue {sharpness:.4f} after {args.iterations} iterations, "
        f"|Hv - cv| / c = {residual.item() / sharpness:.1e}"
    )

    # Seen another way: the curvature along that direction, from three losses.
    evaluate = zerofn.compile(lambda params, batch: zerofn.collectives.all_reduce(global_loss(params, batch)))

    def loss_at(distance):
        moved = zerofn.tree_map(lambda p, x: p + distance * x, state.params, v)
        return evaluate(moved, mine(whole)).item() / axis.size

    curvature = (loss_at(-0.02) - 2 * loss_at(0.0) + loss_at(0.02)) / 0.02**2
    show(f"curvature in that direction, from three losses: {curvature:.4f}")
    show(f"so gradient descent is locally stable up to a learning rate of 2 / c = {2 / sharpness:.4f}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

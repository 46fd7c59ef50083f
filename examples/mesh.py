# torchrun --standalone --nproc-per-node 8 examples/mesh.py --mesh data=2,context=2,tensor=2
# torchrun --standalone --nproc-per-node 4 examples/mesh.py --mesh pipe=2,data=2 --microbatches 4 --layers 6
"""transformers' Llama or Mixtral, unmodified and from random weights, on any mesh of ranks.

It reads Python, byte by byte, from the standard library's sources. Before the first step it prints what each axis of
the mesh will send in a step. The loss is the same on every mesh, to rounding.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.func import functional_call
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import zerofn
from zerofn import optim


def mesh_of(text: str) -> dict[str, int]:
    try:
        return {name.strip(): int(size) for name, size in (axis.split("=") for axis in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write axes and sizes, as data=2,tensor=2") from None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--mesh",
        type=mesh_of,
        default={"data": -1},
        help="axes and sizes: data=2,context=2,tensor=2 or pipe=2,expert=2",
    )
    add("--model", default="llama", choices=["llama", "mixtral"])
    add("--method", choices=["ulysses", "ring"], help="of attention along the axis context (by the number of heads)")
    add("--capacity", type=float, help="of experts along the axis expert, as a factor; by default nothing is dropped")
    add("--microbatches", type=int, default=1, help="of a rank's rows; along the axis pipe several, to keep all busy")
    add("--schedule", default="auto", help="of the axis pipe: 1f1b, zb-h1, interleaved, zbv, ...")
    add("--stage", type=int, default=3, choices=range(4))
    add("--steps", type=int, default=60)
    add("--batch", type=int, default=8, help="sequences a step, over all ranks")
    add("--length", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128)
    add("--learning-rate", type=float, default=2e-3)
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> LlamaConfig | MixtralConfig:
    sizes = {"vocab_size": 256, "hidden_size": args.width, "intermediate_size": 2 * args.width, "use_cache": False}
    sizes |= {"num_hidden_layers": args.layers, "max_position_embeddings": args.length}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), args.heads)
    if args.model == "llama":
        return LlamaConfig(**sizes)
    return MixtralConfig(**sizes, num_local_experts=4)


def sequences(args: argparse.Namespace) -> torch.Tensor:
    """[number, length]: the first bytes of the standard library, in the order of names."""
    text, wanted = bytearray(), args.steps * args.batch * args.length
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    if len(text) < wanted:
        raise SystemExit(f"{args.steps} steps read {wanted:,} bytes, and there are {len(text):,}: give fewer --steps.")
    return torch.frombuffer(text, dtype=torch.uint8, count=wanted).long().view(-1, args.length)


def main() -> None:
    args, console = options(), Console()
    mesh = zerofn.Mesh.make(**args.mesh)
    if args.batch % mesh.rows.size:
        raise SystemExit(f"--batch {args.batch} is not divisible by the {mesh.rows.size} ranks with different rows.")

    def build():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config_of(args))

    model = zerofn.skeleton(build)
    axes = {axis.name for axis in mesh.axes}  # `zerofn plan --mesh ...` makes another mesh of this script
    cuts = zerofn.parallel.tensor(model, mesh) if "tensor" in axes else {}
    if "expert" in axes and args.model == "mixtral":
        cuts |= zerofn.moe.experts(model, mesh, capacity=args.capacity)
    if "context" in axes:
        zerofn.parallel.context(model, mesh, method=args.method)

    def init_state():
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.adamw(args.learning_rate))

    def loss_fn(params, batch):
        return functional_call(model, params, (), batch).loss

    def train_step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), args.microbatches)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    def batch_of(rows):
        batch = {"input_ids": rows, "labels": rows}
        return zerofn.parallel.split_sequence(batch, mesh) if "context" in axes else batch

    data = sequences(args)
    if "pipe" in axes:
        one = batch_of(data[: args.batch // mesh.rows.size // args.microbatches])
        cuts = zerofn.parallel.pipe(model, mesh, loss_fn, one, cuts=cuts, schedule=args.schedule)
    state = zerofn.shard(init_state, stage=args.stage, mesh=mesh, cuts=cuts)
    step = zerofn.compile(train_step)
    sampler = zerofn.sampler(data, mesh, shuffle=False)
    loader = DataLoader(data, args.batch // mesh.rows.size, sampler=sampler, collate_fn=torch.stack)

    plan = step.lower(state, batch_of(next(iter(loader))))
    if zerofn.rank() == 0:
        table = Table("axis", "ranks", "MB a rank sends in a step", title=f"{args.model} at stage {args.stage}")
        for axis, nbytes in plan.sent_along.items():
            table.add_row(axis, str(mesh.over(axis.split(" x ")).size), f"{nbytes / 1e6:.2f}")
        console.print(table)
        if "pipe" in axes:
            console.print(cuts, highlight=False, soft_wrap=True)
        console.print(f"{plan.memory().total / 1e6:.1f} MB of a rank's memory at the peak")
    bar = zerofn.progress(loader, every=20)
    for rows in bar:
        state, metrics = step(state, batch_of(rows))
        bar.log(metrics, state)
    if zerofn.rank() == 0:
        console.print(f"loss {metrics['loss'].item():.5f}", highlight=False)


if __name__ == "__main__":
    main()

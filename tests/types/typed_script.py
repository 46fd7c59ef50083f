"""A user's script, which is never run: `test_types.py` has it read by type checkers.

A comment says what they must find in its line: `# is T`, what each reveals; `# pyright is T`, what pyright alone knows,
since mypy infers nothing of functions without annotations; `# refused`, an error.
"""

# ruff: noqa: F821, B018

import torch
from torch import Tensor, nn

import zerofn
from zerofn import optim, parallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


model = zerofn.skeleton(lambda: Net())
reveal_type(model)  # is Net


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(model, params, x).square().mean()


def with_aux(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, int]:
    return loss_fn(params, x), 1


def init_state() -> zerofn.TrainState:
    return zerofn.TrainState.create(params=dict(Net().named_parameters()), tx=optim.adamw(1e-3, moments="8bit"))


def train_step(state: zerofn.TrainState, x: Tensor) -> tuple[zerofn.TrainState, dict[str, Tensor]]:
    loss, grads = state.value_and_grad(loss_fn)(x)
    reveal_type(loss)  # is Tensor
    (loss, aux), grads = zerofn.accumulate(state.value_and_grad(with_aux, has_aux=True), 4)(x)
    reveal_type(aux)  # is int
    reveal_type(zerofn.value_and_grad(loss_fn)(state.params, x)[0])  # is Tensor
    return state.apply_gradients(grads), {"loss": loss}


def bare_step(state, x):
    loss, grads = state.value_and_grad(loss_fn)(x)
    return state.apply_gradients(grads), loss


def evaluate(state: zerofn.TrainState, x: Tensor) -> Tensor:
    return loss_fn(state.params, x)


def whole(x: int) -> str:
    return str(x)


state = zerofn.shard(init_state, stage=3, precision="bf16", offload="cpu", wire={"replicate": "int8"})
reveal_type(state)  # is TrainState
state = zerofn.Checkpoints("run").restore_or(init_state)
reveal_type(zerofn.shard(init_state()))  # is TrainState
reveal_type(zerofn.unshard(state))  # is TrainState
reveal_type(zerofn.load("path", like=state))  # is TrainState

step = zerofn.compile(train_step, memory="24GiB", remat="auto", schedule=[["0F0", "0B0"]])
bar = zerofn.progress([torch.ones(2, 8)], step=step)
for batch in bar:
    reveal_type(batch)  # is Tensor
    state, metrics = step(state, batch)
    reveal_type(state)  # is TrainState
    reveal_type(metrics)  # is dict[str, Tensor]
    state, loss = zerofn.compile(bare_step)(state, batch)
    reveal_type(state)  # pyright is TrainState
    reveal_type(zerofn.compile(bare_step))  # pyright is CompiledStep[Unknown, Unknown, tuple[Unknown, Unknown]]
    reveal_type(zerofn.compile(evaluate)(state, batch))  # is Tensor
    reveal_type(step.lower(state, batch))  # is Plan
    reveal_type(step.profile(state, batch))  # is tuple[tuple[TrainState, dict[str, Tensor]], Profile]
reveal_type(step.state)  # is TrainState | None
reveal_type(zerofn.run(evaluate, state, torch.ones(2, 8)))  # is Tensor
reveal_type(zerofn.remat(whole)(1))  # is str
reveal_type(zerofn.eager_region(whole, like=whole)(1))  # is str
reveal_type(list(zerofn.even([1, 2])))  # is list[int]
reveal_type(state.replace(seed=1).apply_gradients({}))  # is TrainState
reveal_type(zerofn.plan(train_step, init_state, torch.ones(2, 8), stage=[1, 3], offload=[None, "cpu"]))  # is Table

state.parms  # refused
zerofn.shard(init_state, stage=4)  # refused
zerofn.shard(init_state, precision="bf61")  # refused
zerofn.shard(init_state, offload="disk")  # refused
zerofn.shard(init_state, wire="int7")  # refused
zerofn.compile(train_step, backend="induktor")  # refused
zerofn.compile(train_step, remat="ful")  # refused
zerofn.compile(train_step, schedule="1f2b")  # refused
zerofn.compile(lambda state: state)  # refused
zerofn.compile(train_step)(state, "rows")  # refused
zerofn.remat(whole)("1")  # refused
zerofn.plan(train_step, init_state, torch.ones(2, 8), stage=5)  # refused
zerofn.accumulate(state.value_and_grad(loss_fn), 4, reduce="never")  # refused
state.apply_gradients({}, on_nonfinite="raise")  # refused
zerofn.Offload(optimizer="disk")  # refused
zerofn.Wire(gather="int5")  # refused
zerofn.Checkpoints("run", keep_best=("loss", "least"))  # refused
optim.adamw(1e-3, moments="4bit")  # refused
parallel.Slice(0, output="added")  # refused

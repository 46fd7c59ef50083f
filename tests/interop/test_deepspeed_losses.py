"""The losses of DeepSpeed, from its own configurations. benchmarks/interop/deepspeed_losses.py has written them."""

import json

import pytest
import torch
import torch.distributed as dist

import zerofn
from benchmarks.interop.deepspeed_losses import CONFIGS, RANKS, RESULT, STEPS, batch, config_of, model

THEIRS = json.loads(RESULT.read_text())


def losses(name, stage):
    module = model()
    setup = zerofn.from_deepspeed(config_of(name, stage))
    assert setup.shard["stage"] == stage and setup.shard["precision"] == "fp32"

    def loss_fn(params, inputs):
        return (torch.func.functional_call(module, params, (inputs["x"],)) - inputs["y"]).square().mean()

    def train_step(state, inputs):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, setup.num_microbatches) if setup.num_microbatches > 1 else vg)(inputs)
        return state.apply_gradients(grads, on_nonfinite=setup.on_nonfinite), {"loss": loss}

    def init_state():
        return zerofn.TrainState.create(params=dict(module.named_parameters()), tx=setup.tx)

    state, step = zerofn.shard(init_state(), **setup.shard), zerofn.compile(train_step, **setup.compile)
    found = []
    for k in range(STEPS):
        x, y = batch(dist.get_rank(), k, setup.rows)
        state, aux = step(state, {"x": x, "y": y})
        found.append(float(aux["loss"]))
    return found


@pytest.mark.part(
    stage=[3], name=["AdamW, clipped by default, accumulating", "Adam with L2", "OneCycle", "Adagrad", "RMSprop"]
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_losses(ranks, name, stage):
    expected = THEIRS[name][str(stage)]
    assert isinstance(expected, list), expected
    for found in ranks(RANKS, losses, name, stage):
        assert found == pytest.approx(expected, rel=1e-5)

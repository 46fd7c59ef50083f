"""What slices of layers compute is summed before it meets what is whole."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn.comm.mesh import Mesh
from zerofn.parallel import Slice, cross_entropy, tensor

TOKENS = torch.arange(10).view(2, 5)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, 6), nn.LayerNorm(6), nn.Linear(6, 10)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def plan_of(plan, loss, build=Words, num_microbatches=1):
    mesh = Mesh.planned({"tensor": 2})
    model = zerofn.skeleton(build)
    cuts = tensor(model, mesh, plan)

    def init_state():
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=zerofn.optim.sgd(0.1))

    def step(state, batch):
        graded = state.value_and_grad(lambda p, ids: loss(functional_call(model, p, (ids,)), ids))
        value, grads = zerofn.accumulate(graded, num_microbatches)(batch)
        return state.apply_gradients(grads), value

    zerofn.plan(step, init_state, TOKENS, mesh=mesh, cuts=cuts, stage=3, offload=None, precision=None, remat=None)


def of_whole(logits, ids):
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def squared(logits, _):
    return logits.square().mean()


@pytest.mark.part(num_microbatches=[1])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_loss_of_whole_logits_does_not_take_slices(num_microbatches):
    with pytest.raises(
        zerofn.CaptureError, match=r"loss differs along 'tensor': .*'head.weight'.*Write zerofn.parallel.cross_entropy"
    ):
        plan_of({"head": "colwise"}, of_whole, num_microbatches=num_microbatches)
    plan_of({"head": "colwise_gather_output"}, of_whole, num_microbatches=num_microbatches)
    plan_of({"head": "colwise"}, lambda y, ids: cross_entropy(y, ids, 10), num_microbatches=num_microbatches)


def test_a_loss_of_parts_names_the_slices_that_it_depends_on():
    with pytest.raises(zerofn.CaptureError, match="slices of 'head.bias', 'head.weight', without a sum .*'rowwise'"):
        plan_of({"head": "colwise"}, squared)


@pytest.mark.parametrize("head", ["colwise_gather_output", "replicate"])
def test_a_module_before_slices_is_not_between_them(head):
    plan = {"norm": "replicated_with_grad_allreduce", "embed": "embedding_rowwise", "head": head}
    with pytest.raises(
        zerofn.CaptureError, match="'norm', but the input is the same on all ranks, .* Leave 'norm' out of the plan"
    ):
        plan_of(plan, squared)


def test_what_all_ranks_have_is_not_summed():
    with pytest.raises(
        zerofn.CaptureError, match="norm: the plan's word for this .*the sum would be 2 times too large. Leave norm out"
    ):
        plan_of({"norm": "all_reduce", "head": "colwise_gather_output"}, squared)


class OfItsOwn(Words):
    """Code that goes on with a slice of a parameter, and says nothing of what it takes."""

    said = False

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        x = zerofn.collectives.vary(x, "tensor") if self.said else x
        return zerofn.collectives.psum((x @ self.head.weight.t()).square(), "tensor")


class Said(OfItsOwn):
    said = True


def test_code_of_ones_own_says_where_ranks_go_their_own_ways():
    plan = {"head.weight": Slice(0, output="cut")}
    with pytest.raises(
        zerofn.CaptureError, match=r"the gradient of 'embed.weight' \(and of 'norm.bias', .*Before ranks .*vary"
    ):
        plan_of(plan, squared, OfItsOwn)
    plan_of(plan, squared, Said)

"""Operations of known kinds are recorded as torch would, and how long a capture takes grows with leaves alone."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zerofn
from tests.support.small_steps import fake_ranks
from zerofn.capture.capture import capture
from zerofn.graph.program import tensor_of
from zerofn.passes._context import context_of
from zerofn.passes.canonicalize import canonicalize
from zerofn.tracing import shortcut
from zerofn.util.process import instead


class Without:
    """In the place of a `Shortcut`: torch records everything."""

    def __init__(self, answer=None): ...

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Net(torch.nn.Module):
    """Operations of many kinds: views with dims of size 1, results in tuples, random ones, writes in place."""

    def __init__(self):
        super().__init__()
        self.inp = torch.nn.Linear(8, 24)
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.inp(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.norm(h.transpose(1, 2).reshape(1, -1, 8))
        h = torch.nn.functional.dropout(h, 0.5, self.training)
        h = h * torch.tensor(2.0) + torch.arange(8) + 1
        h[:, 0].add_(1)
        return self.out(h).split(4, -1)[0].square().mean()


def steps_of(net):
    """A step, and one over microbatches."""

    def loss_fn(params, x):
        return torch.func.functional_call(net, params, (x,))

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    def loop_step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    return step, loop_step


def make_state(make=lambda: dict(Net().named_parameters())):
    tx = zerofn.optim.chain(zerofn.optim.clip_by_global_norm(1.0), zerofn.optim.adamw(1e-3))
    return zerofn.shard(lambda: zerofn.TrainState.create(params=make(), tx=tx), stage=3)


def described(gm):
    """Every node in words: what it does to which nodes, and what comes out."""
    number = {node: k for k, node in enumerate(gm.graph.nodes)}

    def value(node):
        x = tensor_of(node)
        return (
            None
            if x is None
            else (tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset(), x.untyped_storage().nbytes())
        )

    return [
        (
            node.op,
            str(node.target) if node.op == "call_function" else "",
            value(node),
            str(torch.fx.node.map_arg((node.args, node.kwargs), number.__getitem__)),
        )
        for node in gm.graph.nodes
    ]


def test_zeros_of_forward_mode_differentiation_stay_immutable_zeros(monkeypatch):
    """Operations on one drop it, as torch's own capture records: a graph that computed with it might write over it."""
    net = Net().eval()

    def hvp(state, batch):
        def loss(p):
            return torch.func.functional_call(net, p, (batch,))

        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            v = {k: torch.ones_like(x) for k, x in state["p"].items()}
            return torch.func.jvp(torch.func.grad(loss), (state["p"],), (v,))[1]

    def zeros_used():
        graph = capture(hvp, {"p": params}, batch).gm.graph
        zeros = [n for n in graph.nodes if "_efficientzerotensor" in str(n.target)]
        return sorted(str(user.target) for n in zeros for user in n.users if user.op == "call_function")

    params, batch = {k: x.detach() for k, x in net.named_parameters()}, torch.randn(2, 3, 8)
    ours = zeros_used()
    monkeypatch.setattr(sys.modules["zerofn.capture.capture"], "Shortcut", Without)
    theirs = zeros_used()
    assert [x for x in ours if "detach" not in x] == [x for x in theirs if "detach" not in x]


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_the_graph_is_the_one_that_torch_records(which, num_ranks, monkeypatch):
    step = steps_of(zerofn.skeleton(Net))[which]
    with fake_ranks(num_ranks):
        state, batch = make_state(), torch.randn(2, 3, 8)
        captures = [capture(step, state, batch)]
        monkeypatch.setattr(sys.modules["zerofn.capture.capture"], "Shortcut", Without)
        captures.append(capture(step, state, batch))
    assert num_ranks == 1 or "zerofn.wait" in str(captures[0].gm.graph)
    ours, theirs = (program.gm for program in captures)
    assert len(ours.graph.nodes) < len(theirs.graph.nodes)  # without detaches
    for program in captures:
        for body in (program.gm, *program.gm.children()):
            canonicalize(body, context_of(program))
    for a, b in zip((ours, *ours.children()), (theirs, *theirs.children()), strict=True):
        assert described(a) == described(b)


def test_a_repeated_operation_is_not_shown_to_torch(monkeypatch):
    """On this version of torch the shortcut is taken."""
    seen = []
    original = shortcut._long_way
    monkeypatch.setattr(shortcut, "_long_way", lambda func, *rest: seen.append(str(func)) or original(func, *rest))
    capture(step_over, make_state(leaves(40)), torch.ones(16))
    assert len(seen) < 40


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")  # of the flags below
@pytest.mark.parametrize("which", [0, 1])
def test_the_second_capture_of_a_process_learns_nothing_and_has_the_same_graph(which, monkeypatch):
    """Ranks may have captured other steps before: names are the same, too."""
    step, state, batch = steps_of(zerofn.skeleton(Net))[which], make_state(), torch.randn(2, 3, 8)
    learned = []
    original = shortcut._learned
    monkeypatch.setattr(shortcut, "_learned", lambda call, *rest: learned.append(call.func) or original(call, *rest))

    def graphs():
        learned.clear()
        program = capture(step, state, batch)
        return [[str(node) for node in gm.graph.nodes] + described(gm) for gm in (program.gm, *program.gm.children())]

    with instead(shortcut.Learned()):
        first, num_learned = graphs(), len(learned)
        assert graphs() == first and not learned and num_learned > 20
        with torch.backends.mkldnn.flags(enabled=False):  # other kernels
            assert graphs() == first and len(learned) == num_learned


def test_what_captures_have_learned_is_bounded(monkeypatch):
    monkeypatch.setattr(shortcut.Learned, "MOST", 10)
    step, state = steps_of(zerofn.skeleton(Net))[0], make_state()
    with instead(shortcut.Learned()) as learned:
        for rows in (2, 3):
            capture(step, state, torch.randn(rows, 3, 8))
            assert 0 < len(learned.kinds) <= 10


def test_a_mode_around_a_capture_sees_every_operation():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    state = make_state(leaves(40))
    with Seen() as seen:
        capture(step_over, state, torch.ones(16))
    assert seen.names.count("aten.mul.Tensor") >= 80  # forwards and backwards


def leaves(num_leaves):
    return lambda: {f"layers.{k // 10}.w{k}": torch.randn(16) for k in range(num_leaves)}


def step_over(state, batch):
    """A loss that uses all leaves."""
    loss, grads = state.value_and_grad(lambda params, x: sum((p * x).sum() for p in params.values()))(batch)
    return state.apply_gradients(grads), {"loss": loss}


def calls_of(run):
    """How many functions a call of `run` calls, of Python and of C."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.whole
def test_the_work_of_a_capture_grows_as_the_leaves_do(stage):
    def capture_of(num_leaves):
        tx = zerofn.optim.chain(zerofn.optim.clip_by_global_norm(1.0), zerofn.optim.adamw(1e-3))
        init = lambda: zerofn.TrainState.create(params=leaves(num_leaves)(), tx=tx)  # noqa: E731
        zerofn.compile(step_over).lower(zerofn.shard(init, stage=stage), torch.ones(16))

    capture_of(20)  # what is found once a process
    some, twice = (calls_of(lambda n=n: capture_of(n)) for n in (150, 300))
    assert twice / some <= 2.3

"""Draws are functions of (key, position): eagerly, captured, and when a segment is recomputed."""

import math
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import zerofn
from zerofn import optim
from zerofn._torch_compat import OpOverload, compiling, make_fx, schema_arguments
from zerofn.random import draws, fold_in, key, randomness

KEY = key(0)


def capture(function, *args):
    with compiling():
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def drawn_nodes(gm):
    calls = [n for n in gm.graph.nodes if isinstance(n.target, OpOverload)]
    return [n for n in calls if "position" in (a.name for a in schema_arguments(n.target))]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def generators_are_left_alone():
    before = torch.get_rng_state()
    functions = (torch.get_rng_state, torch.set_rng_state, torch.manual_seed, torch.cuda.get_rng_state)
    yield
    assert torch.equal(torch.get_rng_state(), before)
    after = torch.get_rng_state, torch.set_rng_state, torch.manual_seed, torch.cuda.get_rng_state
    assert after == functions


# ---- keys


def splitmix64(seed, n):
    """Output `n` of the generator, as in its reference implementation, in numpy's 64-bit words."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed)
        for _ in range(n + 1):
            state += np.uint64(0x9E3779B97F4A7C15)
            z = state
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@pytest.mark.parametrize("data", [0, 1, 7])
def test_fold_in_is_a_splitmix64_stream(data):
    start = splitmix64(5, 0)
    expected = int(splitmix64(start, data).astype(np.int64))
    assert int(fold_in(torch.tensor(5), data)) == expected
    assert int(fold_in(torch.tensor(5), torch.tensor(data))) == expected


def test_folded_keys_differ():
    keys = {int(fold_in(fold_in(key(s), a), b)) for s in range(5) for a in range(9) for b in range(9)}
    assert len(keys) == 5 * 9 * 9
    assert int(fold_in(fold_in(KEY, 1), 2)) != int(fold_in(fold_in(KEY, 2), 1))


def test_a_folded_bit_changes_half_of_the_bits():
    flips = [int(fold_in(KEY, d)) ^ int(fold_in(KEY, d ^ (1 << b))) for d in range(20) for b in range(63)]
    mean = sum(bin(f % (1 << 64)).count("1") for f in flips) / len(flips)
    assert abs(mean - 32) < 0.5  # standard error 0.11


def test_fold_in_is_one_node():
    gm = capture(lambda k, d: fold_in(fold_in(k, d), 3), KEY, torch.tensor(2))
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert calls == ["zerofn.fold_in.default", "zerofn.fold_in.int"]
    assert torch.equal(gm(KEY, torch.tensor(9)), fold_in(fold_in(KEY, 9), 3))


@pytest.mark.parametrize("bad", [torch.tensor(1.0), torch.zeros(2, dtype=torch.int64), 3, "a"])
def test_a_wrong_key_is_named(bad):
    with pytest.raises(TypeError, match="int64 scalar tensor on the CPU, got"):
        fold_in(bad, 1)
    with pytest.raises(TypeError, match="int64 scalar tensor on the CPU, got"), randomness(bad):
        pass


# ---- every operation: the same twice, the same captured, one node a draw


def x():
    return torch.linspace(-1, 1, 60).reshape(6, 10)


def attention(p):
    q = torch.linspace(-1, 1, 48).reshape(1, 2, 6, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=p)


OPERATIONS = {
    "rand": lambda: torch.rand(3, 5),
    "rand float64": lambda: torch.rand(3, 5, dtype=torch.float64),
    "randn": lambda: torch.randn(40),
    "randn bf16": lambda: torch.randn(40, dtype=torch.bfloat16),
    "randn complex": lambda: torch.randn(40, dtype=torch.complex64),
    "randint": lambda: torch.randint(9, (40,)),
    "randint low": lambda: torch.randint(-5, 9, (40,), dtype=torch.int32),
    "randperm": lambda: torch.randperm(40),
    "rand_like": lambda: torch.rand_like(x()),
    "randn_like": lambda: torch.randn_like(x().t()),
    "randint_like": lambda: torch.randint_like(x(), 3, 9),
    "normal": lambda: torch.normal(1.0, 2.0, (40,)),
    "normal tensor": lambda: torch.normal(x(), 2.0),
    "normal std": lambda: torch.normal(1.0, x().abs()),
    "normal tensors": lambda: torch.normal(x(), x().abs()),
    "bernoulli": lambda: torch.bernoulli(x().abs()),
    "bernoulli p": lambda: torch.bernoulli(x(), 0.3),
    "bernoulli_": lambda: torch.empty(40).bernoulli_(0.3),
    "bernoulli_ bool": lambda: torch.empty(40, dtype=torch.bool).bernoulli_(0.3),
    "bernoulli_ tensor": lambda: torch.empty(6, 10).bernoulli_(x()[0].abs()),
    "normal_": lambda: torch.empty(40).normal_(1, 2),
    "uniform_": lambda: torch.empty(40).uniform_(-1, 2),
    "uniform_ strided": lambda: x().t()[::2].uniform_(),
    "random_": lambda: torch.empty(40).random_(),
    "random_ to": lambda: torch.empty(40).random_(7),
    "random_ from": lambda: torch.empty(40).random_(-7, 7),
    "exponential_": lambda: torch.empty(40).exponential_(2.0),
    "geometric_": lambda: torch.empty(40).geometric_(0.2),
    "log_normal_": lambda: torch.empty(40).log_normal_(),
    "cauchy_": lambda: torch.empty(40).cauchy_(),
    "multinomial": lambda: torch.multinomial(x().abs(), 4),
    "multinomial replacement": lambda: torch.multinomial(x().abs(), 4, replacement=True),
    "poisson": lambda: torch.poisson(x().abs() * 9),
    "gamma": lambda: torch.distributions.Gamma(2.0, 1.0, validate_args=False).sample((40,)),
    "dirichlet": lambda: torch.distributions.Dirichlet(x().abs() + 1, validate_args=False).sample(),
    "binomial": lambda: torch.binomial(torch.full((40,), 9.0), torch.full((40,), 0.4)),
    "dropout": lambda: F.dropout(x(), 0.3),
    "dropout_": lambda: F.dropout(x(), 0.3, inplace=True),
    "dropout1d": lambda: F.dropout1d(x(), 0.3),
    "alpha_dropout": lambda: F.alpha_dropout(x(), 0.3, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(x(), 0.3, training=True),
    "native_dropout": lambda: torch.native_dropout(x(), 0.3, True)[0],
    "rrelu": lambda: F.rrelu(x(), training=True),
    "rrelu_": lambda: F.rrelu(x(), training=True, inplace=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(x()),
    "attention": lambda: attention(0.3),
    "rand out": lambda: torch.rand(3, 5, out=torch.empty(3, 5)),
    "randint out": lambda: torch.randint(0, 9, (40,), out=torch.empty(40, dtype=torch.int64)),
}


def with_key(draw):
    def run(k):
        with randomness(k):
            return [draw(), torch.randn(3)]  # the second: the position moves the same way

    return run


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name):
    run = with_key(OPERATIONS[name])
    first = run(KEY)
    assert equal(first, run(KEY))
    other = run(key(1))
    assert first[0].shape == other[0].shape
    assert not torch.equal(first[0], other[0])
    gm = capture(run, KEY)
    assert equal(gm(KEY), first) and equal(gm(KEY), first)
    assert equal(gm(key(1)), other)
    assert len(drawn_nodes(gm)) == 2
    assert not [n for n in gm.graph.nodes if tagged_random(n)]


def tagged_random(node):
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@pytest.mark.parametrize("name", OPERATIONS)
def test_shape_dtype_and_strides_are_torchs(name):
    with randomness(KEY):
        mine = OPERATIONS[name]()
    with torch.random.fork_rng(devices=[]):
        theirs = OPERATIONS[name]()
    assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_rejection_sampling_draws_alike():  # a loop on data: eager only
    run = with_key(lambda: torch.nn.init.trunc_normal_(torch.empty(40)))
    assert equal(run(KEY), run(KEY)) and not torch.equal(run(KEY)[0], run(key(1))[0])


def test_positions_differ():
    with randomness(KEY):
        draws = torch.stack([torch.rand(8) for _ in range(50)])
    assert len(draws.unique()) > 390


def test_a_draw_does_not_depend_on_the_memory_format():
    image = torch.zeros(2, 3, 4, 5)
    with randomness(KEY):
        plain = torch.rand_like(image)
    with randomness(KEY):
        last = torch.rand_like(image.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)


def test_a_mask_is_not_shared_with_its_scaled_copy():
    def run(k):
        with randomness(k):
            mask = torch.empty(100).bernoulli_(0.5)
            copy = mask.clone()
            return mask.div_(0.5), copy

    for scaled, copy in (run(KEY), capture(run, KEY)(KEY)):
        assert torch.equal(scaled, copy * 2)


# ---- distributions

N = 40_000
MOMENTS = {  # draw -> mean, standard deviation
    "rand": (lambda: torch.rand(N), 0.5, math.sqrt(1 / 12)),
    "randn": (lambda: torch.randn(N), 0.0, 1.0),
    "normal": (lambda: torch.normal(torch.full((N,), 3.0), 2.0), 3.0, 2.0),
    "bernoulli": (lambda: torch.empty(N).bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    "bernoulli tensor": (lambda: torch.full((N,), 0.3).bernoulli(), 0.3, math.sqrt(0.21)),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1.0, 0.5),
    "native_dropout": (lambda: torch.native_dropout(torch.ones(N), 0.2, True)[0], 1.0, 0.5),
    "randint": (lambda: torch.randint(0, 10, (N,)), 4.5, math.sqrt(99 / 12)),
    "exponential": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.5),
    "geometric": (lambda: torch.empty(N).geometric_(0.2), 5.0, math.sqrt(0.8) / 0.2),
    "poisson": (lambda: torch.poisson(torch.full((N,), 4.0)), 4.0, 2.0),
    "rrelu": (lambda: F.rrelu(-torch.ones(N), training=True), -11 / 48, (1 / 3 - 1 / 8) / 12**0.5),
    # One number of each of many draws: the seeds, not one generator, must be spread evenly.
    "first of each draw": (lambda: torch.cat([torch.rand(1) for _ in range(2000)]), 0.5, 12**-0.5),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_deviation(name):
    draw, mean, deviation = MOMENTS[name]
    with randomness(key(11)):
        values = draw().double()
    error = deviation / math.sqrt(len(values))
    assert abs(values.mean() - mean) < 4.5 * error
    assert abs(values.std() - deviation) < 0.06 * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.bfloat16])
def test_coins_of_any_number(dtype):
    """They are drawn in parts, two to a word: none is left out or drawn twice."""
    part = draws._CHUNK

    def coins(n, p=0.3, position=0):
        return draws.fill("bernoulli", KEY, position, [n], [p], dtype, torch.device("cpu"))

    for n in (0, 1, 2, 7, part - 1, part, part + 1, 2 * part + 3):
        drawn = coins(n)
        assert drawn.shape == (n,) and drawn.dtype == dtype and torch.equal(drawn, coins(n))
        assert set(drawn.double().unique().tolist()) <= {0.0, 1.0}
    many = coins(6 * part + 1, position=1).double()
    deviation = 0.21 / math.sqrt(len(many))  # of the mean of products
    for apart in (1, 2, 3, part - 1, part, part + 1):
        product = (many[apart:] - 0.3) * (many[:-apart] - 0.3)
        assert abs(product.mean()) < 5 * deviation
    for p, wanted in ((0.0, 0.0), (2.0**-40, 0.0), (1 - 2.0**-40, 1.0), (1.0, 1.0)):
        assert torch.equal(coins(part + 5, p).double(), torch.full((part + 5,), wanted).double())
    for p in (-0.1, 1.1):
        with pytest.raises(RuntimeError, match="expects p to be in"):
            coins(8, p)


def test_rrelu_keeps_what_is_positive():
    with randomness(KEY):
        out = F.rrelu(x(), training=True)
    assert torch.equal(out[x() > 0], x()[x() > 0])
    slope = (out / x())[x() < 0]
    assert slope.min() >= 1 / 8 - 1e-6 and slope.max() <= 1 / 3 + 1e-6


def test_dropouts_derivative_is_its_mask():
    for dropout in (F.dropout, lambda v, p: torch.native_dropout(v, p, True)[0]):
        leaf = torch.full((50,), 3.0, requires_grad=True)
        with randomness(KEY):
            out = dropout(leaf, 0.4)
            (grad,) = torch.autograd.grad(out.sum(), leaf)
        torch.testing.assert_close(grad, out.detach() / 3.0)
        assert set(grad.mul(0.6).round().tolist()) == {0.0, 1.0}


# ---- without a key, and what cannot be drawn


def test_without_a_key_a_draw_says_where_and_what_to_write():
    with randomness(None), pytest.raises(RuntimeError) as error:
        F.dropout(x(), 0.5)
    assert "bernoulli_" in str(error.value) and "test_draws.py" in str(error.value)
    assert "state.value_and_grad(" in str(error.value) and "state.rng_at()" in str(error.value)


NOT_RANDOM = {
    "attention": lambda: attention(0.0),
    "dropout 0": lambda: F.dropout(x(), 0.0),
    "dropout eval": lambda: F.dropout(x(), 0.5, training=False),
    "native_dropout eval": lambda: torch.native_dropout(x(), 0.5, False)[0],
    "rrelu eval": lambda: F.rrelu(x(), training=False),
    "lstm": lambda: torch.func.functional_call(LSTM.eval(), {}, (x(),))[0].detach(),
}
with torch.random.fork_rng(devices=[]):
    LSTM = torch.nn.LSTM(10, 4, num_layers=2, dropout=0.5)


@pytest.mark.parametrize("name", NOT_RANDOM)
def test_what_is_not_random_needs_no_key(name):
    with randomness(None):
        out = NOT_RANDOM[name]()
    assert torch.equal(out, NOT_RANDOM[name]())


def test_recurrent_dropout_draws():
    run = with_key(lambda: LSTM.train()(x())[0].detach())
    assert equal(run(KEY), run(KEY)) and not torch.equal(run(KEY)[0], run(key(1))[0])


def test_a_generator_of_the_users_is_refused():
    with randomness(KEY), pytest.raises(RuntimeError, match="not part of the step"):
        torch.rand(3, generator=torch.Generator())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.bernoulli(x().abs(), out=torch.empty(6, 10)),
        lambda: torch.randint(0, 9, (40,), out=torch.empty(0, dtype=torch.int64)),
        lambda: torch.randint_like(x(), torch.tensor(5)),
    ],
)
def test_an_operation_without_a_pure_form_is_refused(draw):
    with randomness(KEY), pytest.raises(NotImplementedError, match="cannot draw from a key"):
        draw()


# ---- generator states


def test_a_state_holds_the_position():
    with randomness(KEY):
        torch.rand(2)
        state = torch.get_rng_state()
        first = torch.rand(4)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            assert torch.equal(torch.rand(4), first)
        second = torch.rand(4)
        torch.cuda.set_rng_state(state)  # a device's state is the same position
        assert torch.equal(torch.rand(4), first) and torch.equal(torch.rand(4), second)
    assert state.dtype == torch.uint8 and not torch.equal(first, second)


def test_manual_seed_repeats_draws_and_leaves_the_generator():
    with randomness(KEY):
        torch.manual_seed(3)
        first = torch.rand(4)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(4), first)


def test_a_state_from_outside_is_refused():
    outside = torch.get_rng_state()
    with randomness(KEY), pytest.raises(RuntimeError, match="only a state that get_rng_state"):
        torch.set_rng_state(outside)


def test_another_thread_keeps_its_generators():
    seen = []

    def look():
        seen.append(torch.get_rng_state())

    with randomness(KEY):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert torch.equal(seen[0], torch.get_rng_state())


def test_inner_randomness_wins_and_leaves_the_outer_position():
    with randomness(key(1)):
        inner = torch.rand(4)
    with randomness(KEY):
        plain = torch.rand(4), torch.rand(4)
    with randomness(KEY):
        before = torch.rand(4)
        with randomness(key(1)):
            assert torch.equal(torch.rand(4), inner)
        assert equal(plain, (before, torch.rand(4)))


# ---- under torch.func and in inference mode


def test_vmap():
    def run(k):
        with randomness(k):
            different = torch.func.vmap(lambda v: F.dropout(v, 0.5), randomness="different")(x())
            same = torch.func.vmap(lambda v: v + torch.rand(10), randomness="same")(x())
            return different, same - x()

    different, same = run(KEY)
    assert len({tuple(row) for row in (different != 0).tolist()}) == 6
    torch.testing.assert_close(same, same[:1].expand(6, 10))
    assert equal((different, same), run(KEY))
    assert equal((different, same), capture(run, KEY)(KEY))


def test_func_grad():
    def run(k):
        with randomness(k):
            return torch.func.grad(lambda v: (F.dropout(v, 0.5) * v).sum())(x())

    assert torch.equal(run(KEY), run(KEY)) and torch.equal(run(KEY), capture(run, KEY)(KEY))
    assert set((run(KEY) / x()).round().unique().tolist()) == {0.0, 4.0}


@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports
def test_a_function_the_user_compiles():
    compiled = torch.compile(lambda v: F.dropout(v, 0.5), backend="aot_eager")

    def run(k):
        with randomness(k):
            return compiled(x()), compiled(x())

    first, second = run(KEY)
    assert equal((first, second), run(KEY))
    assert not torch.equal(first, second) and not torch.equal(first, run(key(1))[0])


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_captured():
    q = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16)

    def run(k):
        with randomness(k):
            return flex_attention(F.dropout(q, 0.1), q, q)

    # Loose: the fused kernel's sums are in another order.
    with randomness(KEY):
        expected = F.scaled_dot_product_attention(F.dropout(q, 0.1), q, q)
    torch.testing.assert_close(capture(run, KEY)(KEY), expected)


def test_inference_mode_draws_alike():
    run = with_key(lambda: F.dropout(x(), 0.3) + attention(0.3).sum())
    with torch.inference_mode():
        inference = run(KEY)
    assert equal(inference, run(KEY))


# ---- recomputation


def gpt2(recompute):
    sizes = {"vocab_size": 64, "n_positions": 12, "n_embd": 16, "n_layer": 3, "n_head": 2}
    config = hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    assert config.attn_pdrop == config.embd_pdrop == config.resid_pdrop == 0.1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.GPT2LMHeadModel(config).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def gradients(model):
    """-> (key, ids, *parameters) -> [loss, *gradients], as value_and_grad takes them."""
    names = [n for n, _ in model.named_parameters()]

    def run(k, ids, *values):
        leaves = [v.detach().requires_grad_() for v in values]
        with torch.enable_grad(), randomness(k):
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
            params = dict(zip(names, leaves, strict=True))
            loss = torch.func.functional_call(model, params, kwargs=inputs).loss
            return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return run, [p.detach() for _, p in model.named_parameters()]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_recomputed_gpt2_drops_what_it_dropped():
    ids = torch.arange(24).reshape(2, 12) % 64
    plain, values = gradients(gpt2(recompute=False))
    recomputed, _ = gradients(gpt2(recompute=True))
    expected = plain(KEY, ids, *values)
    other = plain(key(1), ids, *values)
    assert not torch.equal(expected[0], other[0])
    assert equal(expected, plain(KEY, ids, *values))
    assert equal(expected, recomputed(KEY, ids, *values))
    graphs = [capture(f, KEY, ids, *values) for f in (plain, recomputed)]
    for graph in graphs:
        assert equal(expected, graph(KEY, ids, *values))
        assert equal(other, graph(key(1), ids, *values))
    # Dropped: the embeddings, and in each of 3 blocks attention, its projection and the MLP.
    num_draws, num_redrawn = (len(drawn_nodes(g)) for g in graphs)
    assert (num_draws, num_redrawn) == (10, 19)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_recomputation():
    def grad(call):
        leaf = x().requires_grad_()
        with randomness(KEY):
            out = call(lambda v: F.dropout(v * v, 0.5), F.dropout(leaf, 0.1))
            F.dropout(out, 0.2).sum().backward()
        return leaf.grad

    plain = grad(lambda f, v: f(v))
    assert torch.equal(plain, grad(lambda f, v: checkpoint(f, v, use_reentrant=True)))
    assert torch.equal(plain, grad(lambda f, v: checkpoint(f, v, use_reentrant=False)))


def test_recomputation_that_draws_nothing_needs_no_key():
    leaf = x().requires_grad_()
    with randomness(None):
        out = checkpoint(torch.sin, leaf, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(grad, x().cos())


def test_a_truncated_normal_is_one_draw_of_the_key():
    """Torch draws until all samples are accepted, which a captured step cannot."""

    def drawn():
        return torch.nn.init.trunc_normal_(torch.empty(50), 1.0, 2.0, 0.0, 1.5)

    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: (p["w"] * drawn() * drawn()).sum() + x.sum())(x)
        return state.apply_gradients(grads), grads["w"]

    state = zerofn.TrainState.create(params={"w": torch.ones(50)}, tx=optim.sgd(0.1))
    expected = step(state, torch.ones(2))[1].clone()
    assert torch.equal(zerofn.compile(step)(state, torch.ones(2))[1], expected)
    assert 0 <= expected.min() and expected.max() <= 1.5**2 and len(expected.unique()) > 40

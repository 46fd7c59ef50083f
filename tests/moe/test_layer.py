"""Layers over ranks beside a loop over tokens and experts in plain torch: one process, the global batch, float64."""

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, jvp

import zerofn
from tests.support.plain_moe import expert, make_params, plain_layer
from zerofn.moe import gumbel, jitter, layer, load_balance_loss, own
from zerofn.moe.draws import uniform
from zerofn.random import fold_in, key

WIDTH, TOKENS = 3, 7
EXPERTS = {1: 5, 2: 6, 3: 6, 4: 4}  # by the number of ranks
EXACT = {"rtol": 1e-12, "atol": 1e-14}
CASES = {
    "one expert": {"k": 1, "capacity": None},
    "one expert, random tokens": {"k": 1, "capacity": 0.75, "min_capacity": 1, "priority": "random"},
    "one expert of a sample": {"k": 1, "capacity": 1.5, "min_capacity": 1, "sample": "all"},
    "two experts, as GShard": {"k": 2, "min_capacity": 1, "sample": "others", "balance": "first"},
    "three experts, the most probable": {"k": 3, "capacity": 0.75, "min_capacity": 0, "priority": "probability"},
    "three experts, in order": {"k": 3, "capacity": 0.75, "min_capacity": 0, "priority": "position"},
    "residual, jitter, some tokens": {"k": 2, "capacity": None, "epsilon": 0.2, "residual": True, "some": True},
}


def tokens(rank):
    draw = torch.Generator().manual_seed(40 + rank)
    return torch.randn(2, TOKENS, WIDTH, generator=draw, dtype=torch.float64).unbind()


def used(rank):
    return torch.arange(TOKENS) % 3 != rank % 3


def loss_of(y, target, balance, z):
    return (y - target).square().mean() + 0.3 * balance + 0.1 * z


def options_of(case):
    options = dict(CASES[case])
    return options, options.pop("residual", False), options.pop("some", False)


def of_experts(f, params):
    return {**params, "experts": {name: f(x) for name, x in params["experts"].items()}}


def leaves(tree):
    """By path, without ZeroFn's trees."""
    if isinstance(tree, torch.Tensor):
        return {"": tree}
    return {f"{k}.{n}": x for k, v in tree.items() for n, x in leaves(v).items()}


def on_ranks(case):
    """This rank's part of everything: plain tensors under torch.func."""
    options, residual, some = options_of(case)
    rank, size = dist.get_rank(), dist.get_world_size()
    params = make_params(EXPERTS[size], WIDTH, residual=residual)
    tangents = make_params(EXPERTS[size], WIDTH, residual=residual, seed=8)
    x, target = tokens(rank)
    if some:
        options["used"] = used(rank)
    mine, moved = ({**p, "experts": own(p["experts"], "data")} for p in (params, tangents))

    def run(p):
        y, aux = layer(p, x, torch.vmap(over_rows), axis="data", key=key(5), **options)
        return loss_of(y, target, aux.balance, aux.z), (y, *aux)

    gradient = grad(run, has_aux=True)
    grads, products = jvp(lambda p: gradient(p)[0], (mine,), (moved,))
    loss, found = run(mine)
    return loss, found, leaves(grads), leaves(products)


def over_rows(p, rows):
    return torch.stack([expert(p, row) for row in rows.unbind()])


def plain(case, size):
    """The same by a loop, on the tokens of all ranks, whose groups share a capacity."""
    options, residual, some = options_of(case)
    params = make_params(EXPERTS[size], WIDTH, residual=residual)
    tangents = make_params(EXPERTS[size], WIDTH, residual=residual, seed=8)
    sample, epsilon = options.pop("sample", None), options.pop("epsilon", 0.0)

    def group(p, rank):
        x, target = tokens(rank)
        jittered, sampled, selected = (fold_in(fold_in(key(5), rank), use) for use in range(3))
        mine = dict(options)
        if epsilon:
            mine["into"] = jitter(x, jittered, epsilon)
        if sample:
            like = torch.empty(TOKENS, EXPERTS[size], dtype=torch.float64)
            mine |= {"noise": gumbel(like, sampled), "noisy_first": sample == "all"}
        if mine.get("priority") == "random":
            mine["priority"] = uniform(selected, torch.empty(mine["k"], TOKENS, dtype=torch.float64))
        if some:
            mine["used"] = used(rank)
        y, balance, z, counts, dropped = plain_layer(p, x, mine.pop("k"), **mine)
        return loss_of(y, target, balance, z), (y, balance, z, counts, dropped)

    def loss(p):
        return sum(group(p, rank)[0] for rank in range(size)) / size

    wanted = leaves(params)
    for x in wanted.values():
        x.requires_grad_()
    groups = [group(params, rank) for rank in range(size)]
    found = torch.autograd.grad(loss(params), list(wanted.values()), create_graph=True)
    along = sum((g * t).sum() for g, t in zip(found, leaves(tangents).values(), strict=True))
    products = torch.autograd.grad(along, list(wanted.values()))
    return groups, dict(zip(wanted, found, strict=True)), dict(zip(wanted, products, strict=True))


def over_ranks(parts, name, size):
    """The derivative of the loss of the global batch: means of whole leaves, and experts from their ranks."""
    mine = [part[name] for part in parts]
    return torch.cat(mine) / size if name.startswith("experts") else sum(mine) / size


def every_case():
    return {case: on_ranks(case) for case in CASES}


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_layers_are_those_of_a_loop_over_the_global_batch(ranks, size):
    found = ranks(size, every_case)
    for case in CASES:
        compare(case, size, [each[case] for each in found])


def compare(case, size, everything):
    groups, grads, products = plain(case, size)
    for (loss, (y, *aux)), (mine, (out, *told), *_) in zip(groups, everything, strict=True):
        torch.testing.assert_close(mine, loss.detach(), **EXACT, msg=f"{case}: loss")
        torch.testing.assert_close(out, y.detach(), **EXACT, msg=f"{case}: output")
        torch.testing.assert_close(told[0], aux[0].detach(), **EXACT)
        torch.testing.assert_close(told[1], aux[1].detach(), **EXACT)
        assert told[2].tolist() == aux[2] and told[3].item() == aux[3]
    for name, x in grads.items():
        ours = over_ranks([e[2] for e in everything], name, size)
        torch.testing.assert_close(ours, x.detach(), **EXACT, msg=f"{case}: gradient of {name}")
        assert x.abs().max() > 1e-4, f"{case}: {name}"
    for name, x in products.items():
        ours = over_ranks([e[3] for e in everything], name, size)
        torch.testing.assert_close(ours, x, **EXACT, msg=f"{case}: product for {name}")


def test_cases_drop_tokens():
    """With other cases than these, nothing would be compared of what is dropped."""
    dropped = {case: sum(group[1][4] for group in plain(case, 2)[0]) for case in CASES}
    assert {case for case, n in dropped.items() if n} == set(CASES) - {"one expert", "residual, jitter, some tokens"}


def per_sample(k):
    """Gradients of each row's loss by vmap, and one after the other."""
    size = dist.get_world_size()
    params = make_params(EXPERTS[size], WIDTH)
    mine = {**params, "experts": own(params["experts"], "data")}
    draw = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(4, TOKENS, WIDTH, generator=draw, dtype=torch.float64)

    def loss(p, x):
        y, aux = layer(p, x, torch.vmap(over_rows), k=k, capacity=0.75, min_capacity=1, axis="data")
        return y.square().sum() + aux.balance

    together = torch.vmap(grad(loss), in_dims=(None, 0))(mine, batch)
    for n, x in enumerate(batch):
        for name, value in leaves(grad(loss)(mine, x)).items():
            torch.testing.assert_close(leaves(together)[name][n], value, **EXACT)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_single_rows(ranks, size):
    for k in (1, 2):
        ranks(size, per_sample, k)


def balance_of_all():
    params = make_params(6, WIDTH)
    x, _ = tokens(dist.get_rank())

    def run(gate):
        return layer({**params, "gate": gate}, x, torch.vmap(over_rows), k=2, balance_axis="data")[1].balance

    return run(params["gate"]), grad(run)(params["gate"])


@pytest.mark.parametrize("size", [1, 3])
def test_the_balance_of_all_ranks_is_that_of_the_global_batch(ranks, size):
    x = torch.cat([tokens(rank)[0] for rank in range(size)])
    gate = make_params(6, WIDTH)["gate"].requires_grad_()
    expected = plain_layer({**make_params(6, WIDTH), "gate": gate}, x, 2)[1]
    (wanted,) = torch.autograd.grad(expected, gate)
    everything = ranks(size, balance_of_all)
    for found, _ in everything:
        torch.testing.assert_close(found, expected.detach(), **EXACT)
    torch.testing.assert_close(sum(g for _, g in everything) / size, wanted, **EXACT)


def test_rows_of_several_dims_keep_them():
    params, x = make_params(4, WIDTH), tokens(0)[0][:6]
    flat, aux = layer(params, x, torch.vmap(over_rows), k=2, used=torch.arange(6) > 1)
    y, same = layer(params, x.view(2, 3, WIDTH), torch.vmap(over_rows), k=2, used=(torch.arange(6) > 1).view(2, 3))
    assert torch.equal(y.view(6, WIDTH), flat) and torch.equal(aux.counts, same.counts) and aux.counts.sum() == 8


def test_half_precision_computes_in_it_and_gates_in_float32():
    params = zerofn.tree_map(lambda p: p.bfloat16(), make_params(4, WIDTH))
    x = tokens(0)[0].bfloat16()
    y, aux = layer(params, x, torch.vmap(over_rows), k=2)
    assert y.dtype == torch.bfloat16 and aux.balance.dtype == aux.z.dtype == torch.float32
    logits = x.float() @ params["gate"].float().t()
    assert torch.equal(aux.balance, load_balance_loss(logits, logits.topk(2).indices.t()))


def run(params=None, x=None, experts=None, **options):
    params = make_params(4, WIDTH) if params is None else params
    return layer(params, torch.ones(5, WIDTH).double() if x is None else x, experts or torch.vmap(over_rows), **options)


def without(name):
    return {k: v for k, v in make_params(4, WIDTH, residual=True).items() if k != name}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: run(without("gate")), r"expected 'gate' and 'experts'"),
        (lambda: run(without("mlp")), r"for residual experts 'mlp' and 'coefficient'"),
        (lambda: run({**make_params(4, WIDTH), "bias": 0}), r"params has \['bias', 'experts', 'gate'\]"),
        (
            lambda: run(x=torch.ones(5, 2).double()),
            r"the last dims of x \[..., d\] and params\['gate'\].* \[5, 2\] and \[4, 3\]",
        ),
        (lambda: run(of_experts(lambda x: x[:3], make_params(4, WIDTH))), r"'bias' has shape \[3, 4\], expected.*of 4"),
        (lambda: run(experts=lambda p, rows: rows[0]), r"returned \[4, 3\], expected \[4, 4, d\]"),
        (lambda: run(experts=lambda p, rows: None), r"returned NoneType"),
        (lambda: run(sample="some"), r"sample='some' is not known; expected one of None, 'all', 'others'"),
        (lambda: run(balance="last"), r"balance='last' is not known"),
        (lambda: run(k=5), r"k=5 experts for each token are more than the 4"),
        (lambda: run(capacity=0, min_capacity=0), r"drop all tokens"),
        (lambda: run(priority="rand"), r"priority='rand' is not known"),
        (lambda: run(epsilon=2.0), r"epsilon=2.0 must be at least 0"),
    ],
)
def test_mistakes_are_sentences(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def refused():
    """Before anything is sent: a rank alone raises, too."""
    if dist.get_rank() == 0:
        for num_experts, experts in ((5, 5), (6, 6)):
            params = make_params(num_experts, WIDTH)
            params["experts"] = {k: v[:experts] for k, v in params["experts"].items()}
            words = (
                "cannot divide 5 experts"
                if num_experts == 5
                else ("of 2, the number of experts on this rank; 3 ranks share 6")
            )
            with pytest.raises(ValueError, match=words):
                run(params, axis="data")


def test_experts_that_do_not_fit_the_ranks_are_refused(ranks):
    ranks(3, refused)

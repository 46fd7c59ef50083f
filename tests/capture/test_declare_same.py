import torch

import zerofn
from tests.support.small_steps import batch_of, build, captured, fake_ranks, loss_of, state_of
from zerofn import tree
from zerofn.capture.declare_same import declare_same

ops = torch.ops.zerofn
MODULE = build(2)


def step(state, batch):
    def loss_fn(params, batch):
        return loss_of(MODULE)(params, batch) * batch["n"]

    loss, grads = zerofn.accumulate(state.value_and_grad(lambda p, b: loss_fn(p, {**b, "n": batch["n"]})), 2)(
        {"x": batch["x"], "y": batch["y"]}
    )
    return state.apply_gradients(tree.tree_map(lambda g: g * batch["n"], grads)), loss


def test_every_user_reads_the_checked_value_and_the_check_comes_first():
    with fake_ranks(3):
        program = captured(step, state_of(MODULE, 3), {**batch_of(), "n": torch.tensor(2.0)})
        entry = next(x for x, name in zip(program.batch_placeholders, program.batch.names, strict=True) if name == "n")
        users = list(entry.users)
        declare_same(program, entry, "batch entry 'n'")
    program.gm.graph.lint()
    calls = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    digest, start, wait, check = calls[:4]
    assert [x.target for x in calls[:4]] == [
        ops.digest.default,
        ops.all_gather.default,
        ops.wait.default,
        ops.check_same.default,
    ]
    assert check.args == (entry, wait, "batch entry 'n'", "data") and start.args[:2] == (digest, 3)
    assert set(entry.users) == {digest, check}
    assert len(users) > 1 and set(users) <= set(check.users)  # the loop is one of them

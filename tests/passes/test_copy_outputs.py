import dataclasses

import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn import tree


def test_what_an_evaluation_returns_outlives_the_state():
    module = build(2)
    state = state_of(module, 3)

    def evaluate(state, batch):
        return zerofn.gather(state.params), batch["x"], batch["x"].sum()

    batch = batch_of()
    full, same, _ = zerofn.compile(evaluate)(state, batch)
    batch["x"].fill_(0.0)
    zerofn.compile(train_step_of(module))(state, batch_of())
    assert all(torch.equal(full[k], p) for k, p in module.named_parameters())
    assert torch.equal(same, batch_of()["x"])


def test_a_state_that_was_kept_is_not_written_with_the_next():
    module = build(2)
    state = state_of(module, 3, extra={"kept": torch.arange(64.0)})

    def touch(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return dataclasses.replace(new, extra={"kept": state.extra["kept"] + 1}), aux

    kept, _ = zerofn.compile(train_step_of(module), donate=False)(state, batch_of())
    before = [x.clone() for x in tree.leaves(state)]
    zerofn.compile(touch)(kept, batch_of())
    assert_same_trees(tree.leaves(state), before)


def test_entries_of_the_new_state_share_nothing_with_each_other_or_the_rest():
    def step(state, batch):
        new = state["params"] * batch["x"].mean()
        return {"params": new, "same": new.view(-1)}, {"rest": new[1:], "own": new.sum(), "twice": new.sum()}

    state = {"params": torch.ones(16), "same": torch.ones(16)}
    new, aux = zerofn.compile(step, donate=False)(state, batch_of())
    assert torch.equal(new["params"], new["same"]) and torch.equal(new["params"][1:], aux["rest"])
    memory = [x.untyped_storage().data_ptr() for x in tree.leaves((new, aux))]
    assert len(set(memory)) == len(memory)

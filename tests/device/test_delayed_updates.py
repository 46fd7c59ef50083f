"""Host updates that are late: whatever is called right after a step sees the whole update.

The host updates state on a thread of its own while the step returns. Here each of its jobs first sleeps for a
random time, and every public entry that reads a state comes next.
"""

import copy
import random
import time

import pytest
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import apart, batch_of, build, loss_of, state_of, train_step_of
from zerofn import Offload, tree
from zerofn.offload.host_worker import HostWorker

MODULE = build(3)
STEP = train_step_of(MODULE)
TIERS = {
    "optimizer": lambda folder: {"offload": Offload("cpu")},
    "optimizer, bf16": lambda folder: {"offload": Offload("cpu"), "precision": "bf16"},
    "parameters": lambda folder: {"offload": Offload(optimizer="cpu", params="cpu")},
}


def evaluate(state, batch):
    return {"loss": loss_of(MODULE)(zerofn.gather(state.params), batch)}


def shifted(state, batch):
    """Another step on the same state."""
    return state.replace(params=tree.tree_map(lambda p: p + 1, state.params)), {"sum": zerofn.global_norm(state.params)}


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def loaded(state, folder):
    zerofn.save(folder, state)
    return zerofn.unshard(zerofn.load(folder, state))


# Each returns what it reads of the state that a step has just returned. `kept`: steps that were captured before.
ENTRIES = {
    "compiled evaluation": lambda state, kept, folder: kept["evaluate"](state, batch_of()),
    "eager evaluation": lambda state, kept, folder: evaluate(state, batch_of()),
    "another compiled step": lambda state, kept, folder: zerofn.unshard(kept["shifted"](state, batch_of())[0].params),
    "gather": lambda state, kept, folder: zerofn.gather(state.params),
    "unshard": lambda state, kept, folder: zerofn.unshard(state),
    "tree_map": lambda state, kept, folder: zerofn.unshard(tree.tree_map(lambda p: p * 2, state.params)),
    "leaves": lambda state, kept, folder: [x.clone() for x in tree.leaves(state)],
    "shards": lambda state, kept, folder: [x.clone() for x in state.params.shards],
    "a leaf": lambda state, kept, folder: state.params["0.weight"].local.clone(),
    "norm": lambda state, kept, folder: zerofn.global_norm(state.params),
    "norms": lambda state, kept, folder: zerofn.leaf_norms(state.params),
    "finite": lambda state, kept, folder: zerofn.all_finite(state.params),
    "eager step": lambda state, kept, folder: zerofn.unshard(STEP(state, batch_of(rank()))[0]),
    "copy": lambda state, kept, folder: zerofn.unshard(copy.deepcopy(state)),
    "save": lambda state, kept, folder: loaded(state, folder),
    "same step": lambda state, kept, folder: zerofn.unshard(kept["train"](state, batch_of(rank(), seed=8))[0]),
    "learning rate": lambda state, kept, folder: [state.step.clone(), state.skipped.clone(), state.rng_at()],
}


# Of entries that call another compiled step: which one, and it has run on the state before.
OTHERS = {"compiled evaluation": "evaluate", "another compiled step": "shifted"}


def after_steps(entry, tier, stage, folder, delayed):
    """What an entry reads after each of two steps."""
    found, draw = [], random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        if delayed:
            apart(patch, 1.0)
            call = HostWorker._call

            def late(*args):
                time.sleep(draw.choice([0.0, 0.002, 0.01]))
                return call(*args)

            patch.setattr(HostWorker, "_call", late)
        options = TIERS[tier](folder) if delayed else {k: v for k, v in TIERS[tier](folder).items() if k == "precision"}
        kept = {name: zerofn.compile(f, donate=False) for name, f in (("evaluate", evaluate), ("shifted", shifted))}
        kept["train"] = zerofn.compile(STEP)
        for k in range(2):
            state = state_of(MODULE, stage, **options)
            if entry in OTHERS:
                kept[OTHERS[entry]](state, batch_of())
            for j in range(k + 2):
                state, _ = kept["train"](state, batch_of(rank(), seed=j))
            found += [x.clone() for x in tree.leaves(ENTRIES[entry](state, kept, folder))]
    return found


MOST = ("compiled evaluation", "another compiled step", "gather", "unshard", "save")


@pytest.mark.part(tier=["optimizer"], entry=["compiled evaluation", "unshard", "save"])
@pytest.mark.parametrize(
    ("entry", "tier"),
    [(entry, "optimizer") for entry in ENTRIES]
    + [(entry, tier) for entry in MOST for tier in TIERS if tier != "optimizer"],
)
def test_every_entry_waits_for_late_updates(tmp_path, entry, tier):
    late, plain = (after_steps(entry, tier, 3, tmp_path / str(d), d) for d in (True, False))
    assert_same_trees(late, plain)


def on_ranks(entry, stage, folder):
    return [after_steps(entry, "optimizer", stage, folder / f"{d}", d) for d in (True, False)]


@pytest.mark.part(stage=[1], entry=MOST[:1])
@pytest.mark.parametrize(("entry", "stage"), [(MOST[0], 1), (MOST[0], 2), (MOST[1], 1), (MOST[2], 2), (MOST[3], 1)])
def test_every_entry_waits_on_ranks(ranks, tmp_path, entry, stage):
    for late, plain in ranks(2, on_ranks, entry, stage, tmp_path):
        assert_same_trees(late, plain)

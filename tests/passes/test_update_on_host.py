"""State in host memory is updated by the host, by the device it is streamed to, or some of it by each."""

import pytest
import torch

from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    ROWS,
    apart,
    batch_of,
    build,
    fake_ranks,
    scheduled,
    state_of,
    train_step_of,
    trained,
)
from zerofn import Offload, optim
from zerofn.graph.node_kinds import ASIDE

ops = torch.ops.zerofn
NUM_LAYERS = 4
TX = optim.adamw(1e-2, weight_decay=0.1)


def graph_of(share, offload):
    with pytest.MonkeyPatch.context() as patch, fake_ranks(2):
        apart(patch, share)
        state = state_of(build(NUM_LAYERS), 3, TX, offload=offload)
        return scheduled(train_step_of(build(NUM_LAYERS)), state, batch_of(), donating=True).gm


def rules(gm):
    return [n for n in gm.graph.nodes if n.target is ops.adamw_.default]


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_the_host_updates_its_share(share, number):
    gm = graph_of(share, Offload(optimizer="cpu"))
    assert len(rules(gm)) == NUM_LAYERS
    assert sum(bool(n.meta.get(ASIDE)) for n in rules(gm)) == number


def moments(gm):
    """The nodes that updates take the moments from."""
    return [
        x for rule in rules(gm) for parts in rule.args[2] for x in ([parts] if not isinstance(parts, list) else parts)
    ]


def test_what_the_host_updates_is_not_moved():
    on_host, on_device = (graph_of(share, Offload(optimizer="cpu")) for share in (1.0, 0.0))
    assert {x.op for x in moments(on_host)} == {"placeholder"}
    assert "placeholder" not in {x.op for x in moments(on_device)}


def test_state_beside_the_model_is_left_alone():
    gm = graph_of(1.0, None)
    assert not any(n.meta.get(ASIDE) or n.target is ops.bring.default for n in gm.graph.nodes)


@pytest.mark.part(tiers=[{"optimizer": "cpu", "params": "cpu"}])
@pytest.mark.parametrize("tiers", [{"optimizer": "cpu"}, {"optimizer": "cpu", "params": "cpu"}])
def test_every_share_has_the_bits_of_memory(monkeypatch, tiers):
    _, expected = trained(NUM_LAYERS, ROWS, TX, 3)
    for share in (0.0, 0.5, 1.0):
        apart(monkeypatch, share)
        _, found = trained(NUM_LAYERS, ROWS, TX, 3, offload=Offload(**tiers))
        assert_same_trees(found, expected, f"{share=}")

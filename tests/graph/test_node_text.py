import torch

import zerofn
from tests.support.small_steps import build, captured, fake_ranks, state_of
from zerofn import tree
from zerofn.graph.node_text import text_of, written

TABLE = torch.tensor([1.0, 2.0])


def test_numbers_dtypes_and_constants_are_written_and_tensors_by_their_place():
    def step(state, batch):
        return state, (batch["x"] * 3.5).sum(0, dtype=torch.float64), torch.add(state, TABLE, alpha=2)

    program = captured(lambda s, b: {"y": step(s, b)[1:]}, torch.ones(2), {"x": torch.ones(3, 2)})
    texts = [x.text() for node, x in written(program).items() if node.op == "call_function"]
    assert texts[:3] == [
        "aten.mul.Tensor(self=x0, other=3.5)",
        "aten.sum.dim_IntList(self=x0, dim=[0], dtype=torch.float64)",
        "aten.add.Tensor(self=x0, other=x1, alpha=2)",
    ]
    (constant,) = [text_of(node) for node in program.gm.graph.nodes if node.op == "get_attr"]
    assert constant.startswith("a constant [2] float32 (checksum ")
    shown = [text_of(node) for node in program.gm.graph.nodes if node.op == "call_function"]
    assert shown[2] == "aten.add.Tensor(x, x, alpha=2)"


def test_ranks_write_alike_what_only_the_lengths_of_their_shards_tell_apart():
    def texts(rank):
        with fake_ranks(3, rank):
            state = state_of(build(2), 3)
            program = captured(
                lambda s, b: {"n": tree.tree_map(lambda p: p + p.new_full(p.shape, 2.0), s.params)}, state, {}
            )
            return [x.text() for x in written(program).values()]

    assert texts(0) == texts(2)
    assert any("size=[length]" in text for text in texts(0))


def test_a_dim_is_no_length_of_a_shard():
    with fake_ranks(3, 0):
        state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=zerofn.optim.sgd(0.1)), stage=3)
        program = captured(lambda s, b: {"n": b["x"].amax([1]), "p": s.params}, state, {"x": torch.ones(2, 2)})
        assert any("dim=[1]" in x.text() for x in written(program).values())

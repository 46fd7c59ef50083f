"""`zerofn inspect`, `verify`, `diff` and `convert`, as a person calls them; what `diff` finds, against numpy."""

import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zerofn
from tests.checkpoint.test_bad_checkpoints import edit_manifest
from tests.support.checkpoint_states import train_state
from tests.support.small_steps import build, state_of
from zerofn.checkpoint.reports import differences
from zerofn.cli import main


def saved(path, seed, stage):
    zerofn.save(path, zerofn.shard(train_state(seed), stage=stage))


def test_a_checkpoint_on_a_page(ranks, tmp_path, capsys):
    ranks(3, saved, tmp_path / "a", 7, 3)
    assert main(["inspect", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^saved +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d by .* on ", printed, re.M)
    assert re.search(rf"^with +zerofn {zerofn.__version__}, torch {re.escape(torch.__version__)}$", printed, re.M)
    assert re.search(r"^ranks +3; 3 files, [\d.]+ MB$", printed, re.M)
    assert re.search(r"^  params +stage 3, 7 leaves, [\d,]+ elements of float32, int64$", printed, re.M)
    assert re.search(r"^  replicated +\d+ leaves, \d+ elements of ", printed, re.M)


def test_tiers_are_said(tmp_path, capsys):
    state = state_of(build(2), 3, offload=zerofn.Offload("nvme", path=tmp_path))
    zerofn.save(tmp_path / "a", state)
    main(["inspect", str(tmp_path / "a")])
    assert re.search(r"^  opt_state.*, as float32, on nvme$", capsys.readouterr().out, re.M)


def test_a_run(tmp_path, capsys):
    checkpoints = zerofn.Checkpoints(tmp_path, every=1, signals=())
    state = checkpoints.restore_or({"w": torch.zeros(3)})
    for k in range(3):
        checkpoints.after_step(state, {"loss": 1 / (k + 1)})
    checkpoints.close()
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x.split()[0] for x in lines] == [f"step-0000000{k}" for k in (1, 2, 3)] and lines[2].endswith(
        "loss 0.333333"
    )
    assert all("  1 rank  " in line for line in lines)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("every bit is as saved") == 3
    (file,) = checkpoints.path(2).glob("rank*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("every bit is as saved") == 2 and "is damaged: the bytes of 'w'" in printed


def test_no_difference_whatever_the_ranks_and_stages(ranks, tmp_path, capsys):
    ranks(2, saved, tmp_path / "a", 7, 3)
    ranks(3, saved, tmp_path / "b", 7, 1)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "no leaf differs\n"


def test_differences(tmp_path, capsys):
    nan = torch.tensor([float("nan"), 0.0, 1.0])
    zerofn.save(
        tmp_path / "a", {"x": torch.arange(300_000.0), "n": nan, "s": torch.ones(2), "only": 1, "d": torch.ones(4)}
    )
    y = torch.arange(300_000.0)
    y[[3, 299_999]] += torch.tensor([0.5, 2.0])
    other = {"x": y, "n": torch.tensor([float("nan"), -0.0, 1.0]), "s": torch.ones(3), "d": torch.ones(4).bfloat16()}
    zerofn.save(tmp_path / "b", other)
    assert [str(x) for x in differences(tmp_path / "a", tmp_path / "b")] == [
        "d: F32 and BF16",
        "n: 1 of 3 elements differ, by at most 0",
        f"only: only in {tmp_path / 'a'}",
        "s: shape [2] and [3]",
        "x: 2 of 300,000 elements differ, by at most 2",
    ]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.endswith("5 leaves differ\n")


def test_convert(tmp_path, capsys):
    zerofn.save(tmp_path / "a", train_state(7))
    out = str(tmp_path / "w.safetensors")
    assert main(["convert", str(tmp_path / "a"), out, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    weights = load_file(out)
    assert torch.equal(weights["h.0.w"], train_state(7).params["h.0.w"].bfloat16())


@pytest.mark.parametrize("command", [["inspect"], ["diff", "b"], ["convert", "b"]])
def test_commands_say_that_a_path_is_not_there(tmp_path, capsys, command):
    assert main([command[0], str(tmp_path / "a"), *(str(tmp_path / x) for x in command[1:])]) == 1
    assert f"zerofn {command[0]}: {tmp_path / 'a'} does not exist" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "a")]) == 1


def loaded_in_part(path, stage):
    """Parameters from the checkpoint, with new names; moments and step from `like`."""
    like = zerofn.shard(train_state(8, extra="other"), stage=stage)
    names = {"params.h.1.w": "params.h.1.w"}
    state = zerofn.load(path, like=like, only="params", rename=lambda n: names.get(n, n))
    right, kept = train_state(7), train_state(8, extra="other")
    found = zerofn.unshard(state)
    assert all(torch.equal(found.params[k], right.params[k]) for k in right.params)
    assert all(
        torch.equal(a, b) for a, b in zip(*(zerofn.tree.leaves(x.opt_state) for x in (found, kept)), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(*(zerofn.tree.leaves(x.extra) for x in (found, kept)), strict=True))
    return dist.get_rank()


@pytest.mark.parametrize("size, stage", [(1, 0), (2, 3), (3, 1)])
def test_a_part_of_a_state(ranks, tmp_path, size, stage):
    zerofn.save(tmp_path / "a", train_state(7))
    ranks(size, loaded_in_part, tmp_path / "a", stage)


def test_names_of_another_model(tmp_path):
    zerofn.save(tmp_path / "a", {"model": {"a.w": torch.arange(3.0), "head": torch.ones(2)}, "step": 5})
    like = {"params": {"b.w": torch.zeros(3)}, "step": 0}
    names = {"model.a.w": "params.b.w", "step": "step"}
    found = zerofn.load(tmp_path / "a", like=like, rename=names.get)
    assert torch.equal(found["params"]["b.w"], torch.arange(3.0)) and found["step"] == 5
    found = zerofn.load(tmp_path / "a", like=like, only="params", rename=names.get)
    assert found["step"] == 0
    with pytest.raises(ValueError, match="'model.a.w' and 'model.head' would both get the name 'params.b.w'"):
        zerofn.load(tmp_path / "a", like=like, rename=lambda n: "params.b.w")
    with pytest.raises(ValueError, match="only='param' selects no leaf: `like` has no leaf 'param'"):
        zerofn.load(tmp_path / "a", like=like, only="param")
    with pytest.raises(zerofn.CheckpointError, match="has no leaf 'params.b.w'"):
        zerofn.load(tmp_path / "a", like=like, only="params")


def test_a_donated_state_keeps_nothing(tmp_path):
    state = state_of(build(2), 0)
    zerofn.save(tmp_path / "a", state)

    @zerofn.compile
    def step(state, batch):
        return state.replace(params=zerofn.tree_map(lambda p: p * batch, state.params)), None

    new, _ = step(state, torch.tensor(2.0))
    zerofn.load(tmp_path / "a", like=state)
    with pytest.raises(ValueError, match="keeps its values, but this state was donated to a step"):
        zerofn.load(tmp_path / "a", like=state, only="params")
    zerofn.load(tmp_path / "a", like=new, only="params")


def test_what_a_checkpoint_holds_does_not_steer_a_terminal(tmp_path, capsys):
    """Names and texts are those of whoever wrote the files."""
    evil = "\x1b]0;owned\x07\x1b[2Jdown\u202eloaded\nstep 9\x9b"
    for name, value in (("a", 1.0), ("b", 2.0)):
        zerofn.save(tmp_path / name, {"params": {evil: torch.full((3,), value)}})
        edit_manifest(tmp_path / name, lambda data: data["saved"].update(program=evil, host=evil, time=evil))
        edit_manifest(tmp_path / name, lambda data: data.update(notes={"metrics": {evil: 1.0}}, versions={evil: evil}))
    assert main(["inspect", str(tmp_path / "a")]) == 0
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / evil)]) == 1
    found = capsys.readouterr()
    printed = found.out + found.err
    assert printed.replace("\n", "").isprintable() and "\\x1b]0;owned\\x07\\x1b[2J" in printed
    assert not any(line.startswith("step 9") for line in found.out.splitlines())

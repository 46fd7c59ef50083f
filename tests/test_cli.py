"""The command line, as a user has it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerofn
from zerofn.cli import main
from zerofn.cost.machine import machine_of

SCRIPT = """
import sys

import torch

import zerofn
from zerofn import optim

width, name = int(sys.argv[1]), "unknown"
module = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def init_state():
    return zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.adamw(1e-3))


def loss_fn(params, batch):
    return torch.func.functional_call(module, params, (batch,)).square().mean()


def train_step(state, batch):
    loss, grads = state.value_and_grad(loss_fn)(batch)
    return state.apply_gradients(grads), {"loss": loss}


def evaluate(params, batch):
    return loss_fn(zerofn.gather(params), batch)


state = zerofn.shard(init_state, precision="bf16")
step, evaluate = map(zerofn.compile, (train_step, evaluate))
print("the script says", int(state.step), 1 / evaluate(state.params, torch.ones(4, width)).item())
for _ in range(1000):
    state, metrics = step(state, torch.ones(8, width))
    print(metrics["loss"].item())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"zerofn {zerofn.__version__}, torch {torch.__version__}\n"


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: zerofn ") and "plan memory and time of a script's training step" in out


@pytest.mark.parametrize("function", ["", ":train_step"])
def test_a_scripts_step_is_planned(script, tmp_path, capsys, function):
    status = main(["plan", f"{script}{function}", "--world", "4", "--machine", "A100-8", "--stage", "0", "3",
                   "--wire", "bf16", "--offload", "none",
                   "--json", str(tmp_path / "plan.json"), "--", "64"])  # fmt: skip
    out, err = capsys.readouterr()
    assert status == 0
    assert "the script says 0 1.0" in err and "the script" not in out
    assert "train_step on 4 ranks of A100-8" in out and "state = zerofn.shard(init_state, " in out
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    found = [(row["stage"], row["precision"], row["wire"], row["rows"]) for row in rows]
    assert found == [(0, "bf16", "bf16", 8), (3, "bf16", "bf16", 8)] and ", wire='bf16'" in out


@pytest.mark.parametrize("wire", ["wire='int8'", "precision=zerofn.Precision(wire='int8')"])
@pytest.mark.parametrize(("asked", "found"), [((), ["int8"]), (("--wire", "none", "fp8"), [None, "fp8"])], ids=str)
def test_a_script_with_a_wire_of_its_own_is_planned_with_it_or_with_others(script, tmp_path, wire, asked, found):
    script.write_text(SCRIPT.replace('precision="bf16"', wire))
    arguments = ("--world", "2", "--stage", "3", "--offload", "none", "--precision", "none")
    assert main(["plan", str(script), *arguments, *asked, "--json", str(tmp_path / "plan.json"), "--", "64"]) == 0
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert [row["wire"] for row in rows] == found


def test_what_a_run_has_saved_is_left_alone(script, tmp_path, capsys):
    """The plan is of the model as it is written, which may be another one now."""
    saved = zerofn.Checkpoints(tmp_path / "run", every=1, signals=())
    state = saved.restore_or({"params": zerofn.shard({"params": {"w": torch.ones(3)}})["params"]})
    saved.after_step(state)
    saved.close()
    again = f"state = zerofn.Checkpoints({str(tmp_path / 'run')!r}).restore_or(state)\nstep, evaluate ="
    script.write_text(script.read_text().replace("step, evaluate =", again))
    chosen = ["--stage", "3", "--offload", "none", "--machine", "A100-8"]
    assert main(["plan", str(script), *chosen, "--", "64"]) == 0
    assert "train_step on 8 ranks of A100-8" in capsys.readouterr().out and saved.steps() == [1]


def test_a_script_that_shards_two_states(script, capsys, tmp_path):
    """It is planned for the one that the step is given."""
    text = script.read_text().replace(
        "step, evaluate =",
        """

def other_init():
    other = torch.nn.Linear(width, 7)
    return zerofn.TrainState.create(params=dict(other.named_parameters()), tx=optim.sgd(1e-3))


other = zerofn.shard(other_init)
step, evaluate =""",
    )
    script.write_text(text)
    found = []
    for name in ("", ":train_step"):
        chosen = ["--stage", "3", "--offload", "none", "--machine", "A100-8"]
        assert main(["plan", f"{script}{name}", *chosen, "--", "64"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and "precision='bf16'" in found[0]


ON_A_MESH = """
mesh = zerofn.Mesh.make(data=-1, tensor=2)
cut = zerofn.skeleton(lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
cuts = zerofn.parallel.tensor(cut, mesh, {"0": "colwise", "2": "rowwise"})
module = cut  # what the loss computes with
state = zerofn.shard(init_state, precision="bf16", mesh=mesh, cuts=cuts)
"""


def test_a_script_whose_replicas_train_apart_is_planned(script, tmp_path, capsys):
    begun, shard = "mesh = zerofn.Mesh.make(replicate=2, data=-1)", 'zerofn.shard(init_state, precision="bf16"'
    text = SCRIPT.replace(f"state = {shard})", f"{begun}; state = {shard}, mesh=mesh)")
    text = text.replace("step, evaluate = map(", "rounds = zerofn.diloco(train_step, every=10)\nstep, evaluate = map(")
    text = text.replace("(train_step, evaluate))", "(rounds, evaluate))")
    text = text.replace("for _ in range(1000):", "state = rounds.init(state)\nfor _ in range(1000):")
    script.write_text(text.replace("int(state.step)", "0"))
    given = ["--json", str(tmp_path / "plan.json"), "--machine", "4090", "--world", "4", "--", "512"]
    for name in ("", ":train_step"):
        assert main(["plan", f"{script}{name}", *given]) == 0
        assert "replicas meet every 10 steps: " in capsys.readouterr().out
    best = json.loads((tmp_path / "plan.json").read_text())["rows"][0]
    assert best["mesh"] == {"replicate": 2, "data": 2} and best["rounds"]["between"] > 0


def test_a_script_gets_the_mesh_that_is_planned(script, tmp_path, capsys):
    """Its own, where none is named; axes that it asks for are there."""
    text = script.read_text().replace('state = zerofn.shard(init_state, precision="bf16")\n', ON_A_MESH)
    text = text.replace('width, name = int(sys.argv[1]), "unknown"\nmodule =', "width = int(sys.argv[1])\nwhole =")
    script.write_text(text.replace("dict(module.", "dict(whole."))
    chosen = ["--stage", "3", "--offload", "none", "--machine", "A100-8", "--json", str(tmp_path / "plan.json")]
    for more, sizes in (
        ([], {"data": 4, "tensor": 2}),
        (["--world", "4"], {"data": 2, "tensor": 2}),
        (["--mesh", "replicate=2,data=2,tensor=4"], {"replicate": 2, "data": 2, "tensor": 4}),
        (["--mesh", "data=8"], {"data": 8}),
    ):
        assert main(["plan", str(script), *chosen, *more, "--", "64"]) == 0
        found = json.loads((tmp_path / "plan.json").read_text())
        (row,) = found["rows"]
        assert row["mesh"] == sizes and row["precision"] == "bf16" and row["rows"] == 8
        assert set(sizes) <= set(" x ".join(row["plan"]["sent"]).split(" x "))
    capsys.readouterr()
    assert main(["plan", str(script), *chosen, "--mesh", "auto", "--machine", "2 x A100", "--", "64"]) == 0
    out = capsys.readouterr().out
    assert "train_step on 2 ranks of 2 x A100" in out and "bf16" in out and "left out: tensor 2" in out


def test_the_example_is_planned_on_other_meshes(capsys):
    """It lowers its step before it calls it, and says of some meshes that it does not take them."""
    example = str(Path(__file__).parents[1] / "examples" / "mesh.py")
    chosen = ["--machine", "A100-8", "--stage", "3", "--offload", "none", "--remat", "none", "--precision", "none"]
    assert main(["plan", example, *chosen, "--mesh", "data=2,tensor=2"]) == 0
    assert "data=2,tensor=2" in capsys.readouterr().out
    assert main(["plan", example, *chosen, "--mesh", "data=2,tensor=2", "--", "--batch", "3"]) == 1
    assert "--batch 3 is not divisible by the 2 ranks with different rows" in capsys.readouterr().err


def test_a_script_with_state_over_all_ranks(script, capsys):
    options = 'precision="bf16", mesh=zerofn.Mesh.make(replicate=2, data=-1), hpz=True'
    script.write_text(
        script.read_text().replace('zerofn.shard(init_state, precision="bf16")', f"zerofn.shard(init_state, {options})")
    )
    chosen = ["--offload", "none", "--machine", "A100-8", "--wide"]
    assert main(["plan", str(script), *chosen, "--", "64"]) == 0
    out = capsys.readouterr().out
    assert "hpz=True, mesh=zerofn.Mesh.make(replicate=2, data=4)" in out and "stage=3" in out and "stage=1" not in out
    assert main(["plan", str(script), *chosen, "--mesh", "data=8", "--", "64"]) == 1
    assert "hpz=True has no effect on a mesh of data=8, replicate=1" in capsys.readouterr().err


def test_a_script_without_slices_has_no_tensor_axis(script, capsys):
    chosen = ["--stage", "3", "--offload", "none", "--machine", "A100-8", "--wide"]
    assert main(["plan", str(script), *chosen, "--mesh", "replicate=2,data=4", "--", "64"]) == 0
    assert "mesh=zerofn.Mesh.make(replicate=2, data=4)" in capsys.readouterr().out
    assert main(["plan", str(script), *chosen, "--mesh", "data=4,tensor=2", "--", "64"]) == 1
    assert "no leaf is cut over it" in capsys.readouterr().err
    assert main(["plan", str(script), *chosen, "--mesh", "auto", "--", "64"]) == 0
    assert "left out: tensor 2, 4, 8: no leaf is cut over it" in capsys.readouterr().out


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


@pytest.mark.whole  # test_search.py plans one, too
def test_the_fastest_mesh_of_a_configuration_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    options = ["--context", "16", "--machine", "2 x A100-8", "--world", "16", "--wide"]
    options += ["--json", str(tmp_path / "plan.json")]
    assert main(["plan", str(tmp_path / "config.json"), *options, "--mesh", "auto"]) == 0
    out, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    grids = {tuple(row["mesh"].items()) for row in found["rows"]}
    assert grids == {(("data", 16),), (("replicate", 2), ("data", 8)), (("data", 8), ("tensor", 2)),
                     (("replicate", 2), ("data", 4), ("tensor", 2))}  # fmt: skip
    assert "left out: tensor 4: LlamaForCausalLM has 6 attention heads, which 4 ranks cannot divide equally" in out
    best = found["rows"][found["best"]]
    assert best["speed"] >= 0.98 * max(row["speed"] for row in found["rows"]) and best["call"] in out
    assert main(["plan", str(tmp_path), *options, "--stage", "3", "--mesh", "data=8,tensor=2"]) == 0
    assert "data=8,tensor=2" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    (["plan", "nowhere.py"], "the script 'nowhere.py' does not exist"),
    (["plan", "{script}:train", "--", "64"], "calls no compiled step 'train'; it calls 'evaluate', 'train_step'"),
    (["plan", "{script}", "--machine", "H100-9", "--", "64"], "did you mean 'H100-8'"),
    (["plan", "{script}", "--stage", "5", "--", "64"], "stage=5"),
    (["plan", "{script}", "--price", "0", "--", "64"], "--price 0: expected the price of a GPU-hour, a number above 0"),
    (["plan", "{script}", "--mesh", "data4", "--", "64"], "--mesh data4: expected sizes by axis"),
    (["plan", "{script}", "--mesh", "data=4,data=2", "--", "64"], "an axis may occur only once"),
    (["plan", "{script}", "--wire", "gather=int4,sum=int8", "--", "64"], "wire='gather=int4,sum=int8' has 'sum=int8'"),
    (["plan", "{script}", "--mesh", "data=4", "--world", "8", "--", "64"], "data 4 makes 4 ranks, but the job has 8"),
    (["plan", "{script}", "--mesh", "dta=4", "--", "64"], "axis 'dta' does not exist"),
])  # fmt: skip
def test_what_is_wrong_is_told_in_a_sentence(script, capsys, arguments, said):
    assert main([x.format(script=script) for x in arguments]) == 1
    assert said in capsys.readouterr().err


def test_the_status_says_whether_anything_fits(script, capsys):
    command = ["plan", str(script), "--world", "2", "--stage", "3", "--offload", "none", "--memory", "1KiB", "--", "64"]
    assert main(command) == 1
    assert "Nothing fits. The nearest: " in capsys.readouterr().out


def test_a_script_without_a_step(tmp_path, capsys):
    path = tmp_path / "empty.py"
    path.write_text("print('nothing')\n")
    assert main(["plan", str(path)]) == 1
    assert "ended without calling a compiled step" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.whole
def test_this_machine_is_measured_by_all_ranks(tmp_path):
    file = tmp_path / "here.json"
    command = [sys.executable, "-m", "zerofn.cli", "profile", str(file), "--ranks", "2", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    machine = machine_of(file)
    assert (machine.ranks, machine.device) == (2, "cpu")
    assert min(machine.link, machine.memory_rate, machine.disk_read, machine.flops["float32"], machine.launch) > 0
    assert "here.json" in done.stdout


def test_forgotten_dashes(script, capsys):
    with pytest.raises(SystemExit):
        main(["plan", str(script), "--layers", "2"])
    assert "after --: zerofn plan script.py" in capsys.readouterr().err


def test_a_deepspeed_configuration(tmp_path, capsys):
    path = tmp_path / "ds.json"
    config = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 3}}
    path.write_text(json.dumps(config))
    assert main(["config", str(path), "--auto", "lr=3e-4", "--world", "2"]) == 0
    out = capsys.readouterr().out
    assert "zero_optimization.stage" in out and "stage=3, precision='fp32'" in out
    assert "adamw(learning_rate=0.0003" in out
    assert main(["config", str(path)]) == 1
    assert 'zerofn config: from_deepspeed: the configuration has "auto"' in capsys.readouterr().err
    assert main(["config", str(path), "--auto", "lr"]) == 1
    assert "--auto lr: expected KEY=VALUE" in capsys.readouterr().err
    assert main(["config"]) == 0
    assert "stage3_max_live_parameters" in capsys.readouterr().out


def test_a_config_is_planned(tmp_path, capsys):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--world", "2", "--machine", "4090", "--rows", "2", "--precision", "bf16"]
    assert main(["plan", str(tmp_path / "config.json"), "--context", "32", *options]) == 0
    assert "GPT2LMHeadModel on 2 ranks of 4090" in capsys.readouterr().out
    assert main(["plan", str(tmp_path)]) == 1
    assert "needs --context" in capsys.readouterr().err
    assert main(["plan", "train.py", "--context", "32"]) == 1
    assert "--context has no effect on a script" in capsys.readouterr().err


@pytest.mark.whole
def test_a_config_is_planned_in_stages(tmp_path, capsys):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--context", "32", "--machine", "4090", "--precision", "bf16", "--stage", "1", "--offload", "none"]
    command = ["plan", str(tmp_path), *options, "--microbatches", "4", "--mesh", "pipe=2,data=2", "--wide"]
    assert main(command) == 0
    told = capsys.readouterr().out
    for text in ("stages, 4 microbatches", "rank 1 along pipe: stage", "zerofn.parallel.pipe(model, mesh"):
        assert text in told
    assert main([*command, "--rows", "6"]) == 1
    assert "--microbatches 4: a rank's 6 rows cannot be divided into 4 equal microbatches" in capsys.readouterr().err
    assert main(["plan", "train.py", "--microbatches", "4"]) == 1
    assert "--microbatches has no effect on a script, which chooses its own number" in capsys.readouterr().err


@pytest.mark.whole
def test_layers_with_parts_of_the_tokens_are_planned(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fixed = ["--machine", "4090", "--precision", "bf16", "--stage", "1", "--offload", "none", "--remat", "none"]
    options = [str(tmp_path), "--context", "256", "--world", "2", "--wide", *fixed]
    kept = []
    for more in (["--no-sequence-parallel"], []):
        argv = ["plan", *options, "--mesh", "data=1,tensor=2", "--json", str(tmp_path / "plan.json"), *more]
        assert main(argv) == 0
        (row,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
        kept.append(row["plan"]["peak"]["activations"])
    assert kept[1] < 0.75 * kept[0]
    entries = "{'model.layers.*': 'sequence_parallel', 'lm_head': 'colwise'}"
    assert f"cuts=zerofn.parallel.tensor(model, mesh, model.tp_plan | {entries})" in capsys.readouterr().out
    assert main(["plan", *options, "--mesh", "data=2", "--sequence-parallel"]) == 1
    assert "no effect without several ranks along tensor" in capsys.readouterr().err
    assert main(["plan", "train.py", "--sequence-parallel"]) == 1
    assert "--sequence-parallel has no effect on a script" in capsys.readouterr().err

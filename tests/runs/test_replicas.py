"""Copies in the memory of machines: of what is lost, the rest gives the state back without a disk."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.runs.test_manager import Counter
from tests.support.same import assert_same_trees
from tests.support.small_steps import build, layers_on_stages, state_of, train_step_of
from zerofn.checkpoint import CheckpointError, saving, steps
from zerofn.checkpoint.background_saves import InFlight
from zerofn.geometry.cuts import equal
from zerofn.job.agreement import agree
from zerofn.runs import replicas
from zerofn.util.other_processes import started
from zerofn.util.process import the

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def machines(folder, hosts):
    """Let ranks stand for machines, each with a memory of its own, of one launcher."""
    rank = dist.get_rank()
    before = replicas.MEMORY, replicas.machine
    replicas.MEMORY, replicas.machine = folder / f"memory {hosts[rank]}", lambda: f"machine {hosts[rank]}"
    replicas.MEMORY.mkdir(exist_ok=True)
    os.environ["TORCHELASTIC_RUN_ID"] = "a job"
    try:
        yield
    finally:
        replicas.MEMORY, replicas.machine = before
        del os.environ["TORCHELASTIC_RUN_ID"]


def begun(folder, stage, replicate_every=2, sizes=None, **options):
    """(checkpoints, state, step, loader) of a run that goes on from what there is. `sizes`: of the mesh."""
    loader = Counter(same="pipe" in (sizes or {}))
    mesh = None if sizes is None else zerofn.Mesh.make(**sizes)
    cuts = layers_on_stages(2, mesh.size("pipe")) if sizes and "pipe" in sizes else None
    options = {"loader": loader, "signals": (), "replicate_every": replicate_every, **options}
    checkpoints = zerofn.Checkpoints(folder / "run", **options)
    state = checkpoints.restore_or(lambda: state_of(build(2), stage, mesh=mesh, cuts=cuts))
    return checkpoints, state, zerofn.compile(train_step_of(build(2))), loader


def trained(run, until):
    """Train until a step; return the whole states after each."""
    checkpoints, state, step, loader = run
    found = {}
    for batch in loader:
        if checkpoints.step == until:
            break
        state, metrics = step(state, batch)
        found[checkpoints.step + 1] = zerofn.unshard(state)
        checkpoints.after_step(state, metrics)
    checkpoints._replicas.finish()
    the(InFlight).finish()
    agree("all have come so far", "")
    return found


def lose(host, hosts, folder):
    """A machine is replaced by one that has nothing."""
    if dist.get_rank() == hosts.index(host):
        shutil.rmtree(folder / f"memory {host}")
        (folder / f"memory {host}").mkdir()
    agree(f"machine {host} is gone", "")


def come_back(folder, stage, hosts, lost, sizes=None):
    with machines(folder, hosts):
        before = trained(begun(folder, stage, sizes=sizes), 5)
        assert len(list(replicas.MEMORY.glob("*/step-*/*.safetensors"))) >= hosts.count(hosts[dist.get_rank()])
        agree("seen", "")
        for host in lost:
            lose(host, hosts, folder)
        run = begun(folder, stage, sizes=sizes)
        checkpoints, state, _, loader = run
        assert checkpoints.step == 4 and loader.at == 4 and not checkpoints.steps()
        assert_same_trees(zerofn.unshard(state), before[4])
        after = trained(run, 6)
        assert_same_trees(after[5], before[5])
        if lost:
            lose(hosts[-1], hosts, folder)  # perhaps where the others have it from
        run = begun(folder, stage, sizes=sizes)
        assert_same_trees(zerofn.unshard(run[1]), after[6])
        run[0].close()
        assert not list(replicas.MEMORY.iterdir()) and not list((folder / "run").glob("*"))


@pytest.mark.part(hosts=["aab"])
@pytest.mark.part(hosts=["ab"], stage=[1])
@pytest.mark.parametrize(
    "hosts, stage, lost",
    [
        ("aa", 3, ""),
        ("ab", 1, "b"),
        ("ab", 0, "a"),
        ("aab", 3, "b"),
        pytest.param("ab", 3, "a", marks=pytest.mark.whole),
        pytest.param("abc", 2, "b", marks=pytest.mark.whole),
        pytest.param("aabb", 3, "a", marks=pytest.mark.whole),
    ],
)
def test_a_machine_that_is_lost(ranks, tmp_path, hosts, stage, lost):
    ranks(len(hosts), come_back, tmp_path, stage, hosts, lost)


@pytest.mark.part(sizes=[{"replicate": 2}])
@pytest.mark.parametrize(
    "hosts, sizes, lost",
    [
        ("ab", {"replicate": 2}, "a"),
        ("ab", {"pipe": 2}, "b"),
        pytest.param("ab", {"replicate": 2}, "b", marks=pytest.mark.whole),
        pytest.param("aabb", {"replicate": 2, "data": 2}, "b", marks=pytest.mark.whole),
    ],
)
def test_a_machine_of_replicas_that_is_lost(ranks, tmp_path, hosts, sizes, lost):
    """Ranks with the same shards load what the first of them has written, on another machine."""
    ranks(len(hosts), come_back, tmp_path, 3, hosts, lost, sizes)


def slices_on(sizes):
    mesh = zerofn.Mesh.make(**sizes)
    values = {"w": torch.arange(35.0).view(5, 7), "b": torch.arange(6.0), "whole": torch.arange(3.0)}
    cuts = {"w": equal("tensor", 1, 7, 2), "b": equal("tensor", 0, 6, 2)}
    return zerofn.shard({"params": values, "step": torch.tensor(0)}, mesh=mesh, cuts=cuts), values


def slices_come_back(folder, hosts, lost, sizes):
    with machines(folder, hosts):
        state, values = slices_on(sizes)
        checkpoints = zerofn.Checkpoints(folder / "run", signals=(), replicate_every=1)
        state = checkpoints.restore_or(state)
        checkpoints.after_step(state, {})
        checkpoints._replicas.finish()
        agree("copied", "")
        lose(lost, hosts, folder)
        zeros = zerofn.tree_map(torch.zeros_like, state)
        checkpoints = zerofn.Checkpoints(folder / "run", signals=(), replicate_every=1)
        assert_same_trees(zerofn.unshard(checkpoints.restore_or(zeros))["params"], values)
        assert checkpoints.step == 1
        checkpoints.close()


@pytest.mark.parametrize("hosts, lost, sizes", [("ab", "a", {"tensor": 2}), ("aabb", "b", {"tensor": 2, "data": 2})])
def test_a_machine_of_slices_that_is_lost(ranks, tmp_path, hosts, lost, sizes):
    ranks(len(hosts), slices_come_back, tmp_path, hosts, lost, sizes)


def falls_back(folder, hosts, harm):
    """Memory that is no good is passed over: the run goes on from the disk, which is older."""
    with machines(folder, hosts):
        run = begun(folder, 3, every=3)
        before = trained(run, 5)  # saved at 3, copied at 4
        agree("saved", "")
        harm(folder, hosts)
        checkpoints, state, *_ = begun(folder, 3, every=3)
        assert checkpoints.step == 3
        assert_same_trees(zerofn.unshard(state), before[3])
        checkpoints.close()


def lose_two(folder, hosts):
    for host in hosts[:2]:
        lose(host, hosts, folder)


def flip_all(folder, _):
    for file in replicas.MEMORY.glob("*/*/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    agree("flipped", "")


def cut_manifests(folder, _):
    for file in replicas.MEMORY.glob("*/*/manifest.json"):
        file.write_bytes(file.read_bytes()[:-2])
    agree("cut", "")


@pytest.mark.part(harm=[lose_two])
@pytest.mark.parametrize("hosts, harm", [("abc", lose_two), ("ab", flip_all), ("ab", cut_manifests)])
def test_copies_that_are_lost_or_damaged_are_passed_over(ranks, tmp_path, hosts, harm):
    ranks(len(hosts), falls_back, tmp_path, hosts, harm)


def disk_is_newer(folder):
    with machines(folder, "ab"):
        before = trained(begun(folder, 3, every=3), 6)  # copied at 4, saved at 6
        checkpoints, state, *_ = begun(folder, 3, every=3)
        assert checkpoints.step == 6
        assert_same_trees(zerofn.unshard(state), before[6])
        for path in checkpoints.path(6).glob("*.safetensors"):
            if dist.get_rank() == 0:
                path.write_bytes(b"damaged")
        agree("damaged", "")
        checkpoints, state, *_ = begun(folder, 3, every=3)
        assert checkpoints.step == 4  # before that of step 3
        assert_same_trees(zerofn.unshard(state), before[4])


def test_the_newest_copy_that_is_whole_goes_first(ranks, tmp_path):
    ranks(2, disk_is_newer, tmp_path)


def others_go_on(folder, hosts, step):
    with machines(folder, hosts):
        return begun(folder, 3, every=3)[0].step == step


def leave(folder, hosts):
    with machines(folder, hosts):
        trained(begun(folder, 3, every=3), 5)


@pytest.mark.part(before=["aab"])
@pytest.mark.part(before=["ab"])
@pytest.mark.parametrize(
    "before, after, step", [("aa", "aaa", 4), ("aab", "aa", 4), ("aabb", "ab", 3), ("ab", "ba", 4)]
)
def test_other_numbers_of_ranks_read_memory_on_one_machine_and_the_disk_on_several(
    ranks, tmp_path, before, after, step
):
    """On one machine any number of ranks reads its memory; on several, another number reads the disk."""
    ranks(len(before), leave, tmp_path, before)
    assert all(ranks(len(after), others_go_on, tmp_path, after, step))


def test_memory_of_jobs_that_have_ended_is_freed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setattr(replicas, "MEMORY", tmp_path)
    ours = tmp_path / f"{replicas._of_machine()}{os.getpid()}"
    alive, dead = (ours.with_name(f"{ours.name}-{began}-0123456789ab") for began in (started(os.getpid()), 7))
    strange = tmp_path / "zerofn-of another machine"
    for path in (alive, dead, strange):
        path.mkdir()
    mine = replicas.Replicas(tmp_path / "run")
    mine.begin()
    assert alive.exists() and strange.exists() and not dead.exists()
    assert mine.folder.stat().st_mode & 0o777 == 0o700
    mine.folder.chmod(0o777)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        mine.begin()


def test_names_of_others_end_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setattr(replicas, "MEMORY", tmp_path)
    names = ("notes", "7", "-", "7-7", "x-7-0123456789ab", f"{'9' * 30}-7-0123456789ab", "7-0123456789ab-7", "7-8-9\n")
    for name in names:
        (tmp_path / f"{replicas._of_machine()}{name}").mkdir()
    target = tmp_path / "target"
    target.write_text("stays")
    (tmp_path / f"{replicas._of_machine()}7-7-0123456789ab").symlink_to(target)
    (tmp_path / f"{replicas._of_machine()}8-7-0123456789ab").write_text("a file")
    before = set(tmp_path.iterdir())
    mine = replicas.Replicas(tmp_path / "run")
    mine.begin()
    assert set(tmp_path.iterdir()) == before | {mine.folder}
    (mine.folder / "step-00000003").write_text("a file")
    (mine.folder / "notes").write_text("a file")
    (mine.folder / "step-00000004").mkdir()
    (mine.folder / "step-00000005").mkdir()
    mine._remove_all_but(mine.folder / "step-00000005", [])
    assert {p.name for p in mine.folder.iterdir()} == {"step-00000003", "step-00000005", "notes"}
    assert list(mine.copies()) == []


def test_replicas_that_would_be_of_no_use_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match="torchrun --max-restarts"):
        zerofn.Checkpoints(tmp_path, replicate_every=2)
    with pytest.raises(ValueError, match="has no effect"):
        zerofn.Checkpoints(tmp_path, every=5, replicate_every=10)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setattr(replicas, "MEMORY", tmp_path / "nothing")
    with pytest.raises(ValueError, match="no .*nothing"):
        zerofn.Checkpoints(tmp_path, replicate_every=2)


def no_room(folder):
    """Memory that is full on one machine is told on all."""
    with machines(folder, "ab"):
        if dist.get_rank() == 1:
            saving.write_file = full
        trained(begun(folder, 3), 2)


def full(path, *_, **__):
    raise OSError(28, "No space left on device", str(path))


def test_no_room(ranks, tmp_path):
    replies = ranks(2, no_room, tmp_path, expect_errors=True)
    assert all("No space left on device" in reply.message for reply in replies)


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
import zerofn
from tests.runs.test_replicas import begun, trained

folder = Path(sys.argv[1])
run = begun(folder, 3, replicate_every=3)
sys.stdout.write(f"goes on after step {run[0].step}\\n")  # one write: both ranks share an output
if run[0].step == 0:
    trained(run, 7)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
last = trained(run, 9)[9]
if dist.get_rank() == 0:
    torch.save(last.params, folder / "last.pt")
run[0].close()
"""


def undisturbed(folder):
    with machines(folder, "aa"):
        return trained(begun(folder, 3), 9)[9].params


@pytest.mark.whole
def test_a_rank_is_killed_under_torchrun(ranks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(tmp_path / "script.py"), str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("continues after step 6") == 2 and not steps.complete_steps(tmp_path / "run")
    last = torch.load(tmp_path / "last.pt", weights_only=False)
    assert_same_trees(last, ranks(2, undisturbed, tmp_path)[0])
    assert not list(Path("/dev/shm").glob(f"{replicas._of_machine()}*"))

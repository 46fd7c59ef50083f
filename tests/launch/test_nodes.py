"""Jobs on several machines, played by a stand-in for ssh on PATH that runs the command here."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from zerofn.launch import nodes
from zerofn.launch.nodes import LaunchError, over_slurm, over_ssh, passed_on, run_on

SSH = """#!/bin/sh
# ssh [-o x] [-p x] HOST COMMAND
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
case "$host" in gone*) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255;; esac
HOST=$host exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    for name in ("ssh", "srun"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SSH)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def order(code, **more):
    command = [sys.executable, "-c", code]
    return {"command": command, "cwd": os.getcwd(), "environ": {}, "script": "", "port": 0, **more}


def test_lines_come_behind_their_machines(ssh):
    out = io.StringIO()
    say = "import os; print(os.environ['HOST'], os.environ['WORD'])"
    orders = {host: order(say, environ={"WORD": host * 2}) for host in ("a", "b")}
    assert run_on(orders, over_ssh, out) == 0
    assert sorted(out.getvalue().splitlines()) == ["a: a aa", "b: b bb"]


def alive(path):
    return [pid for pid in map(int, path.read_text().split()) if os.path.exists(f"/proc/{pid}")]


LASTS = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(60)"


def test_one_that_fails_ends_all(ssh, tmp_path):
    lasts, fails = order(LASTS), order("import time; time.sleep(1.5); raise SystemExit(3)")
    lasts["command"].append(str(tmp_path / "pids"))
    began = time.monotonic()
    with pytest.raises(
        LaunchError,
        match="b ended with exit code 3. See its output above. The processes on all other machines were ended",
    ):
        run_on({"a": lasts, "b": fails}, over_ssh, io.StringIO())
    assert time.monotonic() - began < 10 and (tmp_path / "pids").exists()
    assert alive(tmp_path / "pids") == []


def test_an_agent_that_loses_the_first_machine_is_started_again_with_it(ssh):
    first, other = order("raise SystemExit(75)"), order("import time; time.sleep(1.5); raise SystemExit(1)")
    assert run_on({"a": first, "b": other}, over_ssh, io.StringIO()) == os.EX_TEMPFAIL


def test_nothing_starts_if_one_cannot_be_reached(ssh, tmp_path):
    touched = tmp_path / "started"
    with pytest.raises(LaunchError, match="gone1 cannot be reached: ssh: connect to host gone1 .*No route to host"):
        run_on({"a": order(f"open({str(touched)!r}, 'w')"), "gone1": order("")}, over_ssh, io.StringIO())
    assert not touched.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"cwd": "/nowhere/at/all"},
            "b: the folder '/nowhere/at/all' does not exist on this machine. The job needs the same files",
        ),
        ({"script": "nothing.py"}, "b: the script 'nothing.py' does not exist on this machine"),
    ],
)
def test_what_a_machine_lacks_is_told_before_anything_starts(ssh, more, message):
    with pytest.raises(LaunchError, match=message):
        run_on({"a": order("print(1 / 0)"), "b": order("", **more)}, over_ssh, io.StringIO())


def test_a_port_in_use_is_told(ssh):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} cannot be used: Address already in use.*--port"):
            run_on({"a": order("", port=port)}, over_ssh, io.StringIO())


class Writes(io.StringIO):
    """Keeps what was written, call by call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def write(self, text):
        self.calls.append(text)
        return len(text)


def test_a_line_is_written_whole(ssh):
    # In pieces, lines of machines that print at the same time would run into one another.
    out = Writes()
    both = order("print('first'); print('second')")
    assert run_on({"a": both, "b": both}, over_ssh, out) == 0
    assert sorted(out.calls) == [f"{host}: {line}\n" for host in "ab" for line in ("first", "second")]


PROGRAM = """
import sys
from zerofn.launch.nodes import over_ssh, run_on
lasts = {order!r}
run_on({{"a": lasts, "b": lasts}}, over_ssh)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_of_the_launcher_ends_every_machine(ssh, tmp_path, number):
    lasts = order(LASTS)
    lasts["command"].append(str(tmp_path / "pids"))
    launcher = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(order=lasts)],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a job of the background has none
    )
    end = time.monotonic() + 20
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    launcher.send_signal(number)
    launcher.wait(20)
    while alive(tmp_path / "pids"):
        assert time.monotonic() < end
        time.sleep(0.05)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "rank"], start_new_session=True)
open(sys.argv[1], "a").write(f"{os.getpid()} ")
time.sleep(60)
"""


def test_what_does_not_end_in_time_is_killed_with_all_it_has_started(tmp_path):
    """As an agent whose ranks have groups of their own."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = [sys.executable, str(tmp_path / "stubborn.py"), str(tmp_path / "pids")]
    code = "import zerofn.launch.node as node; node.GRACE = 0.5; raise SystemExit(node.main())"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    asked = {**order(""), "command": command}
    process.stdin.write(json.dumps(asked) + "\ngo\n")
    process.stdin.flush()
    end = time.monotonic() + 20
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.stdin.close()
    process.wait(10)
    process.stdout.close()
    while alive(tmp_path / "pids"):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_variables_of_this_login_stay(tmp_path):
    environ = {"HOME": "/me", "SSH_TTY": "x", "NCCL_DEBUG": "INFO", "MINE": "1"}
    (tmp_path / ".deepspeed_env").write_text("# ours\nNCCL_IB_DISABLE=1\nMINE=a=b\n\n")
    found = passed_on(environ, [tmp_path / "none", tmp_path])
    assert found == {"NCCL_DEBUG": "INFO", "MINE": "a=b", "NCCL_IB_DISABLE": "1"}
    (tmp_path / ".deepspeed_env").write_text("A=1\nB\n")
    with pytest.raises(ValueError, match="deepspeed_env, line 2: expected NAME=value, got 'B'"):
        passed_on(environ, [tmp_path])


def test_how_machines_are_reached(monkeypatch):
    assert over_ssh("localhost")[0] == sys.executable
    assert over_ssh("worker-1", 2222)[-4:-1] == ["-p", "2222", "worker-1"]
    assert over_slurm("n1")[:2] == ["srun", "--overlap"] and "--nodelist=n1" in over_slurm("n1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="a: cannot be reached, because the program 'ssh' is not installed"):
        nodes.run_on({"a": order("")}, over_ssh)

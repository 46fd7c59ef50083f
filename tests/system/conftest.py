"""What these tests need besides Python; and machines: network namespaces with names and an sshd of their own."""

import os
import shutil
from pathlib import Path

import pytest

from tests.system.machines import Machines

# Program -> Debian's package that has it.
NEEDED = {
    "chromium": "chromium",
    "ip": "iproute2",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}


@pytest.fixture(scope="session", autouse=True)
def needed():
    """Stop at once, and name all that is not there: nothing here is skipped."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    os.environ["PATH"] = path
    lacks = [f"{x} (apt install {package})" for x, package in NEEDED.items() if shutil.which(x, path=path) is None]
    if os.geteuid():
        lacks.append("root, who may make network namespaces")
    if not Path("build/site/index.html").is_file():
        lacks.append("build/site (make docs)")
    if lacks:
        pytest.exit(f"tests/system needs {', '.join(lacks)}.", returncode=1)


@pytest.fixture(scope="session")
def machines(needed, tmp_path_factory):
    """Three machines: a and b can be reached, gone cannot."""
    with Machines(("node-a", "node-b"), gone=("node-gone",), folder=tmp_path_factory.mktemp("machines")) as made:
        yield made

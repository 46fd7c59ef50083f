"""The rules of the kernels: one list in C, one declaration in Python, and a new one in three places."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import (
    kernel_cases,  # noqa: F401 - imports the rules
    kernels_on_cpu,
)
from zerofn.ops import cpu
from zerofn.ops.kernel_args import RULES

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "ops" / "csrc" / "rules.h"


def list_in_c():
    """[(name, number of moments, functions)] of ZF_RULES."""
    listed = HEADER.read_text().partition("#define ZF_RULES(RULE)")[2].partition("\n\n")[0]
    found = re.findall(r"RULE\((\w+), (\d), \d, (\w+), (\w+), (\w+)\)", listed)
    return [(name, int(count), functions) for name, count, *functions in found]


def test_rules_are_declared_as_the_kernels_list_them():
    listed = list_in_c()
    assert {rule.number for rule in RULES.values()} == set(range(len(listed)))
    for name, rule in RULES.items():
        in_c, num_moments, _ = listed[rule.number]
        assert name.startswith(in_c.lower()) and rule.num_moments == num_moments


def test_no_other_file_of_the_operations_names_a_rule():
    names = {*RULES, *(f"ZF_{name}" for name, *_ in list_in_c()), *(f for *_, fs in list_in_c() for f in fs)}
    own = {"adamw.py", "frozen_adamw.py", "lion.py", "sgd.py", HEADER.name}
    files = [f for f in sorted((ROOT / "ops").rglob("*")) if f.suffix in (".py", ".h", ".cpp", ".cu", ".c")]
    assert own < {f.name for f in files}
    word = re.compile(rf"\b({'|'.join(names)})\b")
    named = {f.name: word.findall(f.read_text()) for f in files if f.name not in own}
    assert {f: found for f, found in named.items() if found} == {}


# --- a new rule ----------------------------------------------------------------------------------

IN_C = """\
ZF_FN zf_f zf_signum(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) {
    (void)v;
    *m = ZF_FMA(g, r->c1, *m * r->b1);
    zf_f below = *m < 0.0f ? ZF_ALL(-1.0f) : ZF_ALL(0.0f), sign = *m > 0.0f ? ZF_ALL(1.0f) : below;
    return ZF_FMA(sign, r->rate, p * r->shrink);
}
"""
OPERATION = '''
"""Signum (Bernstein et al. 2018, Algorithm 2)."""
from .kernel_args import Rule
from .update_rule import by_blocks, define_rule, descend_

def _signum(p, m, grad, rate, decay, b1):
    m.mul_(b1).add_(grad, alpha=1 - b1)
    if decay:
        p.mul_(1 - rate * decay)
    descend_(p, m.sign(), rate)

define_rule("signum", ["m"], "float b1", lambda b1: ("signum", {"b1": b1}),
            {"signum": Rule(NUMBER, 1, by_blocks(_signum), decoupled=True)})
'''
OPTIMIZER = '''
"""Signum."""
from typing import Any, NamedTuple
import torch
from .. import tree
from ..ops import signum as _op
from . import moment_formats as formats
from .base import count_zero
from .fused import LeafConstants, fused_rule

class SignumState(NamedTuple):
    count: Any
    mu: Any

def signum(rate, b1=0.9, decay=0.0, mask=None, moments=None):
    constants = LeafConstants(decay, mask, None)

    def init(params):
        return formats.state_type(SignumState, moments)(count_zero(params), formats.initial(params, moments))

    def update(grads, state, params):
        mu = tree.tree_map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        move = lambda m, p, d, _: -rate * (m.sign() + d * p)
        return tree.tree_map(move, mu, params, *constants.over(params)), SignumState(state.count + 1, mu)

    def call(tensors, runs, offset):
        return torch.ops.zerofn.signum(*tensors, *runs, b1, moments, offset)

    return fused_rule("signum", (rate, b1, decay, mask, moments), init, update, call, ("mu",), rate, constants)
'''
PROGRAM = """
import sys, torch, zerofn
from zerofn.ops import cpu
from zerofn.optim.signum import signum
assert sys.argv[1] in zerofn.__file__ and (cpu.missing() is None) == (sys.argv[2] == "kernels"), cpu.missing()
torch.manual_seed(0)
start, grads = torch.randn(4100), [torch.randn(4100) for _ in range(4)]
for moments in (None, "8bit"):
    state = zerofn.TrainState.create(params={"w": start}, tx=signum(0.25, 0.5, 0.125, moments=moments))
    state = zerofn.shard(state, stage=3)
    p, m = start.double(), torch.zeros(4100, dtype=torch.float64)
    for g in grads:
        state = state.apply_gradients(zerofn.scatter({"w": g}, like=state.params))
        m = 0.5 * m + 0.5 * g.double()
        p = p - 0.25 * (m.sign() + 0.125 * p)
    found = zerofn.gather(state.params)["w"]
    agree = (found - p).abs() < 1e-5  # a moment of 8 bits may have the other sign where it is small
    assert agree.double().mean() >= (1.0 if moments is None else 0.9), agree.double().mean()
    print(moments, found.double().sum().item())
"""


@pytest.mark.whole  # that no other place names a rule, the test above says
def test_a_new_rule_is_three_places(tmp_path):
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "zerofn", tmp_path / "zerofn", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    listed = list_in_c()
    header = tmp_path / "ops" / "csrc" / "rules.h"
    text = header.read_text().replace("/* All rules,", IN_C + "\n/* All rules,")
    last = re.findall(r"RULE\(\w+, \d, \d, .*\)", text)[-1]
    header.write_text(text.replace(last, last + " \\\n    RULE(SIGNUM, 1, 1, zf_signum, zf_signum, zf_signum)"))
    (tmp_path / "ops" / "signum.py").write_text(OPERATION.replace("NUMBER", str(len(listed))))
    (tmp_path / "zerofn" / "optim" / "signum.py").write_text(OPTIMIZER)

    def results(kind):
        env = os.environ | {"PYTHONPATH": str(tmp_path), "ZEROFN_NATIVE": str(int(kind == "kernels")), "ZEROFN_ISA": ""}
        command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path), kind]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    in_torch = results("torch")
    if cpu.missing() is None:  # so there is a compiler
        compile_plainly(tmp_path / "ops")
        assert results("kernels") == in_torch


def compile_plainly(ops):
    """Build the library for the plain instruction set alone, which needs no flags of a machine's."""
    compiler = kernels_on_cpu.compiler()
    flags = ["-O0", "-std=c++17", "-ffp-contract=off", "-fPIC", "-w", "-DZF_ISA=plain", "-fvisibility=hidden"]
    sources = [str(x) for x in sorted((ops / "csrc").glob("*.cpp"))]
    choose = ["-x", "c", str(ops / "csrc" / "choose.c")]
    objects = [ops / f"{k}.o" for k in range(len(sources) + 1)]
    for source, to in zip([*([x] for x in sources), choose], objects, strict=True):
        c_flags = [f for f in flags if source is not choose or f != "-std=c++17"]
        subprocess.run([compiler, *c_flags, "-c", *source, "-o", to], check=True)
    subprocess.run([compiler, "-shared", *objects, "-lm", "-o", ops / "libzerofn.so"], check=True)

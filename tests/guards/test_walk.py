# ruff: noqa: E501  (cells of a notebook stand in one line)
"""What a step reads outside its arguments: a change leads to another capture, and nothing else does."""

import functools
import logging
import sys
import textwrap
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captures_of, state_of, step_with, train_step_of
from zerofn import optim
from zerofn.guards.walk import Walk
from zerofn.runtime import guarded_captures as guards
from zerofn.runtime.guarded_captures import KEPT

STATE = {"w": torch.arange(1.0, 5.0)}
X = torch.tensor([0.5, -1.0, 2.0, 3.0])


def cell(code, **names):
    """A notebook's namespace in which this code was run."""
    space = {"__name__": "__main__", "torch": torch, "nn": nn, "np": np, "functools": functools, "X": X, **names}
    run(space, code)
    return types.SimpleNamespace(space=space, run=lambda more: run(space, more))


def run(space, code):
    exec(compile(textwrap.dedent(code), "<cell>", "exec"), space)


def captured_now(caplog):
    return [r.getMessage() for r in caplog.records if ": captured " in r.getMessage()]


# name -> (a first cell that makes `step`, the change)
CHANGES = {
    "a global number": ("a = 2.0\ndef step(s, x): return s['w'] * x * a", "a = 3.0"),
    "a global of another type": (
        "a = 1\ndef step(s, x): return (s['w'] * 0).long() * a + 1 / (a + (type(a) is int))",
        "a = 1.0",
    ),
    "a global string": ("k = 'sum'\ndef step(s, x): return getattr(x * s['w'], k)()", "k = 'mean'"),
    "a global that was not there": ("def step(s, x): return x * (len(s) + 1)", "def len(x): return 7"),
    "a redefined function": ("def f(x): return x * 2\ndef step(s, x): return f(x)", "def f(x): return x * 3"),
    "a function of a function": (
        "def g(x): return x * 2\ndef f(x): return g(x)\ndef step(s, x): return f(x)",
        "def g(x): return x * 3",
    ),
    "another code of a function": (
        "def f(x): return x * 2\ndef step(s, x): return f(x)",
        "def other(x): return x * 3\nf.__code__ = other.__code__",
    ),
    "a default": ("def f(x, a=2.0): return x * a\ndef step(s, x): return f(x)", "f.__defaults__ = (3.0,)"),
    "a keyword default": (
        "def f(x, *, a=2.0): return x * a\ndef step(s, x): return f(x)",
        "f.__kwdefaults__['a'] = 3.0",
    ),
    "a default list": ("def f(x, a=[2.0]): return x * a[0]\ndef step(s, x): return f(x)", "f.__defaults__[0][0] = 3.0"),
    "a closure cell": (
        "def make():\n  a = 2.0\n  def f(x): return x * a\n  def put(b):\n    nonlocal a\n    a = b\n  return f, put\n"
        "f, put = make()\ndef step(s, x): return f(x)",
        "put(3.0)",
    ),
    "a lambda inside the step": ("a = 2.0\ndef step(s, x): return (lambda y: y * a)(x)", "a = 3.0"),
    "a list": ("lr = [2.0]\ndef step(s, x): return x * lr[0]", "lr[0] = 0.0"),
    "a longer list": ("lr = [2.0]\ndef step(s, x): return x * sum(lr)", "lr.append(1.0)"),
    "a list in a tuple": ("lr = ([2.0], 1)\ndef step(s, x): return x * lr[0][0]", "lr[0][0] = 0.0"),
    "a dict": ("cfg = {'a': {'b': 2.0}}\ndef step(s, x): return x * cfg['a']['b']", "cfg['a']['b'] = 3.0"),
    "another key": ("cfg = {'a': 2.0}\ndef step(s, x): return x * cfg.get('b', 1.0)", "cfg['b'] = cfg.pop('a')"),
    "a set": ("on = {'a'}\ndef step(s, x): return x * (2 if 'b' in on else 1)", "on.add('b'); on.remove('a')"),
    "a mapping": (
        "import collections\ncfg = collections.UserDict(a=2.0)\ndef step(s, x): return x * cfg['a']",
        "cfg['a'] = 3.0",
    ),
    "a function in a dict": (
        "table = {'f': torch.sin}\ndef step(s, x): return table['f'](x)",
        "table['f'] = torch.cos",
    ),
    "a namespace": (
        "from types import SimpleNamespace\ncfg = SimpleNamespace(a=2.0)\ndef step(s, x): return x * cfg.a",
        "cfg.a = 3.0",
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n  a: float = 2.0\n"
        "cfg = C()\ndef f(c, x): return x * c.a\ndef step(s, x): return f(cfg, x)",
        "cfg.a = 3.0",
    ),
    "a slot": (
        "class C:\n  __slots__ = ('a',)\ncfg = C()\ncfg.a = 2.0\ndef step(s, x): return x * cfg.a",
        "cfg.a = 3.0",
    ),
    "a class attribute": ("class C:\n  a = 2.0\ndef step(s, x): return x * C.a", "C.a = 3.0"),
    "an attribute over a class's": ("class C:\n  a = 2.0\nc = C()\ndef step(s, x): return x * c.a", "c.a = 3.0"),
    "a property": (
        "class C:\n  @property\n  def a(self): return self._a\nc = C()\nc._a = 2.0\ndef step(s, x): return x * c.a",
        "c._a = 3.0",
    ),
    "a static method": (
        "class C:\n  @staticmethod\n  def f(x): return x * a\na = 2.0\ndef step(s, x): return C.f(x)",
        "a = 3.0",
    ),
    "a class method": (
        "class C:\n  a = 2.0\n  @classmethod\n  def f(cls, x): return x * cls.a\ndef step(s, x): return C.f(x)",
        "C.a = 3.0",
    ),
    "a method's object": (
        "class C:\n  def __init__(self): self.a = 2.0\n  def f(self, x): return x * self.a\n"
        "  def step(self, s, x): return self.f(x)\nc = C()\nstep = c.step",
        "c.a = 3.0",
    ),
    "an attribute of an object handed on": (
        "class C: pass\nc = C()\nc.a = 2.0\ndef f(c, x): return x * c.a\ndef step(s, x): return f(c, x)",
        "c.a = 3.0",
    ),
    "an attribute by its name": (
        "class C: pass\nc = C()\nc.a = 2.0\ndef step(s, x): return x * getattr(c, 'a')",
        "c.a = 3.0",
    ),
    "a method of a superclass": (
        "class A:\n  def f(self, x): return x * self.a\nclass B(A):\n  def f(self, x): return super().f(x)\n"
        "c = B()\nc.a = 2.0\ndef step(s, x): return c.f(x)",
        "c.a = 3.0",
    ),
    "a redefined method": (
        "class C:\n  def f(self, x): return x * 2\nc = C()\ndef step(s, x): return c.f(x)",
        "C.f = lambda self, x: x * 3",
    ),
    "a callable object": (
        "class C:\n  a = 2.0\n  def __call__(self, x): return x * self.a\nf = C()\ndef step(s, x): return f(x)",
        "f.a = 3.0",
    ),
    "a partial": (
        "def f(x, a): return x * a[0]\na = [2.0]\ng = functools.partial(f, a=a)\ndef step(s, x): return g(x)",
        "a[0] = 3.0",
    ),
    "another partial": (
        "def f(x, a): return x * a\ng = functools.partial(f, a=2.0)\ndef step(s, x): return g(x)",
        "g = functools.partial(f, a=3.0)",
    ),
    "a decorated function": (
        "def f(x): return x * a\na = 2.0\ng = torch.no_grad()(f)\ndef step(s, x): return g(x)",
        "a = 3.0",
    ),
    "a cached function": (
        "@functools.lru_cache\ndef f(): return (torch.ones, 2.0)\ndef step(s, x): return x * a * f()[1]\na = 2.0",
        "a = 3.0",
    ),
    "another tensor": ("t = torch.tensor(2.0)\ndef step(s, x): return x * t", "t = torch.tensor(3.0)"),
    "a tensor written to": ("t = torch.ones(4)\ndef step(s, x): return x * t", "t.mul_(2)"),
    "a tensor written to through NumPy": ("t = torch.ones(4)\ndef step(s, x): return x * t", "t.numpy()[0] = 5"),
    "a tensor written to through .data": ("t = torch.ones(4)\ndef step(s, x): return x * t", "t.data.mul_(2)"),
    "a tensor with other .data": ("t = torch.ones(4)\ndef step(s, x): return x * t", "t.data = torch.full((4,), 2.0)"),
    "a number taken from a tensor": (
        "t = torch.tensor(2.0)\ndef step(s, x): return x * float(t)",
        "t.numpy()[...] = 3.0",
    ),
    "an array": ("a = np.array([2.0])\ndef step(s, x): return x * float(a[0])", "a[0] = 3.0"),
    "another array scalar": ("a = np.float32(2)\ndef step(s, x): return x * float(a)", "a = np.float32(3)"),
    "the training flag": (
        "m = nn.Threshold(0.0, 0.0)\ndef step(s, x): return m(x) * (2 if m.training else 1)",
        "m.eval()",
    ),
    "the training flag of a child": (
        "class M(nn.Module):\n  def forward(self, x): return x * (2 if self.training else 1)\n"
        "m = nn.Sequential(nn.Sequential(M()), nn.ReLU())\ndef step(s, x): return m(x)",
        "m[0][0].eval()",
    ),
    "a member of an enum, by its value": (
        "from enum import Enum\nclass E(Enum): A, B = 2.0, 3.0\nm = E.A\ndef step(s, x): return x * m.value",
        "m = E.B",
    ),
    "a member of an enum, in a table": (
        "from enum import Enum\nclass E(Enum): A, B = 1, 2\ntable, m = {E.A: 2.0, E.B: 3.0}, E.A\n"
        "def step(s, x): return x * table[m]",
        "m = E.B",
    ),
    "a member of an enum of strings": (
        "from enum import Enum\nclass E(str, Enum): A, B = 'sum', 'mean'\nm = E.A\n"
        "def step(s, x): return x.sum() if m == E.A else x.mean()",
        "m = E.B",
    ),
    "a member of an enum of integers, as an attribute": (
        "from enum import IntEnum\nclass E(IntEnum): A, B = 2, 3\nclass C: m = E.A\nc = C()\n"
        "def step(s, x): return x * c.m",
        "c.m = E.B",
    ),
    "a global of an enum's method": (
        "from enum import Enum\nclass E(Enum):\n  A = 2.0\n  def scaled(self): return a * self.value\na, m = 1.0, E.A\n"
        "def step(s, x): return x * m.scaled()",
        "a = 2.0",
    ),
    "a number of a class of its own": (
        "class Metres(float): pass\na = Metres(2)\ndef step(s, x): return x * a",
        "a = Metres(3)",
    ),
    "a text of a class of its own": (
        "class Name(str): pass\nk = Name('sum')\ndef step(s, x): return getattr(x * s['w'], k)()",
        "k = Name('mean')",
    ),
    "an attribute of a list of a class of its own": (
        "class Bag(list): pass\nb = Bag()\nb.a = 2.0\ndef step(s, x): return x * b.a",
        "b.a = 3.0",
    ),
    "a global of a named tuple's method": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n  n: int\n  def scaled(self): return a * self.n\na, p = 1.0, P(2)\n"
        "def step(s, x): return x * p.scaled()",
        "a = 2.0",
    ),
    "an object that is a key": (
        "class K: pass\nk, other = K(), K()\ntable = {k: 2.0, other: 3.0}\ndef step(s, x): return x * table[k]",
        "k = other",
    ),
    "an object that is in a set": (
        "class K: pass\nk, other = K(), K()\nchosen = {k}\ndef step(s, x): return x * 2 if k in chosen else x",
        "k = other",
    ),
    "an attribute that an object's item is computed from": (
        "class C:\n  a = 0.0\n  def __getitem__(self, k): return self.a + k\nc = C()\nc.a = 2.0\ndef step(s, x): return x * c[0]",
        "c.a = 3.0",
    ),
    "an attribute that an object is multiplied by": (
        "class C:\n  def __rmul__(self, x): return x * self.a\nc = C()\nc.a = 2.0\ndef step(s, x): return 1.0 * c * x",
        "c.a = 3.0",
    ),
    "an attribute that a context gives": (
        "class C:\n  def __enter__(self): return self.a\n  def __exit__(self, *_): pass\nc = C()\nc.a = 2.0\n"
        "def step(s, x):\n  with c as a: return x * a",
        "c.a = 3.0",
    ),
    "a method of what answers to every name": (
        "class C:\n  __slots__ = ()\n  def __getattr__(self, name): return 7\n  def f(self, x): return 2 * x\n"
        "c = C()\ndef step(s, x): return c.f(x)",
        "C.f = lambda self, x: 3 * x",
    ),
    "an attribute behind __getattr__": (
        "class C:\n  def __getattr__(self, name): return self.__dict__['a']\nc = C()\nc.a = 2.0\ndef step(s, x): return x * c.b",
        "c.a = 3.0",
    ),
    "an attribute in an object's dict": (
        "class C: pass\nc = C()\nc.a = 2.0\ndef step(s, x): return x * c.__dict__['a']",
        "c.a = 3.0",
    ),
    "an attribute that was not there": (
        "class C: pass\nc = C()\ndef step(s, x): return x * getattr(c, 'a', 2.0)",
        "c.a = 3.0",
    ),
    "an attribute of a namespace that was not there": (
        "from types import SimpleNamespace\nc = SimpleNamespace()\ndef step(s, x): return x * (c.a if hasattr(c, 'a') else 2.0)",
        "c.a = 3.0",
    ),
    "a global of a constructor": (
        "class C:\n  def __init__(self): self.a = b\nb = 2.0\ndef step(s, x): return x * C().a",
        "b = 3.0",
    ),
    "a global of a constructor behind super()": (
        "class B:\n  def __init__(self): self.a = b\nclass C(B):\n  def __init__(self): super().__init__()\nb = 2.0\n"
        "def step(s, x): return x * C().a",
        "b = 3.0",
    ),
    "a global that an item of a module is computed from": (
        "class M(nn.Module):\n  def __getitem__(self, k): return a\na, m = 2.0, M()\ndef step(s, x): return x * m[0]",
        "a = 3.0",
    ),
    "a module's attribute": ("m = nn.LeakyReLU(0.1)\ndef step(s, x): return m(x)", "m.negative_slope = 0.5"),
    "a module's attribute behind its __setattr__": (
        "m = nn.LeakyReLU(0.1)\ndef step(s, x): return m(x)",
        "m.__dict__['negative_slope'] = 0.5",
    ),
    "a module's new attribute": ("m = nn.Identity()\ndef step(s, x): return m(x) * getattr(m, 'a', 2.0)", "m.a = 3.0"),
    "a module's forward": ("m = nn.Identity()\ndef step(s, x): return m(x)", "m.forward = lambda x: x * 3"),
    "a class's forward": (
        "class M(nn.Module):\n  def forward(self, x): return x\nm = M()\ndef step(s, x): return m(x)",
        "M.forward = lambda self, x: x * 3",
    ),
    "a global of a module's forward": (
        "class M(nn.Module):\n  def forward(self, x): return x * a\na = 2.0\nm = nn.Sequential(M())\n"
        "def step(s, x): return m(x)",
        "a = 3.0",
    ),
    "a method of a module": (
        "class M(nn.Module):\n  def f(self, x): return x * 2\n  def forward(self, x): return self.f(x)\nm = M()\n"
        "def step(s, x): return m(x)",
        "M.f = lambda self, x: x * 3",
    ),
    "a class attribute of a module": (
        "class M(nn.Module):\n  a = 2.0\n  def forward(self, x): return x * self.a\nm = M()\ndef step(s, x): return m(x)",
        "M.a = 3.0",
    ),
    "a class": (
        "class M(nn.Module):\n  def forward(self, x): return x\nclass N(M):\n  def forward(self, x): return x * 2\n"
        "m = M()\ndef step(s, x): return m(x)",
        "m.__class__ = N",
    ),
    "another child": ("m = nn.Sequential(nn.ReLU())\ndef step(s, x): return m(x)", "m[0] = nn.Tanh()"),
    "one child more": ("m = nn.Sequential(nn.ReLU())\ndef step(s, x): return m(x)", "m.append(nn.Tanh())"),
    "a child put into a ModuleDict": (
        "m = nn.ModuleDict({'a': nn.ReLU()})\ndef step(s, x): return m['a'](x)",
        "m['a'] = nn.Tanh()",
    ),
    "a hook": ("m = nn.ReLU()\ndef step(s, x): return m(x)", "m.register_forward_hook(lambda m, a, out: out * 2)"),
    "a hook removed": (
        "m = nn.ReLU()\nh = m.register_forward_hook(lambda m, a, out: out * 2)\ndef step(s, x): return m(x)",
        "h.remove()",
    ),
    "a hook's global": (
        "a = 2.0\nm = nn.ReLU()\nm.register_forward_pre_hook(lambda m, args: (args[0] * a,))\ndef step(s, x): return m(x)",
        "a = 3.0",
    ),
    "a global hook": (
        "m = nn.ReLU()\ndef step(s, x): return m(x)",
        "h = nn.modules.module.register_module_forward_hook(lambda m, a, out: out * 2)",
    ),
    "another buffer": (
        "m = nn.BatchNorm1d(4, affine=False).eval()\ndef step(s, x): return m(x[None])",
        "m.running_mean = torch.ones(4)",
    ),
    "a buffer written to": (
        "m = nn.BatchNorm1d(4, affine=False).eval()\ndef step(s, x): return m(x[None])",
        "m.running_mean.add_(1)",
    ),
    "a config of a module": (
        "class Config: pass\nclass M(nn.Module):\n  def __init__(self, c):\n    super().__init__()\n    self.config = c\n"
        "  def forward(self, x): return x * self.config.a\nc = Config()\nc.a = 2.0\nm = M(c)\ndef step(s, x): return m(x)",
        "c.a = 3.0",
    ),
    "a parametrization": (
        "from torch.nn.utils import parametrize\nm = nn.Linear(4, 4).requires_grad_(False)\n"
        "class Double(nn.Module):\n  def forward(self, w): return 2 * w\ndef step(s, x): return m(x)",
        "parametrize.register_parametrization(m, 'weight', Double())",
    ),
    "what a scheduler of torch's returns": (
        "o=torch.optim.SGD([torch.zeros(1)],lr=1.0)\nsched=torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k)\ndef step(s,x): return x*sched.get_last_lr()[0]",
        "o.step(); sched.step()",
    ),
    "what a bound method of a scheduler returns": (
        "o=torch.optim.SGD([torch.zeros(1)],lr=1.0)\nsched=torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k)\nget=sched.get_last_lr\ndef step(s,x): return x*get()[0]",
        "o.step(); sched.step()",
    ),
    "an entry of an optimizer of torch's": (
        "o=torch.optim.SGD([torch.zeros(1)],lr=1.0)\ndef step(s,x): return x*o.param_groups[0]['lr']",
        "o.param_groups[0]['lr']=.25",
    ),
    "an entry of a class of one's own over a library's": (
        "import collections\nclass S(collections.UserDict): pass\nc=S(w=1.0)\ndef step(s,x): return x*c['w']",
        "c['w']=.5",
    ),
    "an entry of a list of a library's": (
        "import collections\nc=collections.UserList([1.0])\ndef step(s,x): return x*c[0]",
        "c[0]=.5",
    ),
    "a dict behind a library's": (
        "import collections\nbase={'w':1.0}\nc=collections.ChainMap({},base)\ndef step(s,x): return x*c['w']",
        "base['w']=.5",
    ),
    "a configuration file's option": (
        "import configparser\nc=configparser.ConfigParser()\nc['l']={'w':'1.0'}\ndef step(s,x): return x*c.getfloat('l','w')",
        "c['l']['w']='0.5'",
    ),
    "a variable of the environment": (
        "import os\nos.environ['LW']='1.0'\ndef step(s,x): return x*float(os.environ['LW'])",
        "os.environ['LW']='0.5'",
    ),
    "a variable of the environment, by a function": (
        "import os\nos.environ['LW']='1.0'\ndef step(s,x): return x*float(os.getenv('LW'))",
        "os.environ['LW']='0.5'",
    ),
    "a distribution's attribute": (
        "d=torch.distributions.Normal(torch.tensor(0.),torch.tensor(1.))\ndef step(s,x): return x/d.scale",
        "d.scale=torch.tensor(2.)",
    ),
    "what a distribution's method reads": (
        "d=torch.distributions.Normal(torch.tensor(1.),torch.tensor(1.))\ndef step(s,x): return d.log_prob(x)",
        "d.scale=torch.tensor(2.)",
    ),
    "a context variable": (
        "import contextvars\nv=contextvars.ContextVar('v',default=1.0)\ndef step(s,x): return x*v.get()",
        "v.set(.5)",
    ),
    "a bound method's object": (
        "class C:\n  a=1.0\n  def f(self): return self.a\nc=C()\nm=c.f\ndef step(s,x): return x*m()",
        "c.a=.5",
    ),
    "a bound method of a dict": ("d={'a':1.0}\ng=d.get\ndef step(s,x): return x*g('a')", "d['a']=.5"),
    "what a descriptor keeps": (
        "import weakref\nclass D:\n  def __init__(self): self.v=weakref.WeakKeyDictionary()\n  def __get__(self,o,k): return self.v[o]\n  def __set__(self,o,x): self.v[o]=x\nclass C:\n  a=D()\nc=C()\nc.a=1.0\ndef step(s,x): return x*c.a",
        "c.a=.5",
    ),
    "what a descriptor puts under another name": (
        "class D:\n  def __set_name__(self,k,n): self.n='_'+n\n  def __get__(self,o,k): return getattr(o,self.n)\n  def __set__(self,o,x): setattr(o,self.n,x)\nclass C:\n  a=D()\nc=C()\nc.a=1.0\ndef step(s,x): return x*c.a",
        "c.a=.5",
    ),
    "a metaclass's attribute": (
        "class M(type):\n  a=1.0\nclass C(metaclass=M): pass\ndef step(s,x): return x*C.a",
        "M.a=.5",
    ),
    "a global of a metaclass's __call__": (
        "class M(type):\n  def __call__(cls): return b\nclass C(metaclass=M): pass\nb=1.0\ndef step(s,x): return x*C()",
        "b=.5",
    ),
    "a class attribute that comes to shadow an inherited one": (
        "class A: a=1.0\nclass B(A): pass\ndef step(s,x): return x*B.a",
        "B.a=3.0",
    ),
    "a method that comes to shadow an inherited one": (
        "class A:\n  def f(self, x): return x\nclass B(A): pass\nb=B()\ndef step(s,x): return b.f(x)",
        "B.f=lambda self, x: 3*x",
    ),
    "a property that comes to shadow an inherited attribute": (
        "class A: a=1.0\nclass B(A): pass\nb=B()\ndef step(s,x): return x*b.a",
        "B.a=property(lambda self: 3.0)",
    ),
    "an attribute that comes to shadow one of a metaclass": (
        "class M(type): a=1.0\nclass C(metaclass=M): pass\ndef step(s,x): return x*C.a",
        "C.a=3.0",
    ),
    "a forward that comes to shadow an inherited one": (
        "class A(nn.Module):\n  def forward(self, x): return x\nclass B(A): pass\nm=B()\ndef step(s,x): return m(x)",
        "B.forward=lambda self, x: 3*x",
    ),
    "an attribute that comes onto a class": (
        "class A: pass\no=A()\ndef step(s,x): return x*getattr(o,'z',1.0)",
        "A.z=3.0",
    ),
    "a class's attribute that some code did without": (
        "class A: pass\ndef step(s,x): return x*(A.z if hasattr(A,'z') else 1.0)",
        "A.z=3.0",
    ),
    "an attribute that comes onto a module's class": (
        "class L(nn.Module):\n  def forward(self, x): return x*getattr(self,'scale',1.0)\nm=L()\ndef step(s,x): return m(x)",
        "L.scale=3.0",
    ),
    "a method that comes between, behind super()": (
        "class P(nn.Module):\n  def forward(self, x): return x*2\nclass Q(P): pass\nclass A(Q):\n"
        "  def forward(self, x): return super().forward(x)\nm=A()\ndef step(s,x): return m(x)",
        "Q.forward=lambda self, x: x*3",
    ),
    "a special method that comes onto a class": (
        "class A: pass\no=A()\ndef step(s,x): return x*(1.0 if o else 3.0)",
        "A.__bool__=lambda self: False",
    ),
    "a property over an attribute of an object": (
        "class A: pass\no=A()\no.k=1.0\ndef step(s,x): return x*o.k",
        "A.k=property(lambda self: 3.0)",
    ),
    "a __call__ that comes onto a module's class": (
        "class A(nn.Identity): pass\nm=A()\ndef step(s,x): return m(x)",
        "A.__call__=lambda self, x: 3*x",
    ),
    "a forward that comes to shadow one of torch's": (
        "class B(nn.Identity): pass\nm=B()\ndef step(s,x): return m(x)",
        "B.forward=lambda self, x: 3*x",
    ),
    "an attribute that comes into a module": (
        "import sys,types as T\nM=T.ModuleType('mym6')\nM.y=2.0\ndef step(s,x): return x*getattr(M,'z',M.y)",
        "M.z=3.0",
    ),
    "a module's __getattr__": (
        "import sys,types as T\nM=T.ModuleType('mym7')\ndef step(s,x): return x*getattr(M,'z',1.0)",
        "M.__getattr__=lambda name: 3.0",
    ),
    "a module that could not be imported": (
        "import sys,types as T\ndef step(s,x):\n  try: import mym8\n  except ImportError: return x\n  return x*mym8.z",
        "sys.modules['mym8']=T.ModuleType('mym8'); sys.modules['mym8'].z=3.0",
    ),
    "an attribute that comes onto a library's class": (
        "import fractions\ndef step(s,x): return x*getattr(fractions.Fraction,'pace',1.0)",
        "fractions.Fraction.pace=3.0",
    ),
    "an attribute of a class of torch's modules": (
        "nn.Identity.pace=1.0\nm=nn.Identity()\ndef step(s,x): return m(x)*m.pace",
        "nn.Identity.pace=3.0",
    ),
    "an attribute that comes onto a parameter": (
        "m=nn.Linear(2,2)\ndef step(s,x): return x*getattr(m.weight,'pace',1.0)",
        "m.weight.pace=3.0",
    ),
    "a slot that is filled": (
        "class C: __slots__=('a',)\nc=C()\ndef step(s,x): return x*getattr(c,'a',1.0)",
        "c.a=3.0",
    ),
    "a cell that is filled": (
        "def make():\n  def f(x):\n    try: return x*v\n    except NameError: return x\n  def put():\n    nonlocal v\n    v=3.0\n"
        "  if 0: v=1\n  return f,put\nf,put=make()\ndef step(s,x): return f(x)",
        "put()",
    ),
    "a name of builtins": ("import builtins\nbuiltins.pace=1.0\ndef step(s,x): return x*pace", "builtins.pace=3.0"),
    "another partial method": (
        "class C:\n  def f(self,y): return y\n  g=functools.partialmethod(f,2.0)\nc=C()\ndef step(s,x): return x*c.g()",
        "C.g=functools.partialmethod(C.f,3.0)",
    ),
    "an argument of a partial method": (
        "class C:\n  a=[2.0]\n  def f(self,y): return y[0]\n  g=functools.partialmethod(f,a)\nc=C()\ndef step(s,x): return x*c.g()",
        "C.a[0]=3.0",
    ),
    "an object that is a static method": (
        "class K:\n  k=1.0\n  def __call__(self): return self.k\nk=K()\nclass C: g=staticmethod(k)\nc=C()\ndef step(s,x): return x*c.g()",
        "k.k=3.0",
    ),
    "a method whose function is an object": (
        "import types\nclass K:\n  k=1.0\n  def __call__(self,x): return x*self.k\nk=K()\nm=types.MethodType(k,X)\ndef step(s,x): return m()",
        "k.k=3.0",
    ),
    "how an object is written": (
        "class K:\n  name='sum'\n  def __str__(self): return self.name\nk=K()\ndef step(s,x): return getattr(x,f'{k}')()",
        "k.name='mean'",
    ),
    "how an object is copied": (
        "import copy\nclass K:\n  def __copy__(self): return k\nk=1.0\no=K()\ndef step(s,x): return x*copy.copy(o)",
        "k=3.0",
    ),
    "what is registered with an abstract class": (
        "import abc\nclass A(abc.ABC): pass\nclass B: pass\nb=B()\ndef step(s,x): return x*(3 if isinstance(b,A) else 1)",
        "A.register(B)",
    ),
    "what is registered with a library's abstract class": (
        "import collections.abc as cabc\nclass B: pass\ndef step(s,x): return x*(3 if issubclass(B,cabc.Mapping) else 1)",
        "cabc.Mapping.register(B)",
    ),
    "what is registered with a class of a pattern": (
        "import abc\nclass A(abc.ABC): pass\nclass B: pass\nb=B()\ndef step(s,x):\n  match b:\n    case A(): return x*3\n    case _: return x",
        "A.register(B)",
    ),
    "what a protocol finds in an object": (
        "from typing import Protocol, runtime_checkable\n@runtime_checkable\nclass P(Protocol):\n  q: int\nclass B: pass\nb=B()\n"
        "def step(s,x): return x*(3 if isinstance(b,P) else 1)",
        "b.q=1",
    ),
    "what a protocol finds in a class": (
        "from typing import Protocol, runtime_checkable\n@runtime_checkable\nclass P(Protocol):\n  def q(self): ...\nclass B: pass\nb=B()\n"
        "def step(s,x): return x*(3 if isinstance(b,P) else 1)",
        "B.q=lambda self: 1",
    ),
    "how torch calls a module": (
        "class A(nn.Identity): pass\nm=A()\ndef step(s,x): return m(x)",
        "A._call_impl=lambda self, x: 3*x",
    ),
    "how torch calls all modules": (
        "m=nn.Identity()\ndef step(s,x): return m(x)",
        "nn.Module._call_impl=lambda self, x: 3*x",
    ),
    "a __call__ that comes onto a class of torch's": (
        "m=nn.Identity()\ndef step(s,x): return m(x)",
        "nn.Identity.__call__=lambda self, x: 3*x",
    ),
    "what a mock returns": (
        "from unittest.mock import MagicMock\nm=MagicMock(return_value=1.0)\ndef step(s,x): return x*m()",
        "m.return_value=3.0",
    ),
    "a list in lists": (
        "inner=[1.0]\nouter=inner\nfor _ in range(2000): outer=[outer]\ndef at(x):\n  while type(x) is list: x=x[0]\n  return x\n"
        "def step(s,x): return x*at(outer)",
        "inner[0]=3.0",
    ),
    "an attribute of a class whose metaclass answers every name": (
        "class M(type):\n  def __getattr__(cls,name): return 7\nclass C(metaclass=M): a=1.0\nc=C()\ndef step(s,x): return x*c.a",
        "C.a=3.0",
    ),
    "an attribute behind a metaclass that answers every name": (
        "class M(type):\n  def __getattribute__(cls,name): return 7\nclass C(metaclass=M): pass\nc=C()\nc.a=1.0\ndef step(s,x): return x*c.a",
        "c.a=3.0",
    ),
    "an attribute behind super()": (
        "class A: a=1.0\nclass B(A):\n  a=7.0\n  def f(self): return super().a\nc=B()\ndef step(s,x): return x*c.f()",
        "A.a=.5",
    ),
    "another implementation of a generic function": (
        "@functools.singledispatch\ndef f(y): return 1.0\nc=2\ndef step(s,x): return x*f(c)",
        "f.register(int)(lambda y: .5)",
    ),
    "a global of a generic method": (
        "class C:\n  @functools.singledispatchmethod\n  def f(self,y): return 1.0\n  @f.register\n  def _(self,y: int): return b\nb=1.0\nc=C()\ndef step(s,x): return x*c.f(2)",
        "b=.5",
    ),
    "an attribute of a function": ("def step(s,x): return x*step.lr\nstep.lr=1.0", "step.lr=.5"),
    "an attribute of a partial": ("f=functools.partial(len)\nf.lr=1.0\ndef step(s,x): return x*f.lr", "f.lr=.5"),
    "whether a parameter requires grad": (
        "m=nn.Linear(2,2)\ndef step(s,x): return x*sum(p.numel() for p in m.parameters() if p.requires_grad)",
        "m.weight.requires_grad_(False)",
    ),
    "an attribute of a parameter": (
        "m=nn.Linear(2,2)\nm.weight.lr=1.0\ndef step(s,x): return x*m.weight.lr",
        "m.weight.lr=.5",
    ),
    "an array of 8 KB": ("t=np.linspace(1,2,1000)\ndef step(s,x): return x*float(t[3])", "t[:]=7"),
    "a function of torch's": ("def step(s,x): return torch.sin(x)", "_old=torch.sin; torch.sin=torch.cos"),
    "a number of a library's module": (
        "import colorsys\ndef step(s,x): return x*colorsys.ONE_THIRD",
        "colorsys.ONE_THIRD=3.0",
    ),
    "an attribute of a library's class": (
        "import fractions\nfractions.Fraction.rate=1.0\ndef step(s,x): return x*fractions.Fraction.rate",
        "fractions.Fraction.rate=.5",
    ),
    "a deque": ("import collections\nq=collections.deque([1.0])\ndef step(s,x): return x*q[0]", "q.appendleft(.5)"),
    "the order of a dict": (
        "import collections\nq=collections.OrderedDict(a=1.0,b=2.0)\ndef step(s,x): return x*next(iter(q.values()))",
        "q.move_to_end('a')",
    ),
    "a dict behind a proxy": (
        "import types\nb={'a':1.0}\nq=types.MappingProxyType(b)\ndef step(s,x): return x*q['a']",
        "b['a']=.5",
    ),
    "a dict behind a view": ("b={'a':1.0}\nq=b.values()\ndef step(s,x): return x*list(q)[0]", "b['a']=.5"),
    "bytes that can be written": ("q=bytearray(b'\\x01')\ndef step(s,x): return x*q[0]", "q[0]=5"),
    "an object behind a weak reference": (
        "import weakref\nclass C: a=1.0\nc=C()\nr=weakref.ref(c)\ndef step(s,x): return x*r().a",
        "c.a=.5",
    ),
    "an attribute by an attrgetter": (
        "import operator\nclass C: a=1.0\nc=C()\ng=operator.attrgetter('a')\ndef step(s,x): return x*g(c)",
        "c.a=.5",
    ),
    "a global by its name": ("a=1.0\ndef step(s,x): return x*globals()['a']", "a=.5"),
    "a global in an expression": ("a=1.0\ndef step(s,x): return x*eval('a+0')", "a=.5"),
    "a module imported inside": (
        "import sys,types as T\nm=T.ModuleType('mym2')\nm.lr=1.0\nsys.modules['mym2']=m\ndef step(s,x):\n  import mym2\n  return x*mym2.lr",
        "m.lr=.5",
    ),
    "a name imported inside": (
        "import sys,types as T\nm=T.ModuleType('mym3')\nm.lr=1.0\nsys.modules['mym3']=m\ndef step(s,x):\n  from mym3 import lr\n  return x*lr",
        "m.lr=.5",
    ),
    "a module imported by its name": (
        "import sys,types as T,importlib\nm=T.ModuleType('mym5')\nm.lr=1.0\nsys.modules['mym5']=m\ndef step(s,x): return x*importlib.import_module('mym5').lr",
        "m.lr=.5",
    ),
    "a module by its name": (
        "import sys,types as T\nm=T.ModuleType('mym')\nm.lr=1.0\nsys.modules['mym']=m\ndef step(s,x): return x*sys.modules['mym'].lr",
        "m.lr=.5",
    ),
    "an object's partial method": (
        "class C:\n  def f(self,y): return self.b*y\n  g=functools.partialmethod(f,2.0)\nc=C()\nc.b=1.0\ndef step(s,x): return x*c.g()",
        "c.b=.5",
    ),
    "a global of a decorator": (
        "def deco(f):\n  @functools.wraps(f)\n  def g(*a): return f(*a)*b\n  return g\nb=1.0\n@deco\ndef h(x): return x\ndef step(s,x): return h(x)",
        "b=.5",
    ),
    "an attribute of a decorator": (
        "class Deco:\n  def __init__(self,f): self.f=f; self.k=1.0\n  def __call__(self,x): return self.f(x)*self.k\n@Deco\ndef h(x): return x\ndef step(s,x): return h(x)",
        "h.k=.5",
    ),
    "an attribute by a pattern": (
        "class C: pass\nc=C()\nc.kind=1.0\ndef step(s,x):\n  match c:\n    case C(kind=k): return x*k",
        "c.kind=.5",
    ),
    "an attribute by its place in a pattern": (
        "class C: __match_args__=('kind',)\nc=C()\nc.kind=1.0\ndef step(s,x):\n  match c:\n    case C(k): return x*k",
        "c.kind=.5",
    ),
    "an attribute of an object behind another": (
        "class T: pass\nt=T()\nt.a=1.0\nclass C:\n  def __init__(self,t): self._t=t\n  def __getattr__(self,n): return getattr(self._t,n)\nc=C(t)\ndef step(s,x): return x*c.a",
        "t.a=.5",
    ),
    "a dataclass's default": (
        "from dataclasses import dataclass\n@dataclass\nclass C: a: float=1.0\ndef step(s,x): return x*C().a",
        "C.__init__.__defaults__=(.5,)",
    ),
    "an attribute of an object in a library's": (
        "import collections\nclass C: a=1.0\nd=collections.UserDict(a=C())\ndef step(s,x): return x*d['a'].a",
        "d['a'].a=.5",
    ),
    "an entry of a library's object in one's own": (
        "import collections\nclass C: pass\nc=C()\nc.d=collections.UserDict(a=1.0)\ndef step(s,x): return x*c.d['a']",
        "c.d['a']=.5",
    ),
    "the truth of an object": (
        "class C:\n  on=False\n  def __bool__(self): return self.on\nc=C()\ndef step(s,x): return x*(2 if c else 1)",
        "c.on=True",
    ),
    "a global of an instance check": (
        "class M(type):\n  def __instancecheck__(c,o): return flag\nclass C(metaclass=M): pass\nflag=False\ndef step(s,x): return x*(2 if isinstance(3,C) else 1)",
        "flag=True",
    ),
    "an event": ("import threading\nq=threading.Event()\ndef step(s,x): return x*(2 if q.is_set() else 1)", "q.set()"),
    "a value of this thread": ("import threading\nq=threading.local()\nq.a=1.0\ndef step(s,x): return x*q.a", "q.a=.5"),
    "the bases of a class": (
        "class A:\n  w=1.0\nclass B(A): pass\nclass A2:\n  w=.5\n  def z(self): pass\nb=B()\ndef step(s,x): return x*b.w",
        "B.__bases__=(A2,)",
    ),
}


@pytest.fixture(autouse=True)
def torch_as_it_was():
    holders = (torch, nn.Module, nn.Identity)
    before = [dict(vars(x)) for x in holders]
    yield
    nn.modules.module._global_forward_hooks.clear()
    for holder, was in zip(holders, before, strict=True):
        for name in [name for name, x in vars(holder).items() if x is not was.get(name)]:
            setattr(holder, name, was[name]) if name in was else delattr(holder, name)


@pytest.mark.part(name=list(CHANGES)[::3])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, caplog):
    first, change = CHANGES[name]
    notebook = cell(first)
    made = notebook.space["step"]
    call = zerofn.compile(made, donate=False)
    caplog.set_level(logging.INFO, "zerofn")
    for _ in range(3):
        assert_same_trees(call(STATE, X), made(STATE, X))
    assert len(captured_now(caplog)) == 1, "captured again although nothing changed"
    before = made(STATE, X)
    notebook.run(change)
    now = made(STATE, X)
    assert now.dtype != before.dtype or not torch.equal(now, before), "this change is none"
    for _ in range(3):
        assert_same_trees(call(STATE, X), now)
    assert len(captured_now(caplog)) == 2


def test_nothing_changes_with_what_is_equal():
    """A cell run again, a number computed again, a config made again."""
    code = """
    def f(x, a=(1, 2)): return x * a[0] * lr * cfg.a * table["b"][0]
    class C: pass
    def config():
        c = C()
        c.a = 2.0
        return c
    def again():
        global lr, cfg, table
        lr, cfg, table = float("0.5"), config(), {"b": [1]}
    again()
    """
    notebook = cell(f"{textwrap.dedent(code)}\ndef step(s, x): return f(x)")
    call = zerofn.compile(notebook.space["step"])
    first = call(STATE, X)
    kept = notebook.space["C"]
    notebook.run(code)
    notebook.space["C"] = notebook.space["cfg"].__class__ = kept
    for _ in range(3):
        notebook.space["again"]()
        assert torch.equal(call(STATE, X), first)
    assert len(captures_of(call)) == 1


def test_going_back_finds_the_earlier_capture():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    params = {k: v.detach() for k, v in module.named_parameters()}
    key = torch.tensor(3)

    def step(state, x):
        with zerofn.random.randomness(key):
            return functional_call(module, state, (x,))

    call = zerofn.compile(step)
    made = []
    for k in range(6):
        module.train(k % 2 == 0)
        assert torch.equal(call(params, X), step(params, X))
        made.append(len(captures_of(call)))
    assert made == [1, 2, 2, 2, 2, 2]


def test_few_captures_are_kept():
    notebook = cell("a = 0.0\ndef step(s, x): return x * a")
    call = zerofn.compile(notebook.space["step"])
    for k in range(7):
        notebook.space["a"] = float(k)
        assert torch.equal(call(STATE, X), X * k)
    assert len(captures_of(call)) == KEPT


WRITTEN = {
    "a global": ("n = 0\ndef step(s, x):\n  global n\n  n += 1\n  return x * 2", "global n"),
    "a list": ("seen = []\ndef step(s, x):\n  seen.append(1)\n  return x * 2", "global seen"),
    "a dict": ("seen = {}\ndef step(s, x):\n  seen[len(seen)] = 1\n  return x * 2", "global seen"),
    "an object": (
        "class C:\n  n = 0\n  def step(self, s, x):\n    self.n += 1\n    return x * 2\nc = C()\nstep = c.step",
        "step.n",
    ),
    "a cell": (
        "def make():\n  n = 0\n  def step(s, x):\n    nonlocal n\n    n += 1\n    return x * 2\n  return step\n"
        "step = make()",
        "step: n",
    ),
    "a module": (
        "class M(nn.Module):\n  n = 0\n  def forward(self, x):\n    self.n += 1\n    self.last = [x.shape]\n"
        "    return x * 2\nm = M()\ndef step(s, x): return m(x)",
        "global m.n",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_step_itself_writes_is_said_once(name, caplog):
    code, place = WRITTEN[name]
    notebook = cell(code)
    call = zerofn.compile(notebook.space["step"])
    with caplog.at_level(logging.INFO, "zerofn"):
        for rows in (1, 1, 2, 2, 1, 3):
            notebook.space["step"](STATE, X)  # as an evaluation without capture would
            assert torch.equal(call(STATE, X.repeat(rows)), X.repeat(rows) * 2)
    assert len(captures_of(call)) == 3
    said = [r.getMessage() for r in caplog.records if "writes" in r.getMessage()]
    assert f"step: writes {place}" in said[0]
    assert sum(place in message for message in said) == 1


def run_logged(code, changes, caplog, **options):
    """The step of a cell run before and after each change, always equal to eager; what was logged."""
    notebook = cell(code)
    call = zerofn.compile(notebook.space["step"], donate=False, **{k: v(notebook.space) for k, v in options.items()})
    with caplog.at_level(logging.INFO, "zerofn"):
        for change in ["", *changes]:
            notebook.run(change)
            assert_same_trees(call(STATE, X), notebook.space["step"](STATE, X))
    return call, [r.getMessage() for r in caplog.records]


def test_what_a_library_loads_when_it_is_first_named_is_nothing_that_the_step_writes(caplog, monkeypatch):
    monkeypatch.delitem(vars(zerofn), "world_size", raising=False)
    step = zerofn.compile(lambda state, x: x / zerofn.world_size())
    with caplog.at_level(logging.INFO, "zerofn"):
        assert step({"w": torch.ones(2)}, torch.tensor(3.0)) == 3
    assert "writes" not in caplog.text


def test_of_a_function_that_looks_at_its_arguments_only_what_it_wraps_is_read():
    """What the check knows of each argument would be compared at every call."""
    facts = [
        Walk().read({"step": step}, ()).facts
        for step in (lambda state, x: x / zerofn.world_size(), lambda state, x: zerofn.remat(x))
    ]
    assert all("__wrapped__" not in path and "by_name" not in path for each in facts for path in each)


def test_of_what_zerofns_optimizers_hold_nothing_is_told_as_frozen():
    """A user would take a rate for frozen that every step reads from the state."""
    tx = optim.inject_hyperparams(optim.adamw)(1e-3, weight_decay=0.01)
    assert Walk().read({"state.tx": tx}).left == []


def test_of_what_a_trainers_own_step_leaves_out_only_the_users_names_are_told(caplog):
    """Nobody can pass `watch=` to the step of a Trainer."""
    ours, theirs = guards.LeftOut("ours", zerofn.compile), guards.LeftOut("theirs", run_logged)
    with caplog.at_level(logging.INFO, "zerofn"):
        for left_out in (ours, theirs):
            left_out.frozen(["train_step: trainer", "global config.data"])
            left_out.without_effect(["make: mask"])
    said = [r.getMessage() for r in caplog.records]
    assert [x.split(" are frozen")[0] for x in said if "frozen" in x] == [
        "ours: the values in global config.data",
        "theirs: the values in train_step: trainer, global config.data",
    ]
    assert [x.split(" changed")[0] for x in said if "changed" in x] == ["theirs: make: mask"]


def test_what_changes_in_a_librarys_object_without_effect_is_not_looked_at_again(caplog):
    """A scheduler counts its steps, which changes nothing while its rate stays."""
    code = """
    opt = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    sched = torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.5)
    def step(s, x): return x * sched.get_last_lr()[0]
    """
    call, said = run_logged(code, ["opt.step(); sched.step()"] * 8, caplog)
    assert len(captures_of(call)) == 3  # rates 1, 1/2 and 1/4
    assert (
        sum("sched.last_epoch" in x and "the graph is the same, so it is not watched any more" in x for x in said) == 1
    )


def test_what_is_not_followed_is_told_once_and_followed_where_it_is_watched(caplog):
    code = """
    import collections
    outer = collections.UserDict(inner=collections.UserDict(a=2.0))
    def step(s, x): return x * outer["inner"]["a"]
    """
    call, said = run_logged(code, ["x = 1", "x = 2"], caplog)
    assert sum("the values in global outer.data['inner'] are frozen at capture" in x for x in said) == 1
    change = ["outer['inner']['a'] = 3.0"]
    call, said = run_logged(code, change, caplog, watch=lambda space: [space["outer"]])
    assert len(captures_of(call)) == 2 and "watch[0].data['inner'].data['a'] 2.0 -> 3.0" in said[-1]
    watched = lambda space: [lambda: space["outer"]["inner"]["a"]]  # noqa: E731
    call, said = run_logged(code, ["pass", *change], caplog, watch=watched)
    assert len(captures_of(call)) == 2 and "watch[0] 2.0 -> 3.0" in said[-1]


HIDDEN = "\nhidden = np.frompyfunc(lambda k: z(), 1, 1)  # a function in C, whose object shows nothing\n"
WATCHED = {
    "a class's attribute": ("class A: z = 1.0\nobj = A()\ndef z(): return obj.z", "A.z = 3.0"),
    "an attribute that comes onto a class": (
        "class A: pass\nobj = A()\ndef z(): return getattr(obj, 'z', 1.0)",
        "A.z = 3.0",
    ),
    "an attribute of a base": ("class B: z = 1.0\nclass A(B): pass\nobj = A()\ndef z(): return obj.z", "B.z = 3.0"),
    "a method": ("class A:\n  def z(self): return 1.0\nobj = A()\ndef z(): return obj.z()", "A.z = lambda self: 3.0"),
    "a property": ("class A:\n  z = property(lambda self: 1.0)\nobj = A()\ndef z(): return obj.z", "A.z = 3.0"),
    "a list of a class": ("class A: z = [1.0]\nobj = A()\ndef z(): return obj.z[0]", "A.z[0] = 3.0"),
    "a slot": ("class A: __slots__ = ('z',)\nobj = A()\nobj.z = 1.0\ndef z(): return obj.z", "obj.z = 3.0"),
    "a class": ("class obj: z = 1.0\ndef z(): return obj.z", "obj.z = 3.0"),
    "a module": ("import types\nobj = types.ModuleType('m')\nobj.z = 1.0\ndef z(): return obj.z", "obj.z = 3.0"),
    "a class of modules": ("class A(nn.Module): z = 1.0\nobj = A()\ndef z(): return obj.z", "A.z = 3.0"),
}


@pytest.mark.parametrize("name", WATCHED)
def test_all_of_what_is_watched_is_followed(name, caplog):
    first, change = WATCHED[name]
    code = f"{first}{HIDDEN}def step(s, x): return x * hidden(1)"
    call, _ = run_logged(code, ["pass", change], caplog, watch=lambda space: [space["obj"]])
    assert len(captures_of(call)) == 2


def test_what_is_not_what_its_class_says_is_told_and_not_followed(caplog):
    code = """
    class Lie:
        __class__ = property(lambda self: list)
        a = 2.0
    lie = Lie()
    def step(s, x): return x * lie.a
    """
    call, said = run_logged(code, ["pass"], caplog)
    assert len(captures_of(call)) == 1 and any("the values in global lie are frozen at capture" in x for x in said)


def test_a_module_that_the_step_imports_first_is_followed(caplog, monkeypatch, tmp_path):
    (tmp_path / "imported_by_a_step.py").write_text("a = 2.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_by_a_step", raising=False)
    code = "import sys\ndef step(s, x):\n  import imported_by_a_step\n  return x * imported_by_a_step.a"
    notebook = cell(code)
    call = zerofn.compile(notebook.space["step"])
    with caplog.at_level(logging.INFO, "zerofn"):
        assert torch.equal(call(STATE, X), 2 * X)
        notebook.run("sys.modules['imported_by_a_step'].a = 3.0")
        assert torch.equal(call(STATE, X), 3 * X)
    assert "writes" not in caplog.text


def test_a_watch_that_is_no_list_is_refused():
    with pytest.raises(
        TypeError, match=r"compile: watch must be a list, got 'lr'.*watch=\[settings, lambda: len\(vocabulary\)\]"
    ):
        zerofn.compile(lambda s, x: x, watch="lr")


def alone_on_one_rank():
    """Rank 0 alone has a scheduler that counts on, as it alone has a progress bar or a writer."""
    opt = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 2.0)
    train_step = step_with(lambda p, x: (p["w"] * x).sum() * sched.get_last_lr()[0])

    make = lambda: zerofn.TrainState.create(params={"w": torch.ones(4)}, tx=optim.sgd(0.1))  # noqa: E731
    state, call = zerofn.shard(make, stage=3), zerofn.compile(train_step)
    losses = []
    for _ in range(4):
        state, loss = call(state, X)
        losses.append(loss.item())
        if zerofn.rank() == 0:
            opt.step()
            sched.step()
    return losses, len(captures_of(call))


def test_a_librarys_object_may_change_on_one_rank_alone(ranks):
    first, second = ranks(2, alone_on_one_rank)
    assert first == second and first[1] == 1 and len(set(first[0])) == 4


def test_a_check_tells_of_a_stale_capture_in_words(monkeypatch):
    """`ZEROFN_CHECK` captures again; it sees what no reading does."""
    monkeypatch.setattr(guards, "CHECK", 2)
    table = {"scale": 2.0}
    hidden = np.frompyfunc(lambda x: x * table["scale"], 1, 1)  # a function in C, whose object shows nothing

    def step(state, x):
        return x * hidden(1.0)

    call = zerofn.compile(step)
    for _ in range(4):  # the first is captured, the third is checked
        call(STATE, X)
    table["scale"] = 3.0
    with pytest.raises(guards.StaleCapture, match=r"aten.mul.Tensor.*2.0.* is now .*3.0.*watch=\[\.\.\.\]"):
        call(STATE, X)


LOGGED = {
    "a global number": "(global a 2.0 -> 3.0)",
    "a redefined function": "(global f was redefined)",
    "a list": "(global lr[0] 2.0 -> 0.0)",
    "a longer list": "(global lr has 2 entries instead of 1; global lr[1] nothing -> 1.0)",
    "a closure cell": "(f: a 2.0 -> 3.0)",
    "another tensor": "(global t is another object)",
    "a tensor written to": "(global t was written to)",
    "the training flag": "(global m.training True -> False)",
    "a module's attribute": "(global m.negative_slope 0.1 -> 0.5)",
    "another child": "(global m.0 is another object",
    "a config of a module": "(global m.config.a 2.0 -> 3.0)",
    "a member of an enum of strings": "(global m E.A -> E.B",
    "a number of a class of its own": "(global a Metres(2.0) -> Metres(3.0))",
}


@pytest.mark.parametrize("name", LOGGED)
def test_the_log_names_what_changed(name, caplog):
    first, change = CHANGES[name]
    notebook = cell(first)
    call = zerofn.compile(notebook.space["step"])
    with caplog.at_level(logging.INFO, "zerofn"):
        call(STATE, X)
        notebook.run(change)
        call(STATE, X)
    assert LOGGED[name] in caplog.records[-1].getMessage()


def test_a_schedule_of_the_optimizer_is_followed():
    rates = [0.1]
    tx = optim.sgd(lambda count: rates[0])
    make = lambda: zerofn.TrainState.create(params={"w": torch.ones(4)}, tx=tx)  # noqa: E731
    step = step_with(lambda p, x: (p["w"] * x).sum())

    call, state, plain = zerofn.compile(step), make(), make()
    for rate in (0.1, 0.1, 0.0, 0.1, 0.5):
        rates[0] = rate
        state, plain = call(state, X)[0], step(plain, X)[0]
        assert float(state.learning_rate) == rate
        assert_same_trees(state.params, plain.params)
    assert len(captures_of(call)) == 3


@pytest.fixture
def torchs_settings():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.backends.cuda.enable_flash_sdp(True)


def test_settings_of_torch_that_choose_operations_are_guarded(torchs_settings):
    q = torch.randn(1, 1, 4, 8)

    def step(state, x):
        w = torch.eye(4) * 1.5
        attention = nn.functional.scaled_dot_product_attention(x, x, x)
        return (w @ x.to(w.dtype)), attention

    call, made = zerofn.compile(step), []
    changes = [
        lambda: None,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ]
    for change in changes:
        change()
        assert_same_trees(call(STATE, q), step(STATE, q))
        made.append(len(captures_of(call)))
    with torch.autocast("cpu"):
        found = call(STATE, q)
        assert found[0].dtype == torch.bfloat16
        assert_same_trees(found, step(STATE, q))
    assert made == [1, 2, 2, 3, 3] and len(captures_of(call)) == 4


def test_a_model_of_transformers_is_captured_once_for_each_mode(caplog):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32)
    module = zerofn.skeleton(lambda: transformers.LlamaForCausalLM(config))
    params = {k: torch.randn_like(v, device="cpu") * 0.1 for k, v in module.named_parameters()}
    ids = torch.arange(8)[None]

    def step(state, ids):
        return functional_call(module, state, (), {"input_ids": ids, "use_cache": False}).logits

    call = zerofn.compile(step)
    caplog.set_level(logging.INFO, "zerofn")
    for _ in range(3):
        call(params, ids)
    assert len(captured_now(caplog)) == 1
    module.eval()
    for _ in range(3):
        assert torch.equal(call(params, ids), step(params, ids))
    assert len(captured_now(caplog)) == 2
    module.config.rms_norm_eps = 0.5
    call(params, ids)
    assert "config.rms_norm_eps" in captured_now(caplog)[-1] and len(captured_now(caplog)) == 3


@torch.library.custom_op("walks::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """An operation of the user's, which torch changes when it is first called: on one rank of a pipeline perhaps."""
    return x / 2


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_the_first_call_of_an_operation_changes_nothing():
    def step(state, x):
        return halved(state["w"] * x)

    before = Walk().read({"step": step}).facts
    halved(X)
    assert Walk().read({"step": step}).facts == before
    assert any("halved" in path for path in before)


def test_nothing_is_said_of_a_chain_of_optimizers(caplog):
    """Its functions hold an `itemgetter`, which never changes."""
    caplog.set_level(logging.INFO, "zerofn")
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, mask=lambda leaf: leaf.name.endswith("weight")))
    state = state_of(build(), 0, tx)
    zerofn.compile(train_step_of(build()))(state, batch_of())
    assert not [x for x in caplog.messages if "frozen" in x]

"""The habits of this code base that a machine can check."""

import ast
import importlib
import re

from tests.support.library import FILES, LIBRARY, ORDER, ROOT, imported_modules, parse, room, room_imported

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# What stands beside the packages.
TOP_LEVEL = {"__init__", "_torch_compat", "compile", "tree"}


# These stand on the public contract, as a user's own code does.
GUESTS = ("interop", "integrations", "launch", "notebook")
PUBLIC_MODULES = {"zerofn", "zerofn.optim", "zerofn.random", "zerofn.collectives"}
CHECKS = {"zerofn.util.arguments.checked", "zerofn.util.arguments.told"}  # of their arguments, as all public names have


def wrong_in(files, check):
    """What `check(module)` finds in each file of the library, where it finds anything."""
    found = {module: list(check(module)) for module in files}
    return {module: lines for module, lines in found.items() if lines}


def upward_imports(module, tree):
    own = ORDER.index(room(module))
    for line, name in imported_modules(module, tree):
        target = room_imported(name)
        if target == "__init__" and room(module) in GUESTS:
            continue
        if target in ORDER[own + 1 :]:
            yield f"line {line}: {room(module)} imports {name}, which stands above it"


def test_modules_have_a_place_in_the_order():
    assert {room(module) for module in FILES} - set(ORDER) == set(), "give these their places in ORDER"


def test_imports_go_downward():
    placed = [module for module in FILES if room(module) in ORDER]  # of others the test above speaks
    assert wrong_in(placed, lambda module: upward_imports(module, parse(module))) == {}


def test_upward_imports_are_seen(monkeypatch):
    monkeypatch.setitem(FILES, "zerofn.tree", LIBRARY / "tree.py")
    monkeypatch.setitem(FILES, "zerofn.optim.adam", LIBRARY / "optim" / "adam.py")
    monkeypatch.setitem(FILES, "zerofn.passes.x", LIBRARY / "passes" / "x.py")
    bad = ["import zerofn", "from zerofn import shard", "from ..passes import x"]
    good = ["from ..tree import flatten", "from . import sgd", "from .. import tree"]
    for line in bad + good:
        tree = ast.parse(f"def f():\n    {line}")
        assert bool(list(upward_imports("zerofn.optim.adam", tree))) == (line in bad), line


def test_guests_import_public_names_alone():
    own = tuple(f"zerofn.{x}" for x in GUESTS)
    public = {f"{package}.{x}" for package in PUBLIC_MODULES for x in importlib.import_module(package).__all__}

    def private(module):
        names = [name for _, name in imported_modules(module, parse(module)) if name.startswith("zerofn")]
        return [x for x in names if not x.startswith(own) and x not in PUBLIC_MODULES | CHECKS | public]

    guests = [x for x in FILES if room(x) in GUESTS]
    assert guests and wrong_in(guests, private) == {}


def test_top_level_files_are_few():
    """All else has a room: a new file at the top is one more name for every reader."""
    assert {path.stem for path in LIBRARY.glob("*.py")} == TOP_LEVEL


# Those that behave otherwise on a machine that is not there; all others treat its tensors as any.
KNOW_DRY_RUNS = {
    "zerofn.cli.plan": "runs a script up to its step",
    "zerofn.comm.mesh": "makes the mesh that is planned for",
    "zerofn.compile": "stops a script at its step",
    "zerofn.sharding.shard": "lays a state out without memory for it",
    "zerofn.parallel.model_parts": "captures a microbatch of no rank",
    "zerofn.planning.plan": "makes the machine that is not there",
    "zerofn.planning.planner": "asks for how many ranks to plan",
    "zerofn.planning.plan_variants": "makes the machine that is not there",
    "zerofn.planning.rounds": "stops a script at its step",
    "zerofn.training.outer_step": "copies parameters without reading drives, and compares nothing",
    "zerofn.graph.resident": "asks which tensors lie on the host",
    "zerofn.graph.liveness": "asks which tensors lie on the host",
    "zerofn.cost.simulator": "asks which tensors lie on the host",
    "zerofn.cost.op_cost": "asks which tensors lie on the host",
    "zerofn.cost.machine": "makes one of its own kind",
    "zerofn.cost.host_share": "measures nothing for a machine that is not there",
    "zerofn.offload.policy": "asks which tensors lie on the host",
    "zerofn.offload.drive_tensor": "names the host's device",
    "zerofn.offload.host_tensor": "names the host's device",
    "zerofn.offload.disk.store": "makes no file",
    "zerofn.runs.manager": "leaves what a run has saved alone",
    "zerofn.memory.host_allocator": "leaves malloc as it is",
    "zerofn.passes.offload_activations": "names the host's device",
    "zerofn.passes.offload_gradients": "names the host's device",
    "zerofn.passes.update_on_host": "names the host's device",
    "zerofn.passes.read_local_shards": "takes the shards of no rank",
    "zerofn.passes.budget.drops": "asks which tensors lie on the host",
}


def test_few_files_know_of_dry_runs():
    def knows(module):
        return any(name.startswith("zerofn.dry_run") for _, name in imported_modules(module, parse(module)))

    found = {module for module in FILES if room(module) != "dry_run" and knows(module)}
    assert found - set(KNOW_DRY_RUNS) == set(), "say in KNOW_DRY_RUNS what these need it for"
    assert set(KNOW_DRY_RUNS) - found == set(), "take these from KNOW_DRY_RUNS"


# --- private torch names ----------------------------------------------------------------------


def is_private(name):
    """Whether a dotted torch name has a private part; operators under torch.ops are public."""
    if not name.startswith("torch.") or name.startswith("torch.ops."):
        return False
    if name.startswith(("torch.fx.experimental", "torch.testing._internal")):
        return True
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def dotted(node, names):
    """`a.b.c` of an attribute chain, its first name resolved through the file's imports."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return base and f"{base}.{node.attr}"
    return None


def private_names(tree):
    """`(line, name)` of every private torch name that code, not text, uses."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                names[bound] = alias.name if alias.asname else bound
                if is_private(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = name
                if is_private(name):
                    yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(dotted(node, names) or ""):
            yield node.lineno, dotted(node, names)


def test_private_torch_names_are_in_one_file():
    others = [module for module in FILES if module != "zerofn._torch_compat"]
    found = wrong_in(others, lambda module: sorted(set(private_names(parse(module)))))
    assert found == {}, "import these through _torch_compat"


def test_private_torch_names_are_seen():
    bad = [
        "import torch\ntorch._C._log_api_usage_once",
        "import torch.distributed as dist\ndist._x",
        "from torch.utils import _pytree",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "import torch.testing._internal.common_utils",
        "from torch import Tensor\nTensor._make_subclass",
    ]
    good = ["import torch\ntorch.__version__", "import torch\ntorch.ops.aten._to_copy", "x._y"]
    assert all(list(private_names(ast.parse(code))) for code in bad)
    assert not any(list(private_names(ast.parse(code))) for code in good)


def test_what_the_compat_file_offers_is_there():
    compat = importlib.import_module("zerofn._torch_compat")
    offered = set()
    for node in parse("zerofn._torch_compat").body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            offered |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            offered |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            offered.add(node.name)
    offered = {name for name in offered if not name.startswith("_")} - {"annotations"}
    assert offered
    assert [name for name in sorted(offered) if not hasattr(compat, name)] == []


# --- state of the process ---------------------------------------------------------------------

FACT, IMPORT = "facts that do not change", "filled while the library is imported"
ONE_THREAD, PATCH = "one of each thread or context", "guards patches, which are global"
MEASURED = "what was measured once"
# What lives as long as the process and may change is an object that `util.process.the` gives, or stands here.
PROCESS_WIDE = {
    "zerofn.util.process._objects": "the one place for it",
    "zerofn.util.process._lock": "the one place for it",
    "zerofn.ops.registry._implementations": IMPORT,
    "zerofn.ops.registry._aside": IMPORT,
    "zerofn.ops.registry._traits": IMPORT,
    "zerofn.ops.registry._known": FACT,
    "zerofn.ops.registry._places": FACT,
    "zerofn.graph.alias._views": FACT,
    "zerofn.graph.alias._pure": FACT,
    "zerofn.graph.edit._impure": FACT,
    "zerofn.tracing.shortcut._ways": FACT,
    "zerofn.random.mode._rules": FACT,
    "zerofn.sparse.patterns.causal": FACT,
    "zerofn.sparse.patterns.everything": FACT,
    "zerofn.tree._of_fields": IMPORT,
    "zerofn.tree._seen": FACT,
    "zerofn.sharding.spec._signatures": FACT,
    "zerofn.offload.disk.files._buffered": "warns once a folder",
    "zerofn.offload.disk.probe._known": MEASURED,
    "zerofn.cost.op_timer._known": MEASURED,
    "zerofn.training.checkpoint_params._lent": ONE_THREAD,
    "zerofn.random.rng_state._active": ONE_THREAD,
    "zerofn.collectives.maps._heard": ONE_THREAD,
    "zerofn.capture.unused._seen": ONE_THREAD,
    "zerofn.capture.shared_regions._regions": ONE_THREAD,
    "zerofn.capture.float8_products._seen": ONE_THREAD,
    "zerofn.moe.experts._counted": ONE_THREAD,
    "zerofn.comm.current_mesh._current": ONE_THREAD,
    "zerofn.comm.current_mesh._unlike": ONE_THREAD,
    "zerofn.parallel.check_context._attended": ONE_THREAD,
    "zerofn.parallel.context._masks": ONE_THREAD,
    "zerofn.dry_run.fake_machine._current": ONE_THREAD,
    "zerofn.util.sign_of_life._current": ONE_THREAD,
    "zerofn.dry_run.script._current": ONE_THREAD,
    "zerofn.deferred_init.record._recording": PATCH,
    "zerofn.deferred_init.skeleton._building": PATCH,
}
CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "count", "Counter", "OrderedDict", "ContextVar", "RLock"}
CONTAINERS |= {"Lock", "local", "WeakValueDictionary", "WeakKeyDictionary", "WeakSet"}


def keeps(value, classes):
    """Whether an expression makes an object in which something may be kept: empty as yet, or of a class of the file."""
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return called in classes or called in CONTAINERS and not any(isinstance(x, ast.Call) for x in value.args)


def process_wide(tree):
    """Names at the top of a file that hold what may change later; NAMES are constants."""
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
                for name, value in zip(names, values, strict=False):
                    if isinstance(name, ast.Name) and not name.id.isupper() and keeps(value, classes):
                        yield name.id


def test_what_lives_as_long_as_the_process_is_known():
    found = {f"{module}.{name}" for module in FILES for name in process_wide(parse(module))}
    assert found - set(PROCESS_WIDE) == set(), "make these objects that util.process.the gives"
    assert set(PROCESS_WIDE) - found == set(), "take these from PROCESS_WIDE"


def test_state_of_the_process_is_seen():
    bad = ["x = {}", "x: list[int] = []", "x = deque()", "def f():\n    global x\n    x = 1"]
    bad += ["class A: ...\nx, y = A(), 2", "x = weakref.WeakValueDictionary()"]
    good = ["x = {1: 2}", "x = (1, 2)", "def f():\n    x = {}", "x = dict(zip(A, B))", "x: int = 3"]
    assert all(list(process_wide(ast.parse(code))) for code in bad)
    assert not any(list(process_wide(ast.parse(code))) for code in good)


# --- sizes and words --------------------------------------------------------------------------


def kernel_files():
    endings = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
    return [path for path in sorted((ROOT / "ops").rglob("*")) if path.suffix in endings]


def wrong_about_length(text):
    """A file that is long says why, where it says what it is; and one that is not does not."""
    reason = re.search(rf"Over {MAX_FILE_LINES} lines because \S", text[:2000])
    if text.count("\n") > MAX_FILE_LINES:
        return "" if reason else f"split it, or say in its docstring: Over {MAX_FILE_LINES} lines because ..."
    return "it is short: it needs no reason" if reason else ""


def test_files_are_short_or_say_why_not():
    wrong = {str(path): wrong_about_length(path.read_text()) for path in [*FILES.values(), *kernel_files()]}
    assert {path: what for path, what in wrong.items() if what} == {}


def test_long_files_without_a_reason_are_seen():
    reason, lines = '"""What it is. Over 400 lines because X."""\n', "x = 1\n" * MAX_FILE_LINES
    assert not wrong_about_length(reason + lines) and not wrong_about_length(lines)
    assert "split it" in wrong_about_length("\n" + lines) and "no reason" in wrong_about_length(reason)


def long_functions(tree):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    lengths = [(f.name, f.end_lineno - f.lineno + 1) for f in ast.walk(tree) if isinstance(f, kinds)]
    return [(name, n) for name, n in lengths if n > MAX_FUNCTION_LINES]


def test_functions_are_short():
    assert wrong_in(FILES, lambda module: long_functions(parse(module))) == {}


def names_without_docstrings(tree):
    """Those of functions and classes; an `@overload` is one more signature of the function that follows."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    overloads = [n for n in public if "overload" in map(ast.unparse, n.decorator_list)]
    return [n.name for n in public if n not in overloads and not ast.get_docstring(n)]


def test_public_names_have_docstrings():
    assert wrong_in(FILES, lambda module: names_without_docstrings(parse(module))) == {}


def test_long_functions_and_names_without_docstrings_are_seen():
    tree = ast.parse("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES)
    assert long_functions(tree) == [("f", MAX_FUNCTION_LINES + 1)] and names_without_docstrings(tree) == ["f"]
    tree = ast.parse('def f():\n    "Return None."' + "\n    pass" * (MAX_FUNCTION_LINES - 2) + "\ndef _g(): ...")
    assert long_functions(tree) == names_without_docstrings(tree) == []
    tree = ast.parse("@overload\ndef f(x): ...\ndef f(): ...")
    assert names_without_docstrings(tree) == ["f"]


# --- one registry of operations ---------------------------------------------------------------

OPERATION_TABLES = {"zerofn.ops.registry", "zerofn._torch_compat"}


def is_operation(node):
    """Whether an expression names an operation: `torch.ops.aten.mm.default`, `ops.wait.default`, `aten.add.Tensor`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return False
    parts = [node.id, *reversed(parts)]
    if parts[:2] == ["torch", "ops"]:
        return len(parts) > 3
    return parts[0] in ("ops", "aten") and len(parts) > 2


def tables_of_operations(tree):
    """Lines of literals that hold two or more operations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            members = [*node.keys, *node.values]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set) and isinstance(
            getattr(node, "ctx", ast.Load()), ast.Load
        ):
            members = node.elts
        else:
            continue
        if sum(is_operation(x) for x in members if x is not None) > 1:
            yield node.lineno


def test_tables_of_operations_stand_in_the_registry():
    others = [module for module in FILES if module not in OPERATION_TABLES]
    found = wrong_in(others, lambda module: tables_of_operations(parse(module)))
    assert found == {}, "what an operation is, its traits say: see ops/registry"


def test_tables_of_operations_are_seen():
    bad = [
        "X = (ops.a.default, ops.b.default)",
        "{aten.mm.default: aten.mm.out}",
        "x in [torch.ops.aten.a.default, ops.b.c]",
    ]
    good = ["X = (ops.a.default,)", "ops, aten = torch.ops.zerofn, x", "f(ops.a.default, ops.b.default)"]
    assert all(list(tables_of_operations(ast.parse(code))) for code in bad)
    assert not any(list(tables_of_operations(ast.parse(code))) for code in good)


# --- what some rooms know nothing of ----------------------------------------------------------

# These know no graphs; passes only write down what they need, and allocate nothing.
FORBIDDEN = {
    "memory": ("torch.fx",),
    "comm": ("torch.fx",),
    "offload": ("torch.fx",),
    "passes": ("zerofn.memory", "zerofn.offload"),
}


def forbidden_imports(module, tree):
    names = FORBIDDEN.get(room(module), ())
    for line, name in imported_modules(module, tree):
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in names):
            yield f"line {line}: {room(module)} must not import {name}"


def test_rooms_know_nothing_of_what_they_should_not():
    assert wrong_in(FILES, lambda module: forbidden_imports(module, parse(module))) == {}


def test_forbidden_imports_are_seen(monkeypatch):
    monkeypatch.setitem(FILES, "zerofn.passes.x", LIBRARY / "passes" / "x.py")
    monkeypatch.setitem(FILES, "zerofn.comm.x", LIBRARY / "comm" / "x.py")
    cases = {
        "zerofn.passes.x": ["from ..memory.arena import Arena", "from ..offload import policy", "import torch.fx"],
        "zerofn.comm.x": ["from torch.fx import Node", "import torch.fx", "from torch import Tensor"],
    }
    for module, lines in cases.items():
        assert [bool(list(forbidden_imports(module, ast.parse(line)))) for line in lines] == [True, True, False]

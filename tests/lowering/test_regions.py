"""Regions on a host: compiled once, read afterwards, and again where a compiler was killed."""

import contextlib
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule

from tests.support.outlined_steps import trained
from tests.support.same import assert_same_trees
from zerofn._torch_compat import FakeTensorMode
from zerofn.graph.nested import REGION
from zerofn.lowering import regions
from zerofn.util.process import instead, the

aten, MODE = torch.ops.aten, FakeTensorMode()


@contextlib.contextmanager
def without_files(folder):
    """A folder of its own for regions' files, and a process that has compiled nothing."""
    with pytest.MonkeyPatch.context() as patch, instead(regions.Compiled()):
        patch.setattr(regions, "_folder", lambda: Path(folder))
        yield


@pytest.fixture
def no_files(tmp_path):
    with without_files(tmp_path):
        yield tmp_path


@pytest.fixture
def new_libraries(no_files, monkeypatch):
    """And one for libraries. torch keeps in mind those of other tests: a test needs regions of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(no_files))
    return lambda: sorted(no_files.rglob("*.main.so"))


def region_of(make, name="region_of_a_test"):
    """A region of two inputs [4, 4]; `make(graph, x, y)` returns its results."""
    graph = Graph()
    given = [graph.placeholder(x) for x in "xy"]
    for x in given:
        with MODE:
            x.meta["val"] = torch.ones(4, 4)
    graph.output(make(graph, *given))
    gm = GraphModule({}, graph)
    gm.meta[REGION] = name
    return gm


def sum_of_two(number):
    def make(graph, x, y):
        return [graph.call_function(aten.add.Tensor, (x, graph.call_function(aten.mul.Tensor, (y, number))))]

    return region_of(make, f"region_of_{number}")


def run(gm):
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    (found,), (expected,) = regions.compiled(gm).run([x, y]), gm(x, y)
    return torch.equal(found, expected)


@pytest.mark.whole
def test_results_are_laid_out_as_they_were_captured(no_files):
    """Inductor takes `cat` with an empty tensor, a new cache of keys, for a copy, and then a view of it may not fit."""

    def make(graph, x, y):
        turned = graph.call_function(aten.t.default, (x,))
        empty = graph.call_function(aten.slice.Tensor, (graph.call_function(aten.view.default, (y, [16])), 0, 0, 0))
        joined = graph.call_function(aten.cat.default, ([empty, turned],))
        flat = graph.call_function(aten.view.default, (joined, [16]))
        values = {x: torch.rand(4, 4), y: torch.rand(4, 4)}
        for node in graph.nodes:
            if node.op == "call_function":
                values[node] = node.target(*torch.fx.map_arg(node.args, values.get))
                node.meta["val"] = MODE.from_tensor(values[node])
        return [joined, graph.call_function(aten.neg.default, (flat,))]

    gm, x, y = region_of(make, "region_of_an_empty_part"), torch.rand(4, 4), torch.rand(4, 4)
    found, expected = regions.compiled(gm).run([x, y]), gm(x, y)
    assert [a.stride() for a in found] == [a.stride() for a in expected] == [(4, 1), (1,)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.whole
def test_results_have_memory_of_their_own():
    def make(graph, x, y):
        twice = [graph.call_function(aten.add.Tensor, (x, y)) for _ in range(2)]
        return [graph.call_function(aten.mul.Tensor, (x, 1.0)), *twice]

    x, y = torch.rand(4, 4), torch.rand(4, 4)
    for _ in range(2):  # compiled, and read
        with instead(regions.Compiled()):
            given = [x, y]
            results = regions.compiled(region_of(make, "region_of_memory")).run(given)
        assert not given
        places = {t.untyped_storage().data_ptr() for t in (x, y, *results)}
        assert len(places) == 5
        assert_same_trees(list(results), [x, x + y, x + y])


def test_a_process_reads_what_another_compiled(no_files, monkeypatch):
    assert run(sum_of_two(3.0))
    assert the(regions.Compiled).made == 1

    def never(*args):
        raise AssertionError("traced again")

    monkeypatch.setattr(regions, "compile_graph", never)
    with instead(regions.Compiled()):
        assert run(sum_of_two(3.0))
        assert the(regions.Compiled).made == 0


def test_a_damaged_file_is_made_again(no_files):
    assert run(sum_of_two(3.0))
    (file,) = no_files.glob("*.region")
    shared, most, content = pickle.loads(file.read_bytes())
    for damaged in (b"", file.read_bytes()[:100], pickle.dumps((shared, most, content[:50]))):
        file.write_bytes(damaged)
        with instead(regions.Compiled()):
            assert run(sum_of_two(3.0))
            assert the(regions.Compiled).made == 1
    assert pickle.loads(file.read_bytes())[0] == shared


@pytest.fixture
def after_compiling(monkeypatch):
    """Lets a function of the library's path run once, right after the compiler."""
    builder = pytest.importorskip("torch._inductor.cpp_builder")
    build, done = builder.run_compile_cmd, []

    def let(then):
        def compile_and_then(command, cwd):
            build(command, cwd)
            found = re.search(r"-o (\S+\.main\.so\S*)", command)
            if found and not done:
                done.append(found[1])
                then(Path(found[1]))

        monkeypatch.setattr(builder, "run_compile_cmd", compile_and_then)

    return let


def test_a_truncated_library_is_compiled_again(new_libraries, after_compiling):
    """As another program's compiler leaves it that was killed."""
    after_compiling(lambda path: path.write_bytes(path.read_bytes()[:20]))  # ImportError: file too short
    assert run(sum_of_two(5.0))
    assert [x.stat().st_size > 1000 for x in new_libraries()] == [True]


@pytest.mark.whole  # test_a_truncated_library_is_compiled_again is what is left then
def test_a_compiler_that_is_killed_leaves_no_library(new_libraries, no_files, after_compiling):
    def killed(path):
        raise KeyboardInterrupt

    after_compiling(killed)
    with pytest.raises(KeyboardInterrupt):
        run(sum_of_two(7.0))
    assert not new_libraries() and not list(no_files.glob("*.region"))
    assert run(sum_of_two(7.0))
    assert len(new_libraries()) == 1


def test_an_interrupt_leaves_a_step_that_can_go_on(monkeypatch, no_files):
    seen = []

    def second(gm, path):
        seen.append(gm)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return regions.Region(lambda inputs: gm(*inputs), [])

    monkeypatch.setattr(regions, "_made", second)
    with pytest.raises(KeyboardInterrupt):
        trained("blocks", backend="inductor")
    assert len(seen) == 2
    assert_same_trees(trained("blocks", backend="inductor")[0], trained("blocks")[0])


def made_by_each(folder):
    """On a rank: how many regions it has compiled."""
    with without_files(folder):
        assert run(sum_of_two(3.0))
        return the(regions.Compiled).made


@pytest.mark.whole
def test_ranks_of_a_host_compile_a_region_once(ranks, tmp_path):
    assert sum(ranks(4, made_by_each, str(tmp_path))) == 1

"""A user's own passes: they run where they are put, and what they leave is checked."""

import pytest
import torch

import zerofn
from tests.support.small_steps import WIDTH, batch_of, build, fake_ranks, state_of, train_step_of
from zerofn import Pass, optim, tree
from zerofn.capture.capture import capture
from zerofn.graph.edit import copied
from zerofn.graph.nested import graphs_of
from zerofn.graph.phase import phase_of
from zerofn.passes import PassError, after, before, pipeline, standard
from zerofn.passes.budget.decision import Choice

aten, ops = torch.ops.aten, torch.ops.zerofn
MODULE = build(2)


def smooth(approximate):
    """Two layers with GELU, exact or by tanh."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(approximate), torch.nn.Linear(WIDTH, WIDTH)
    return torch.nn.Sequential(*layers)


def tanh_gelu(program):
    """Replace each exact GELU, and its derivative, by the tanh form."""
    graph = program.gm.graph
    for node in list(graph.nodes):
        if node.target is aten.gelu.default:
            with graph.inserting_before(node):
                new = graph.call_function(aten.gelu.default, node.args, {"approximate": "tanh"})
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        elif node.target is aten.gelu_backward.default:
            node.update_kwarg("approximate", "tanh")


def first(each):
    return lambda known: [each, *known]


def last(each):
    return lambda known: [*known, each]


def trained(module, num_microbatches=1, **options):
    state = state_of(module, 3, optim.adamw(1e-2))
    step = zerofn.compile(train_step_of(module, num_microbatches), **options)
    losses = []
    for seed in range(3):
        state, aux = step(state, batch_of(seed=seed))
        losses.append(aux["loss"])
    return [*losses, *tree.leaves(zerofn.unshard(state.params))]


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.part(place=[first], n=[2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("place", [first, last])
def test_gelu_by_tanh(n, place):
    exact, tanh = trained(smooth("none"), n), trained(smooth("tanh"), n)
    ours = trained(smooth("none"), n, passes=place(Pass(tanh_gelu, "body")))
    assert same(ours, tanh) and not same(ours, exact)


def test_of_the_step_alone_and_of_its_loops_as_well():
    of_step = trained(smooth("none"), 2, passes=first(Pass(tanh_gelu, "step")))
    assert same(of_step, trained(smooth("none"), 2))  # the loop's body is left alone


def test_a_pass_of_two_arguments_gets_each_graph_with_its_context():
    """Of the step and of its loop; on two ranks, on a machine that was given, with what a budget has decided."""
    machine = zerofn.Machine("here", "cpu", 2, 1e12, 1e9, {"float32": 1e9}, 1e9, 1e9)
    found = []

    def mine(gm, context):
        found.append((gm, context))

    with fake_ranks(2):
        module = build(6)
        program = capture(train_step_of(module, 2), state_of(module, 3), batch_of())
        line = pipeline(donating=True, edits=[before("reinplace", Pass(mine, "body"))])
        line.prepare(program, machine)
        choices = [Choice(dropped=frozenset({name})) for name in ("of the body", "of the step")]
        line.finish(program, choices=choices)
        step, body = graphs_of(program.gm)
    assert [gm for gm, _ in found] == [step, body]
    assert [context.choice for _, context in found] == choices[::-1]
    assert all((c.machine, c.num_ranks, c.mesh) == (machine, 2, program.mesh) for _, c in found)


def test_a_pass_of_two_arguments_for_the_step_gets_the_program():
    found = []
    lowered(lambda program, context: found.append((program.state, context.num_ranks)) and None)
    ((state, num_ranks),) = found
    assert "params['0']" in state.names and num_ranks == 2


def test_of_a_loops_body_a_pass_of_one_argument_sees_the_graph_alone():
    def mine(program):
        assert len(program.gm.graph.nodes)
        program.batch  # noqa: B018 - the step has one

    with pytest.raises(
        AttributeError, match="the body of a loop has no 'batch': a pass with scope='body' may use only program.gm"
    ):
        trained(smooth("none"), 2, passes=first(Pass(mine, "body")))
    trained(smooth("none"), 1, passes=first(Pass(mine, "body")))  # without a loop


def test_within_a_budget():
    """A pass runs on each schedule that is tried, and results are what they are without a budget."""
    times = []

    def counted(program):
        times.append(program)
        tanh_gelu(program)

    middle = lambda known: [*known[:8], Pass(counted, "body"), *known[8:]]  # noqa: E731
    ours = trained(smooth("none"), memory="1GB", passes=middle)
    assert same(ours, trained(smooth("tanh"))) and len(times) > 1


def lowered(fn, place=first, scope="step"):
    """A step at stage 3 on one of two ranks, scheduled with one more pass."""
    with fake_ranks(2):
        program = capture(train_step_of(MODULE), state_of(MODULE, 3), batch_of())
        pipeline(donating=True, edits=[place(Pass(fn, scope, "mine"))]).run(program)


def returns_a_graph(program):
    return program.gm


def replaces_the_graph(program):
    program.gm = copied(program.gm)


def uses_what_is_gone(program):
    graph = program.gm.graph
    node = next(n for n in graph.nodes if n.target is aten.tanh.default)
    node.args = (next(n for n in reversed(graph.nodes) if n.op == "call_function"),)


def writes_to_the_batch(program):
    graph, x = program.gm.graph, program.batch_placeholders[0]
    with graph.inserting_before(program.output):
        graph.call_function(aten.mul_.Tensor, (x, 2.0))


def writes_to_what_is_gathered(program):
    graph = program.gm.graph
    wait = next(n for n in graph.nodes if n.target is ops.wait.default)
    with graph.inserting_after(wait):
        graph.call_function(aten.mul_.Tensor, (wait, 2.0))


def calls_a_function(program):
    graph = program.gm.graph
    for node in list(graph.nodes):
        if node.target is aten.tanh.default:
            node.target = torch.nn.functional.gelu


def calls_a_packet(program):
    for node in program.gm.graph.nodes:
        if node.target is aten.tanh.default:
            node.target = aten.tanh


def calls_a_method(program):
    graph = program.gm.graph
    with graph.inserting_before(program.output):
        graph.call_method("sum", (program.batch_placeholders[0],))


def takes_more(program):
    graph = program.gm.graph
    with graph.inserting_before(program.output):
        graph.placeholder("more")


def returns_less(program):
    program.output.args = (list(program.output.args[0])[:-1],)


def returns_another_dtype(program):
    graph, values = program.gm.graph, list(program.output.args[0])
    with graph.inserting_before(program.output):
        values[-1] = graph.call_function(aten._to_copy.default, (values[-1],), {"dtype": torch.float64})
    program.output.args = (values,)


def reads_without_waiting(program):
    for node in list(program.gm.graph.nodes):
        if node.target is ops.wait.default:
            node.replace_all_uses_with(node.args[0])


def adds_a_matrix_and_a_vector(program):
    for node in program.gm.graph.nodes:
        if node.target is aten.tanh.default:
            node.target, node.args = aten.mm.default, (node.args[0], node.args[0])


def reads_nothing(program):
    graph = program.gm.graph
    with graph.inserting_before(program.output):
        graph.get_attr("missing")


def sums_a_shard(program):
    """What this rank holds is a part: its sum would be another on every rank."""
    graph, values = program.gm.graph, list(program.output.args[0])
    shard = next(n for n, (spec, _) in zip(program.placeholders, program.owners, strict=False) if spec is not None)
    with graph.inserting_before(program.output):
        total = graph.call_function(aten.sum.default, (shard,))
        values[-1] = graph.call_function(aten.add.Tensor, (values[-1], total))
    program.output.args = (values,)


REFUSED = {
    returns_a_graph: "its function returned a value. Change program.gm, and return None",
    replaces_the_graph: "it assigned another module to program.gm. Change program.gm.graph in place",
    uses_what_is_gone: "torch.fx finds an error in the changed graph",
    writes_to_the_batch: "it adds a write to '.*', which belongs to the state, the batch",
    writes_to_what_is_gathered: "it adds a write to '.*', which belongs to the state, the batch",
    calls_a_function: r"'tanh.*' calls gelu, which is not an overload of torch.ops. Write an overload, such as torch",
    calls_a_packet: r"calls aten.tanh, which is not an overload of torch.ops. Write torch.ops.aten.tanh.default",
    calls_a_method: "is a call_method. Use graph.call_function with an overload of torch.ops",
    takes_more: "the graph takes .* values, but must take and return as many as before",
    returns_less: "the graph returns .* values, but must take and return as many as before",
    returns_another_dtype: r"the graph returns float64 \[\] on cpu as value .*must stay as it was: float32 \[\] on cpu",
    reads_without_waiting: "the result of the transfer '.*' is read without torch.ops.zerofn.wait",
    adds_a_matrix_and_a_vector: "an operation does not accept its inputs",
    reads_nothing: "torch.fx finds an error in the changed graph|reads 'missing', which program.gm does not have",
    sums_a_shard: "capture would refuse the changed step: .*is applied to this rank's shard of state entry",
}
EARLY = (sums_a_shard,)  # once the state is donated the step is no pure function any more


@pytest.mark.part(
    fn=[
        returns_a_graph,
        writes_to_the_batch,
        calls_a_method,
        takes_more,
        reads_without_waiting,
        returns_another_dtype,
        adds_a_matrix_and_a_vector,
        reads_nothing,
        sums_a_shard,
    ]
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_a_pass_that_leaves_a_wrong_graph_is_refused(fn):
    with pytest.raises(PassError, match=f"the pass 'mine' cannot be used: .*({REFUSED[fn]})"):
        lowered(fn)
    if fn not in EARLY:
        with pytest.raises(PassError, match=f"the pass 'mine' cannot be used: .*({REFUSED[fn]})"):
            lowered(fn, last)


def test_what_fails_in_a_pass_names_it():
    def fails(program):
        raise KeyError("nothing there")

    with pytest.raises(KeyError, match="nothing there") as error:
        lowered(fails)
    assert "in the pass 'mine', given to zerofn.compile(passes=)" in "".join(error.value.__notes__)


def test_what_the_step_writes_to_anyway_may_be_written_by_another_operation():
    """Where the state is donated it is the step's own."""

    def other_copies(program):
        graph = program.gm.graph
        for node in [n for n in graph.nodes if n.target is ops.adamw_.default]:
            with graph.inserting_after(node):
                graph.call_function(aten.mul_.Scalar, (node.args[0][0], 1.0))

    plain = trained(MODULE)
    assert same(trained(MODULE, passes=last(Pass(other_copies))), plain)


def test_new_nodes_belong_to_the_phase_around_them():
    module, found = smooth("none"), {}

    def look(program):
        found.update({n: phase_of(n) for n in program.gm.graph.nodes if n.target is aten.gelu.default})

    edit = lambda known: [Pass(tanh_gelu, "body"), Pass(look), *known]  # noqa: E731
    zerofn.compile(train_step_of(module), passes=edit).lower(state_of(module, 3), batch_of())
    assert list(found.values()) == ["forward"] and all("val" in n.meta for n in found)


@pytest.mark.parametrize("donate", [True, False])
def test_our_passes_can_be_left_out(donate):
    """All but those that results depend on."""
    edit = lambda known: [each for each in known if each.required]  # noqa: E731
    few, all_of_them = trained(MODULE, passes=edit, donate=donate), trained(MODULE, donate=donate)
    assert same(few, all_of_them)


def test_lists_that_are_refused():
    def compiled(edit):
        zerofn.compile(train_step_of(MODULE), passes=edit).lower(state_of(MODULE, 3), batch_of())

    with pytest.raises(ValueError, match="must return a list of passes, but returned None"):
        compiled(lambda known: None)
    with pytest.raises(ValueError, match=r"returned a list whose item 0 is <function .*>, not a zerofn.Pass"):
        compiled(lambda known: [tanh_gelu, *known])
    with pytest.raises(ValueError, match="leaves out the pass 'donate', without which results would be wrong"):
        compiled(lambda known: [each for each in known if each.name != "donate"])
    with pytest.raises(ValueError, match="must keep each of these passes once, in this order"):
        compiled(lambda known: known[::-1])
    for wrong in (Pass(tanh_gelu), [tanh_gelu], "donate"):
        with pytest.raises(TypeError, match="must be a list of zerofn.Pass, or a function"):
            zerofn.compile(train_step_of(MODULE), passes=wrong)


@pytest.mark.parametrize("donating", [True, False])
@pytest.mark.parametrize("name", [x.name for x in standard()] + ["copy_outputs"])
def test_passes_stand_where_they_are_put(name, donating):
    """Also beside one that a step does without: where it would be."""
    mine, ours = Pass(nothing, name="mine"), standard(donating)
    names = [[x.name for x in place(name, mine)(ours)] for place in (before, after)]
    for found, step in zip(names, (1, -1), strict=True):
        assert [x for x in found if x != "mine"] == [x.name for x in ours]
        if name in found:
            assert found[found.index("mine") + step] == name
    if name not in names[0]:
        assert names[0] == names[1]
        there = {"copy_outputs": ("start_param_gather", "wait_param_gather")}
        assert _around(names[0]) == there.get(name, ("reinplace", "copy_outputs"))


def _around(names):
    at = names.index("mine")
    return names[at - 1], names[at + 1]


def test_a_place_that_is_not_there():
    with pytest.raises(ValueError, match="no standard pass 'donates'. The .* are fold_split_master, .*assign_buffers"):
        before("donates", Pass(nothing))


@pytest.mark.parametrize("edit", [[Pass(tanh_gelu, "body")], before("donate", Pass(tanh_gelu, "body"))])
def test_a_list_of_passes_runs_before_donation(edit):
    assert same(trained(smooth("none"), passes=edit), trained(smooth("tanh")))


def reads_again(program):
    """Read the first gathered unit once more, behind all else."""
    graph, output = program.gm.graph, program.output
    unit = next(iter(next(n for n in graph.nodes if n.kwargs.get("place")).users))
    values = list(output.args[0])
    with graph.inserting_before(output):
        total = graph.call_function(aten.sum.default, (unit,))
        values[-1] = graph.call_function(aten.add.Tensor, (values[-1], total))
    output.args = (values,)


def test_a_value_is_not_read_after_its_memory_has_gone_to_another():
    module = build(24)
    with fake_ranks(2):
        program = capture(train_step_of(module), state_of(module, 3), batch_of(rows=512))
        edit = after("assign_buffers", Pass(reads_again))
        with pytest.raises(PassError, match=r"'reads_again'.*is read after '.*' has overwritten it in a static buffer"):
            pipeline(True, [edit]).run(program)


def reads_parameters(program):
    """Add the sum of all that is computed with, of the size of a weight, to the last result."""
    graph, output = program.gm.graph, program.output
    values = list(output.args[0])
    size = MODULE[0].weight.numel()
    weights = [n for n in graph.nodes if n.target is aten.t.default and n.meta["val"].numel() == size]
    assert weights
    with graph.inserting_before(output):
        for weight in weights:
            total = graph.call_function(aten.sum.default, (weight,))
            values[-1] = graph.call_function(aten.add.Tensor, (values[-1], total))
    output.args = (values,)


@pytest.mark.part(stage=[0, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["donate", "raise_updates", "assign_buffers"])
def test_a_parameter_is_not_read_after_its_update(name, stage):
    """Behind donation the new state lies in the old one's memory: such a read would find some old and some new."""
    step, mine = train_step_of(MODULE), Pass(reads_parameters)
    with pytest.raises(PassError, match=r"reads .* after .* has overwritten the memory of .*before\(.donate."):
        zerofn.compile(step, passes=after(name, mine))(state_of(MODULE, stage), batch_of())
    assert zerofn.compile(step, passes=[mine])(state_of(MODULE, stage), batch_of())


def writes_between_inputs(gm, context):
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(first):
        gm.graph.call_function(aten.mul.Tensor, (first, 2.0))


def test_operations_stand_behind_all_inputs():
    with pytest.raises(PassError, match="it put 'mul.*' before the input '.*'. Put 'mul.*' after all inputs"):
        trained(smooth("none"), 2, passes=first(Pass(writes_between_inputs, "body")))


def says_another_shape(program):
    graph = program.gm.graph
    node = next(n for n in graph.nodes if n.target is aten.tanh.default)
    with graph.inserting_after(node):
        flat = graph.call_function(aten.view.default, (node, [-1]))
    flat.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(flat, delete_user_cb=lambda user: user is not flat)


def test_what_a_pass_says_of_shapes_is_worked_out_again():
    with pytest.raises(PassError, match="an operation does not accept its inputs"):
        lowered(says_another_shape)


class Prepares:
    """A backend with a pass of its own."""

    def passes(self, ours):
        return [Pass(tanh_gelu, "body"), *ours]

    def bind(self, program):
        return zerofn.runtime.backend.Eager().bind(program)


def test_a_backends_passes_run_before_the_users():
    seen = []
    look = lambda known: seen.append(known[0].name) or known  # noqa: E731
    assert same(trained(smooth("none"), backend=Prepares(), passes=look), trained(smooth("tanh")))
    assert seen == ["tanh_gelu"]


def test_what_is_not_searched_runs_once():
    for searched in (True, False):
        runs = []
        mine = Pass(runs.append, name="mine", searched=searched)
        zerofn.compile(train_step_of(MODULE), memory="1GB", passes=[mine]).lower(state_of(MODULE, 3), batch_of())
        assert (len(runs) == 1) == (not searched)


def test_a_pass_has_a_scope_and_a_name():
    assert Pass(tanh_gelu) == Pass(tanh_gelu, "step", "tanh_gelu")
    with pytest.raises(ValueError, match="scope='loop' is not known; expected 'step' or 'body'"):
        Pass(tanh_gelu, "loop")
    with pytest.raises(TypeError, match="fn must be a function of a program, not 3"):
        Pass(3)
    with pytest.raises(TypeError, match="A function of two arguments gets a context, too: "):
        Pass(lambda: None)
    for donating in (True, False):
        names = [each.name for each in standard(donating)]
        assert len(set(names)) == len(names) and ("donate" in names) == donating


def written_by_rank():
    """A pass that sends on one rank alone is refused before the step runs."""
    rank = torch.distributed.get_rank()

    def sends(program):
        graph, values = program.gm.graph, list(program.output.args[0])
        axis = program.mesh.all
        with graph.inserting_before(program.output):
            flat = graph.call_function(aten.view.default, (values[-1], [1]))
            rows = graph.call_function(ops.all_gather.default, (flat, axis.size, axis.group, ""))
            rows = graph.call_function(ops.wait.default, (rows,))
            values[-1] = graph.call_function(aten.mean.default, (rows,))
        program.output.args = (values,)

    def averaged(known):
        return [Pass(sends), *known]

    def run(edit):
        step = zerofn.compile(train_step_of(MODULE), passes=edit)
        _, aux = step(state_of(MODULE, 3), batch_of(rank))
        return aux["loss"].item()

    mean = run(averaged)
    with pytest.raises(RuntimeError, match="rank"):
        run(averaged if rank else None)
    return mean


def test_transfers_are_agreed_on(ranks):
    a, b = ranks(2, written_by_rank)
    assert a == b


def nothing(program):
    pass


ANYWHERE = [
    (0, 1, True, {}),
    (1, 2, True, {"precision": "bf16"}),
    (2, 1, True, {"precision": "fp16"}),
    (3, 2, True, {"tier": "nvme"}),
    (3, 1, False, {}),
]


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize(("stage", "n", "donating", "options"), ANYWHERE)
def test_a_pass_that_changes_nothing_can_stand_anywhere(stage, n, donating, options, tmp_path):
    if tier := options.get("tier"):
        options = {"offload": zerofn.Offload(optimizer=tier, params=tier, path=tmp_path)}
    edit = lambda known: [x for each in known for x in (Pass(nothing, each.scope), each)] + [Pass(nothing)]  # noqa: E731
    with fake_ranks(2):
        state, step = state_of(MODULE, stage, **options), train_step_of(MODULE, n)
        plain, ours = (capture(step, state, batch_of()) for _ in range(2))
        pipeline(donating).run(plain)
        pipeline(donating, [edit]).run(ours)
    assert [n.name for n in ours.gm.graph.nodes] == [n.name for n in plain.gm.graph.nodes]

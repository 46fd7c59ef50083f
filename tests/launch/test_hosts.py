"""Hostfiles, --include and --exclude, SLURM's lists of nodes."""

import pytest

from zerofn.launch.hosts import chosen, hosts_of, node_names, slurm_hosts

TWO = {"one": [0, 1, 2, 3], "two": [0, 1]}


def test_a_hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# our machines\n\none slots=4\n  two   slots=2  # the old one\n")
    assert hosts_of(path) == TWO and list(hosts_of(path)) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n", "line 1: expected a name and its slots, such as 'worker-1 slots=8'; got 'one'"),
        ("one slots=2\ntwo slots=x\n", "line 2: .*got 'two slots=x'"),
        ("one slots=2 max=3\n", "line 1: .*got 'one slots=2 max=3'"),
        ("one slots=2\n# more\none slots=1\n", "line 3: 'one' is listed twice, also in line 1"),
        ("one slots=0\n", "line 1: 'one' has 0 slots"),
        ("# nothing\n", "lists no machine"),
        ("-oProxyCommand=x slots=2\n", "line 1: '-oProxyCommand=x' cannot be the name of a machine, because ssh would"),
        ("one slots=3000000000\n", "line 1: 'one' has slots=3000000000, but a machine may have at most 4,096"),
        (f"one slots={'9' * 9_999}\n", "but a machine may have at most 4,096"),
    ],
)
def test_hostfiles_that_are_none(tmp_path, text, message):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        hosts_of(path)
    with pytest.raises(FileNotFoundError, match="the hostfile .* does not exist"):
        hosts_of(tmp_path / "none")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, TWO),
        ({"include": "two"}, {"two": [0, 1]}),
        ({"include": "two:1@one:3,0"}, {"one": [0, 3], "two": [1]}),
        ({"include": "one:0@one:2"}, {"one": [0, 2]}),
        ({"exclude": "one"}, {"two": [0, 1]}),
        ({"exclude": "one:1@two:0,1"}, {"one": [0, 2, 3]}),
    ],
)
def test_choices(given, found):
    assert chosen(TWO, **given) == found and list(chosen(TWO, **given)) == list(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"include": "one", "exclude": "two"}, "use only one of them"),
        ({"include": "three"}, "--include three: machine 'three' is not in the hostfile, which has one, two"),
        ({"exclude": "two:2"}, "--exclude two:2: 'two' has no slot '2'; it has 0, 1"),
        ({"include": "two:a"}, "'two' has no slot 'a'"),
        ({"include": ""}, "machine '' is not in the hostfile"),
        ({"exclude": "one@two"}, "excludes all slots"),
    ],
)
def test_choices_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        chosen(TWO, **given)


def test_slurm():
    assert node_names("a[1-3],b7") == ["a1", "a2", "a3", "b7"]
    assert node_names("n[08-11]") == ["n08", "n09", "n10", "n11"]
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    assert slurm_hosts(environ) == {"n1": [0, 1, 2, 3], "n2": [0, 1, 2, 3]}
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "2(x1)"}) == {"n1": [0, 1]}
    assert slurm_hosts({"SLURM_NTASKS_PER_NODE": "2"}) == {}


@pytest.mark.parametrize(
    ("nodes", "slots", "message"),
    [
        ("n[1-4000000000]", "1", "more than 65,536 machines"),
        ("n[1-999]x[1-999]", "1", "more than 65,536 machines"),
        ("n[x]", "1", r"expected numbers such as \[007-008,020\], got \[x\] in 'n\[x\]'"),
        ("-oProxyCommand=x,b", "1", "'-oProxyCommand=x' cannot be the name of a machine"),
        ("a", "x", "SLURM_GPUS_ON_NODE='x': expected a number from 1 to 4,096"),
        ("a", "3000000000", "expected a number from 1 to 4,096"),
    ],
)
def test_allocations_that_are_none(nodes, slots, message):
    with pytest.raises(ValueError, match=message):
        slurm_hosts({"SLURM_JOB_NODELIST": nodes, "SLURM_GPUS_ON_NODE": slots})

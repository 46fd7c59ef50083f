"""Layouts by their rules: where every leaf lies, computed here in another way, and by hand."""

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from zerofn import tree
from zerofn.geometry.grouping import SMALL
from zerofn.geometry.layout import ALIGN, SHARD_MULTIPLE, make_layout, restrict, unravel

Twins = namedtuple("Twins", "one two")


@dataclass
class Parts:
    gen: Any
    disc: Any


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def gpt(width=768, layers=12, vocab=50257):
    """Names and shapes of GPT-2 small, without memory."""
    with torch.device("meta"):
        params = {"wte.weight": z(vocab, width), "wpe.weight": z(1024, width), "ln_f.weight": z(width)}
        params["ln_f.bias"] = z(width)
        for i in range(layers):
            h = f"h.{i}"
            for part, shape in {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}.items():
                params |= {f"{h}.{part}.weight": z(*shape), f"{h}.{part}.bias": z(shape[1])}
            for part, shape in {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}.items():
                params |= {f"{h}.{part}.weight": z(*shape), f"{h}.{part}.bias": z(shape[1])}
            for part in ("ln_1", "ln_2"):
                params |= {f"{h}.{part}.weight": z(width), f"{h}.{part}.bias": z(width)}
    return params


def check(layout, params):
    """What holds for every layout."""
    paths, leaves, _ = tree.flatten_with_path(params)
    assert sorted(leaf.index for u in layout.units for leaf in u.leaves) == list(range(len(leaves)))
    assert [leaf.name for leaf in layout.leaves] == [tree.name_of(p) for p in paths]
    assert [leaf.shape for leaf in layout.leaves] == [tuple(x.shape) for x in leaves]
    assert len({u.name for u in layout.units}) == len(layout.units)
    for unit in layout.units:
        assert unit.size % (SHARD_MULTIPLE * unit.num_shards) == 0 and (unit.size > 0) == (unit.numel > 0)
        end = 0
        for leaf in unit.leaves:
            assert leaf.offset % ALIGN == 0 and end <= leaf.offset < end + ALIGN
            end = leaf.stop
        assert (
            end <= unit.size < end + ALIGN + SHARD_MULTIPLE * unit.num_shards
            or unit.size == SHARD_MULTIPLE * unit.num_shards
        )
        assert len({leaves[leaf.index].dtype for leaf in unit.leaves}) == 1
        # a shard's intervals, put side by side, are the leaves again
        seen = {leaf.index: [] for leaf in unit.leaves}
        for shard in range(unit.num_shards):
            start, stop = layout.cut(unit, shard)
            for leaf, a, b in unit.intervals(start, stop):
                assert 0 <= a < b <= stop - start
                seen[leaf.index] += range(start + a - leaf.offset, start + b - leaf.offset)
        for leaf in unit.leaves if unit.numel < 10**5 else ():
            assert seen[leaf.index] == list(range(leaf.numel))


def unit_names(params, **options):
    layout = make_layout(params, 2, **options)
    check(layout, params)
    return {u.name: [leaf.name for leaf in u.leaves] for u in layout.units}


def test_units_are_layers_in_natural_order():
    layout = make_layout(gpt(), 4)
    names = [u.name for u in layout.units]
    assert names == [f"h.{i}" for i in range(12)] + ["wpe", "wte"]  # ln_f merges into the layer before
    assert {leaf.name for leaf in layout.units[11].leaves} >= {"ln_f.weight", "h.11.ln_1.bias"}
    assert {leaf.name.split(".")[1] for leaf in layout.units[2].leaves} == {"2"}


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_padding_is_below_one_percent(num_shards):
    layout = make_layout(gpt(), num_shards)
    size, numel = (sum(getattr(u, k) for u in layout.units) for k in ("size", "numel"))
    assert numel == sum(x.numel() for x in gpt().values())
    assert size <= 1.01 * numel


def test_the_first_integer_names_the_unit_and_leaves_without_join_by_module():
    big = SMALL
    params = {
        "enc.0.mlp.1.w": z(big),
        "enc.0.mlp.0.w": z(big),
        "enc.1.w": z(big),
        "head.out.w": z(big),
        "head.out.b": z(3),
        "head.norm.w": z(big),
        "bias": z(big),
    }
    assert unit_names(params) == {
        "bias": ["bias"],
        "enc.0": ["enc.0.mlp.0.w", "enc.0.mlp.1.w"],
        "enc.1": ["enc.1.w"],
        "head.norm": ["head.norm.w"],
        "head.out": ["head.out.b", "head.out.w"],
    }


def test_small_units_merge_into_the_one_before():
    params = {"a.w": z(10), "b.w": z(SMALL - 1), "c.w": z(SMALL), "d.w": z(5), "e.w": z(7)}
    assert unit_names(params) == {"a": ["a.w", "b.w"], "c": ["c.w", "d.w", "e.w"]}


def test_units_never_reach_across_top_level_entries():
    params = {"disc": {"0.w": z(4), "1.w": z(4)}, "gen": {"0.w": z(4), "out": {"w": z(4)}}}
    assert unit_names(params) == {"disc.0": ["disc.0.w", "disc.1.w"], "gen.0": ["gen.0.w", "gen.out.w"]}
    nested = {"layers": [{"w": z(SMALL)}, {"w": z(SMALL), "b": z(1)}]}
    assert unit_names(nested) == {"layers.0": ["layers.0.w"], "layers.1": ["layers.1.b", "layers.1.w"]}


def test_a_users_units():
    params = gpt(width=64, layers=3, vocab=100)
    names = unit_names(params, unit=lambda name: "wide" if "mlp" in name else "rest")
    assert sorted(names) == ["rest", "wide"]
    assert all("mlp" in n for n in names["wide"]) and len(names["wide"]) == 12


def test_one_buffer_per_dtype_and_per_trainable():
    params = {"h.0.a": z(3), "h.0.b": z(3, dtype=torch.bfloat16), "h.0.c": z(3), "h.0.ids": z(3, dtype=torch.int64)}
    layout = make_layout(params, 2, trainable=lambda name: name != "h.0.c")
    check(layout, params)
    kinds = {(u.dtype, u.trainable): [leaf.name[-1] for leaf in u.leaves] for u in layout.units}
    assert kinds == {
        (torch.float32, True): ["a"],
        (torch.bfloat16, True): ["b"],
        (torch.float32, False): ["c"],
        (torch.int64, False): ["s"],
    }
    master = make_layout(params, 2, dtype=torch.float32)
    assert sorted((str(u.dtype), len(u.leaves)) for u in master.units) == [("torch.float32", 3), ("torch.int64", 1)]


def test_complex_leaves_are_frozen_or_refused():
    params = {"h": [{"w": z(3), "phase": z(3, dtype=torch.complex64)}]}
    with pytest.raises(TypeError, match=r"parameter 'h.0.phase' is complex64.*view_as_real.*or freeze the parameter"):
        make_layout(params, 2)
    layout = make_layout(params, 2, trainable=lambda name: name != "h.0.phase")
    assert {(u.dtype, u.trainable) for u in layout.units} == {(torch.complex64, False), (torch.float32, True)}


def test_labels_are_runs():
    params = {f"h.0.{k}.{p}": z(40) for k in "abc" for p in ("bias", "weight")}
    decays = lambda name, leaf: "weight" in name  # noqa: E731
    (unit,) = make_layout(params, 2, label=decays).units
    order = [leaf.name for leaf in unit.leaves]
    assert order == [f"h.0.{k}.{p}" for p in ("bias", "weight") for k in "abc"]
    runs = unit.runs(0, unit.size, lambda leaf: decays(leaf.name, None))
    assert runs == [(64 * k, 64 * k + 40, k >= 3) for k in range(6)]  # padding is in none
    inside = unit.runs(50, 260, lambda leaf: decays(leaf.name, None))  # offsets from where the shard starts
    assert inside == [(14, 54, False), (78, 118, False), (142, 182, True), (206, 210, True)]
    assert unit.runs(unit.size - 100, unit.size, lambda leaf: 0) == []


def test_a_gap_that_another_leaf_filled_ends_a_run():
    params = {f"h.0.{k}": z(64) for k in "abc"}
    whole = make_layout(params, 1)
    assert whole.units[0].runs(0, 192, lambda leaf: 0) == [(0, 192, 0)]
    layout = restrict(whole, lambda unit, leaf: leaf.name != "h.0.b")
    (unit,) = layout.units
    assert unit.runs(0, unit.size, lambda leaf: 0) == [(0, 64, 0), (128, 192, 0)]
    assert layout.treedef == tree.structure({"h.0.a": 0, "h.0.b": None, "h.0.c": 0})
    assert [leaf.index for leaf in layout.leaves] == [0, 1]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_unravel_to_what_was_written(num_shards, seed):
    rng = random.Random(seed)
    params = {}
    for _ in range(rng.randint(1, 25)):
        shape = [rng.choice([0, 1, 2, 3, 7, 31, 33]) for _ in range(rng.randint(0, 3))]
        name = ".".join(rng.choice(["a", "b", "0", "1", "12"]) for _ in range(rng.randint(1, 3)))
        params[name] = torch.rand(shape, dtype=rng.choice([torch.float32, torch.float64]))
    layout = make_layout(params, num_shards)
    check(layout, params)
    for unit in layout.units:
        flat = torch.full((2, unit.size), float("nan"), dtype=unit.dtype)
        for leaf, view in zip(unit.leaves, unravel(flat, unit), strict=True):
            assert view.shape == (2, *leaf.shape)
            view.copy_(params[leaf.name])
        for leaf, view in zip(unit.leaves, unravel(flat[1], unit), strict=True):
            assert torch.equal(view, params[leaf.name])
            assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_scalars_and_empty_leaves():
    params = {"s": z(), "e": z(0), "e2": z(3, 0, 2), "w": z(5)}
    layout = make_layout(params, 3)
    check(layout, params)
    (unit,) = layout.units
    assert unit.size == 3 * SHARD_MULTIPLE and unit.numel == 6
    check(nothing := make_layout({"e": z(0)}, 2), {"e": z(0)})
    assert nothing.units[0].size == 0


def test_equal_layouts_hash_alike_whatever_order_the_dict_has():
    params = gpt(width=64, layers=11, vocab=100)
    turned = dict(reversed(params.items()))
    a, b = make_layout(params, 4), make_layout(turned, 4)
    assert a == b and hash(a) == hash(b)
    assert a != make_layout(params, 2) and a != make_layout(params, 4, axis="other")
    half = {k: v.bfloat16() for k, v in params.items()}
    assert make_layout(half, 4) == a  # dtypes do not count
    params["wte.weight"] = z(101, 64)
    assert make_layout(params, 4) != a


@pytest.mark.parametrize("container", [dict, Parts, Twins, TensorDict, list])
def test_parts_of_every_container(container):
    gen, disc = {"0.w": z(SMALL + 1), "0.b": z(3)}, {"0.w": z(5, 5)}
    params, first = {
        dict: ({"gen": gen, "disc": disc}, "gen"),
        Parts: (Parts(gen, disc), "gen"),
        Twins: (Twins(gen, disc), "0"),
        TensorDict: (TensorDict({"gen": gen, "disc": disc}), "gen"),
        list: ([gen, disc], "0"),
    }[container]
    layout = make_layout(params, 2)
    check(layout, params)
    part = layout.subset(first)
    assert [leaf.name for leaf in part.leaves] == ["0.b", "0.w"]
    assert part.treedef == tree.structure(TensorDict(gen) if container is TensorDict else gen)
    check(part, gen)
    assert part == make_layout(gen, 2)  # so two parts of one structure are laid out alike


def test_a_part_of_a_flat_dict():
    params = gpt(width=64, layers=2, vocab=3000)
    layout = make_layout(params, 2, unit=lambda name: name.split(".")[0])
    part = layout.subset("h")
    names = [n for n in params if n.startswith("h.")]
    assert sorted(leaf.name for leaf in part.leaves) == sorted(names)
    check(part, {n: params[n] for n in names})


def test_parts_that_cannot_be_cut_out():
    layout = make_layout({"a.w": z(4), "b.w": z(4)}, 2)
    with pytest.raises(KeyError, match=r"unit 'a' also holds 'b.w'.*unit=lambda"):
        layout.subset("a")
    with pytest.raises(KeyError, match=r"no leaf is named 'c' or below it; the units are \['a'\]"):
        layout.subset("c")
    nested = make_layout({"h": {"0": {"w": z(4), "b": z(4)}, "1": {"w": z(4)}}}, 2, unit=lambda name: name[:3])
    with pytest.raises(KeyError, match=r"only a top-level entry .* Write params\['h'\]\['0'\]"):
        nested.subset("h.0")
    assert sorted(x.name for x in nested.subset("h").subset("0").leaves) == ["b", "w"]


def test_thousands_of_leaves_in_one_unit_are_no_matter():
    import time

    params = {f"a.{chr(97 + i % 26)}{i}": z(1) for i in range(5000)}
    start = time.process_time()
    layout = make_layout(params, 2, unit=lambda name: "one")
    layout.subset("a")
    assert time.process_time() - start < 3

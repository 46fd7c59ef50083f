"""Files of torch.save: what they claim is looked at before memory is taken for it."""

import io
import os
import resource
import zipfile

import pytest
import torch

import zerofn
from zerofn.interop.torch_files import Count, Each, FlatTensor, Named, Numbered, check_file, check_size, check_values


def saved(value) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_what_torch_saves_passes():
    data = saved({"w": torch.ones(1000), "names": ["a", "b"]})
    check_size(io.BytesIO(data), len(data), "a file")


def test_compressed_records_take_no_memory(tmp_path):
    """A file of 200 KB that would unpack to 200 MB."""
    file = tmp_path / "a.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        with packed.open("archive/data.pkl", "w") as record:
            for _ in range(200):
                record.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(zerofn.CheckpointError, match=r"its entry 'archive/data.pkl' is compressed, .* for 209,715,200"):
        check_file(file, "load")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_records_that_are_larger_than_their_file():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("archive/data.pkl", b"x" * 100)
    data = out.getvalue()
    directory = data.index(b"PK\1\2")
    large = (1 << 30).to_bytes(4, "little") * 2  # of its size as it is stored, and as it is
    data = data[: directory + 20] + large + data[directory + 28 :]
    with pytest.raises(zerofn.CheckpointError, match="its records claim 1,073,741,824 bytes"):
        check_size(io.BytesIO(data), len(data), "a file")


@pytest.mark.parametrize("data", [b"", b"x" * 50, b"\x80\x02}q\x00.", saved({"w": torch.ones(5)})[:-30]])
def test_bytes_that_are_no_archive_are_refused(data):
    with pytest.raises(zerofn.CheckpointError, match="a file is damaged, or was not written by torch.save"):
        check_size(io.BytesIO(data), len(data), "a file")


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nowhere", ""):
        with pytest.raises(zerofn.CheckpointError, match="does not exist, or is not a file"):
            check_file(tmp_path / name, "load")


SHAPE = {"steps": Count, "names?": Each(str), "values?": Named(torch.Tensor), "state?": Numbered({"mu?": FlatTensor})}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"steps": 3}, ""),
        (
            {
                "steps": 3,
                "names": ("a",),
                "values": {"w": torch.ones(2, 2)},
                "state": {0: {"mu": torch.ones(2)}, 1: {}},
            },
            "",
        ),
        ({"steps": 3, "names": None, "more": object()}, ""),
        ([], r"^a file: the file: expected a dict, got a list\.$"),
        ({}, r"^a file: the file has no 'steps'\.$"),
        ({"steps": -1}, r"^a file: steps: expected a whole number of 0 or more, got -1\.$"),
        ({"steps": True}, "steps: expected a whole number"),
        ({"steps": 1 << 63}, "steps: expected a whole number"),
        ({"steps": 0, "names": "ab"}, "names: expected a list, got 'ab'"),
        ({"steps": 0, "names": ["a", 7]}, r"names\[1\]: expected a str, got 7"),
        ({"steps": 0, "values": {3: torch.ones(1)}}, "values: expected a string as a key, got 3"),
        ({"steps": 0, "values": {"w": [1.0]}}, r"values\['w'\]: expected a Tensor, got a list"),
        ({"steps": 0, "state": {"a": {}}}, "state: expected a whole number as a key, got 'a'"),
        ({"steps": 0, "state": {2: {"mu": torch.ones(2, 2)}}}, r"state\[2\].mu: expected a tensor of one dim"),
        ({"steps": 0, "state": {2: {"mu": torch.ones(2, device="meta")}}}, "a tensor of one dim"),
        ({"steps": 0, "state": {2: {"mu": torch.ones(2).to_sparse()}}}, "a tensor of one dim"),
    ],
)
def test_values_have_the_shape_or_the_place_is_named(value, words):
    if not words:
        check_values(value, SHAPE, "a file")
        return
    with pytest.raises(zerofn.CheckpointError, match=words):
        check_values(value, SHAPE, "a file")

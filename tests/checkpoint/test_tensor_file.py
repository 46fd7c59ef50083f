"""The stream writer and interval reader of safetensors files, against the safetensors library."""

import json
import os
import tracemalloc

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zerofn.checkpoint import file_sources, tensor_file
from zerofn.checkpoint.tensor_file import DTYPES, TensorFile, TensorToWrite, mark_of, write_file
from zerofn.util.errors import CheckpointError


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = {f"a {code}": torch.randn(3, 5, generator=generator).to(t) for code, t in DTYPES.items()}
    out |= {"scalar": torch.tensor(3, dtype=torch.int16), "empty": torch.empty(0, 4), "conj": out["a C64"].conj()}
    return out | {"long": torch.arange(50_000, dtype=torch.float64), "transposed": torch.randn(4, 3).T}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK", 4096)


def write(path, values, save="0123456789ab"):
    return write_file(path, [TensorToWrite.of(name, x) for name, x in values.items()], save=save)[0]


@pytest.mark.parametrize("save", ["0123456789ab", None])
def test_the_library_reads_what_is_written(tmp_path, small_blocks, save):
    values = tensors()
    written = write(tmp_path / "a", values, save)
    assert mark_of(tmp_path / "a") == (save or "")
    assert (tmp_path / "a").stat().st_size == written.nbytes
    loaded = load_file(tmp_path / "a")
    assert set(loaded) == set(values)
    for name, x in values.items():
        assert loaded[name].dtype == x.dtype and loaded[name].shape == x.shape
        assert torch.equal(loaded[name].view(-1).view(torch.uint8), x.resolve_conj().reshape(-1).view(torch.uint8))
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("a, b", [(0, 50_000), (0, 1), (511, 513), (512, 1024), (1000, 40_001), (49_999, 50_000)])
def test_intervals(tmp_path, small_blocks, a, b):
    values = tensors()
    written = write(tmp_path / "ours", values)
    save_file({"long": values["long"]}, tmp_path / "theirs")
    for file in (TensorFile(tmp_path / "ours", written), TensorFile(tmp_path / "theirs")):
        into = torch.zeros(b - a, dtype=torch.float32)
        file.read("long", a, into)
        file.close()
        assert torch.equal(into, values["long"][a:b].float())


def test_a_read_touches_only_its_blocks(tmp_path, small_blocks, monkeypatch):
    write(tmp_path / "a", tensors())
    file = TensorFile(tmp_path / "a")
    loaded, load = [], TensorFile._load
    monkeypatch.setattr(TensorFile, "_load", lambda self, n, k: loaded.append(k) or load(self, n, k))
    file.read("long", 512 * 3 + 5, torch.zeros(512, dtype=torch.float64))
    file.close()
    assert loaded == [3, 4]


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(file_sources, "MAX_OPEN", 4)
    for i in range(20):
        write(tmp_path / str(i), {"x": torch.full((3,), float(i)), "y": torch.zeros(3)})
    files, num_open = file_sources._Files(tmp_path, None, ""), []
    for name in ("x", "y", "x"):  # files that were closed are opened again
        for i in range(20):
            into = torch.ones(3)
            files[str(i)].read(name, 0, into)
            assert torch.equal(into, torch.full((3,), i if name == "x" else 0.0))
            num_open.append(num_open_in(tmp_path))
    assert max(num_open) == 4
    files.close()
    assert num_open_in(tmp_path) == 0


def num_open_in(folder) -> int:
    links = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    return sum(os.path.dirname(link) == str(folder.resolve()) for link in links)


def damage(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_is_seen(tmp_path, small_blocks):
    path = tmp_path / "a"
    written = write(path, {"x": torch.zeros(3000)})
    damage(path, written.nbytes - 1)
    file = TensorFile(path, written)
    file.read("x", 0, torch.zeros(1024))
    with pytest.raises(CheckpointError, match=r"a is damaged: the bytes of 'x' from 8,192 on"):
        file.read("x", 0, torch.zeros(3000))
    file.close()


@pytest.mark.parametrize("size", [0, 5, 30, 500])
@pytest.mark.parametrize("known", [True, False])
def test_truncation_is_seen(tmp_path, size, known):
    path = tmp_path / "a"
    written = write(path, {"x": torch.zeros(3000)})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated"):
        TensorFile(path, written if known else None)


def test_a_file_of_another_save_is_seen(tmp_path):
    written = write(tmp_path / "a", {"x": torch.zeros(3000)})
    write(tmp_path / "a", {"x": torch.ones(3000)})
    with pytest.raises(CheckpointError, match="another save"):
        TensorFile(tmp_path / "a", written)


WRONG_SIZE = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'


@pytest.mark.parametrize("header", [b"not JSON", b'{"x": 3}', WRONG_SIZE])
def test_what_is_no_safetensors_file(tmp_path, header):
    path = tmp_path / "a"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    with pytest.raises(CheckpointError, match="not a (valid )?safetensors file"):
        TensorFile(path)


def entry(**changed):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed


MALFORMED = {
    "no object": [1],
    "an empty name for all": {"x": None},
    "no dtype": {"x": {"shape": [2], "data_offsets": [0, 8]}},
    "more than is known": {"x": entry(order="C")},
    "a dtype that is no text": {"x": entry(dtype=[3])},
    "a shape that is no list": {"x": entry(shape=2)},
    "a shape of text": {"x": entry(shape="2")},
    "half an element": {"x": entry(shape=[2.0])},
    "true elements": {"x": entry(shape=[True, 2])},
    "below zero": {"x": entry(shape=[-1, -2])},
    "no end": {"x": entry(data_offsets=[0])},
    "an end before the start": {"x": entry(data_offsets=[8, 0])},
    "a start before the file": {"x": entry(data_offsets=[-8, 0])},
    "more than there is": {"x": entry(shape=[1 << 40], data_offsets=[0, 1 << 42])},
    "a shape beyond numbers": {"x": entry(shape=[1 << 62, 1 << 62], data_offsets=[0, 1 << 126])},
    "one place for two": {"x": entry(), "y": entry()},
    "a gap": {"x": entry(), "y": entry(data_offsets=[12, 20])},
    "a rest": {"x": entry(shape=[1], data_offsets=[0, 4])},
    "metadata that is a list": {"__metadata__": [1], "x": entry()},
    "checksums that are no JSON": {"__metadata__": {"zerofn.crc32": "{"}, "x": entry()},
    "checksums that are no object": {"__metadata__": {"zerofn.crc32": "3"}, "x": entry()},
    "checksums of others": {"__metadata__": {"zerofn.crc32": '{"y": "00000000"}'}, "x": entry()},
    "too few checksums": {"__metadata__": {"zerofn.crc32": '{"x": "0000"}'}, "x": entry()},
    "deep": '{"x": ' + "[" * 100_000,
    "twice": '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "x": null}',
    "a number of too many digits": '{"x": {"dtype": "F32", "shape": [' + "9" * 5000 + "]}}",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers(tmp_path, case):
    given = MALFORMED[case]
    text = (given if isinstance(given, str) else json.dumps(given)).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        TensorFile(tmp_path / "a")


def test_headers_are_read_within_limits(tmp_path):
    """A file of three GB that holds nothing: no memory is taken for what it says that it holds."""
    with open(tmp_path / "a", "wb") as file:
        file.write((3 * 10**9 - 8).to_bytes(8, "little"))
        file.truncate(3 * 10**9)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="its header has 2,999,999,992 bytes, more than the allowed 100,000,000"):
        TensorFile(tmp_path / "a")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_dtype_that_is_not_known(tmp_path):
    header = b'{"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}'
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(CheckpointError, match="'x' has dtype F4"):
        TensorFile(tmp_path / "a")

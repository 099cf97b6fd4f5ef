from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rorqual.engine.weights.header import read_header
from rorqual.engine.weights.reader import INDEX_NAME, Checkpoint
from tests.checkpoints import checkpoint


def write(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


def test_tensors_come_in_file_order_and_equal_safetensors() -> None:
    path = checkpoint("v32")
    found = Checkpoint(path)
    expected = {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    assert found.tensors.keys() == expected.keys()
    infos = list(found.tensors.values())
    assert infos == sorted(infos, key=lambda t: (t.file.name, t.start))
    for file in found.files:
        shard = found.open(file)
        for info in infos:
            if info.file == file:
                assert torch.equal(shard.read(info), expected[info.name])
        shard.close()


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": torch.arange(1, 7).view(2, 3).to(dtype), "empty": torch.empty(0, 3).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    found = Checkpoint(tmp_path)
    shard = found.open(found.files[0])
    for name, tensor in tensors.items():
        read = shard.read(found.tensors[name])
        assert read.dtype == dtype and read.shape == tensor.shape and torch.equal(read.float(), tensor.float())
    shard.close()


def test_folder_without_index_reads_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, str(tmp_path / "one.safetensors"))
    save_file({"b": torch.ones(3)}, str(tmp_path / "two.safetensors"))
    assert list(Checkpoint(tmp_path).tensors) == ["a", "b"]


HEADERS = [
    (b"\x01\x02", "header is cut off"),
    ((1 << 40).to_bytes(8, "little") + b"{}", r"header is cut off \(the file has 10 bytes, the header needs 1099511627784\)"),
    ((9).to_bytes(8, "little") + b'{"a": {"d', r"header is not valid JSON"),
    ((4).to_bytes(8, "little") + b"\xff\xfe\x00\x01", r"header is not valid JSON"),
    ((2).to_bytes(8, "little") + b"[]", r"header is not a JSON object"),
]


@pytest.mark.parametrize(("content", "message"), HEADERS)
def test_torn_header(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        read_header(path)


ENTRIES = [
    ('{"a": ' + entry("F99") + "}", "header entry of tensor 'a' is not valid"),
    ('{"a": 3}', "header entry of tensor 'a' is not valid"),
    ('{"a": {"dtype": "F32", "shape": [2]}}', "header entry of tensor 'a' is not valid"),
    ('{"a": ' + entry(offsets=(0, 4)) + "}", r"tensor 'a' of shape \[2\] and dtype F32 needs 8 bytes, the header gives it 4"),
    ('{"a": ' + entry() + ', "a": ' + entry() + "}", "tensor 'a' is in the header twice"),
    ('{"a": ' + entry(offsets=(4, 12)) + "}", "is cut off: it has .* bytes, its tensors need .*; download it again"),
]


@pytest.mark.parametrize(("header", "message"), ENTRIES)
def test_bad_entries(tmp_path: Path, header: str, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header.encode(), bytes(8))
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        read_header(path)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint("v3"), folder)
    return folder


def test_truncated_shard(copy: Path) -> None:
    path = sorted(copy.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"^{path}: is cut off"):
        Checkpoint(copy)


def test_missing_shard(copy: Path) -> None:
    path = sorted(copy.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(ValueError, match=rf"^{path} is missing \(1 of the 3 files named in {INDEX_NAME}\); download it again"):
        Checkpoint(copy)


def test_index_names_a_tensor_that_is_not_there(copy: Path) -> None:
    index = json.loads((copy / INDEX_NAME).read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    (copy / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"model-00001-of-00003.safetensors: tensor 'model.extra' is not in it, although {INDEX_NAME}"):
        Checkpoint(copy)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_index_without_a_map(copy: Path, weight_map: object) -> None:
    (copy / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=f"{INDEX_NAME}: 'weight_map' must map tensor names to file names"):
        Checkpoint(copy)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, str(tmp_path / "one.safetensors"))
    save_file({"a": torch.ones(2)}, str(tmp_path / "two.safetensors"))
    with pytest.raises(ValueError, match="two.safetensors: tensor 'a' is also in one.safetensors; one of the files is stale"):
        Checkpoint(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"has no {INDEX_NAME} and no \*.safetensors file$"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="it has PyTorch pickles, which are not read: convert them to safetensors"):
        Checkpoint(tmp_path)

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.model_config import ModelConfig
from rorqual.engine.weights.loader import load_weights
from rorqual.engine.weights.reader import INDEX_NAME, Checkpoint
from rorqual.engine.weights.target import Target
from tests.checkpoints import TINY, checkpoint


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Target:
    return Target(tensor=torch.full(shape, float("nan"), dtype=dtype), index=tuple(slice(0, n) for n in shape), full_shape=shape)


def part(shape: tuple[int, ...], *bounds: tuple[int, int], dtype: torch.dtype = torch.float32) -> Target:
    tensor = torch.full([stop - start for start, stop in bounds], float("nan"), dtype=dtype)
    return Target(tensor=tensor, index=tuple(slice(*b) for b in bounds), full_shape=shape)


def main_names(folder: Path, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the main model and their shapes."""
    layers = tuple(f"model.layers.{n}." for n in range(config.n_layers, config.n_layers + 9))
    return {n: i.shape for n, i in Checkpoint(folder).tensors.items() if not n.startswith(layers) and not n.endswith("_scale_inv")}


def load(targets: dict[str, list[Target]], folder: Path, **kwargs: Any) -> Any:
    return load_weights(targets, folder, model=parse_model_config(folder), known=kwargs.pop("known", lambda name: True), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_arrives(dtype: torch.dtype) -> None:
    path = checkpoint("glm_dsa")
    values = stored(path)
    targets = {name: [whole(tuple(t.shape), dtype)] for name, t in values.items()}
    report = load(targets, path)
    for name, tensor in values.items():
        assert torch.equal(targets[name][0].tensor, tensor.to(dtype)), name
    assert report.files == len(list(path.glob("*.safetensors"))) and report.tensors == len(values)
    assert report.bytes_read == sum(t.numel() * 4 for t in values.values())
    assert report.seconds > 0 and report.skipped_mtp == 0 and report.unexpected == ()
    assert report.gb_per_s == pytest.approx(report.bytes_read / 1e9 / report.seconds)


def test_slices_and_strided_destinations() -> None:
    path = checkpoint("v3")
    name = "model.layers.0.self_attn.o_proj.weight"
    full = stored(path)[name]
    rows, columns = full.shape
    buffer = torch.full((columns, rows), float("nan"))
    targets = {
        name: [
            part((rows, columns), (0, rows), (columns // 4, columns // 2)),
            part((rows, columns), (3, 17), (5, 90)),
            Target(tensor=buffer.t(), index=(slice(None), slice(None)), full_shape=(rows, columns)),
            part((rows, columns), (4, 4), (0, columns)),
        ]
    }
    load(targets, path)
    first, second, third, _ = targets[name]
    assert torch.equal(first.tensor, full[:, columns // 4 : columns // 2])
    assert torch.equal(second.tensor, full[3:17, 5:90])
    assert torch.equal(third.tensor, full) and torch.equal(buffer, full.t())


def test_a_quarter_of_the_tensors_reads_a_quarter_of_the_bytes() -> None:
    path = checkpoint("v3")
    values = stored(path)
    experts = sorted(name for name in values if ".experts." in name)
    total = sum(values[name].numel() * 4 for name in experts)
    read = []
    for rank in range(4):
        mine = experts[rank * len(experts) // 4 : (rank + 1) * len(experts) // 4]
        read.append(load({name: [whole(tuple(values[name].shape))] for name in mine}, path).bytes_read)
    assert sum(read) == total and max(read) - min(read) <= 0.02 * total


def test_a_quarter_of_each_tensor_reads_a_quarter_of_the_bytes() -> None:
    path = checkpoint("v3")
    values = {name: t for name, t in stored(path).items() if t.dim() == 2}
    for dim in (0, 1):
        targets = {}
        for name, tensor in values.items():
            bounds = [(0, n) for n in tensor.shape]
            bounds[dim] = (0, tensor.shape[dim] // 4)
            targets[name] = [part(tuple(tensor.shape), *bounds)]
        report = load(targets, path)
        assert report.bytes_read == sum(math.prod(t[0].part_shape) * 4 for t in targets.values())
        assert report.bytes_read <= sum(t.numel() for t in values.values())


def test_only_files_with_wanted_tensors_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint("v3")
    opened = []
    original = Checkpoint.open
    monkeypatch.setattr(Checkpoint, "open", lambda self, file: opened.append(file.name) or original(self, file))
    info = Checkpoint(path).tensors["model.norm.weight"]
    report = load({info.name: [whole(info.shape)]}, path)
    assert opened == [info.file.name] and report.files == 1


def reset_peak() -> int:
    """Reset the peak resident memory of this process; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_peak_memory_is_near_one_tensor(tmp_path: Path) -> None:
    size, count = 8 << 20, 24
    data = {f"w{i}": torch.full((size // 4 // 1024, 1024), float(i)) for i in range(count)}
    save_file(data, str(tmp_path / "model.safetensors"))
    del data
    shutil.copyfile(checkpoint("v3") / "config.json", tmp_path / "config.json")
    place = whole((size // 4 // 1024, 1024))
    place.tensor.zero_()
    before = reset_peak()
    report = load({f"w{i}": [place] for i in range(count)}, tmp_path)
    assert report.bytes_read == count * size
    assert peak() - before < 3 * size  # all of the file would be 24 tensors


def test_mtp_layers_are_counted_and_skipped() -> None:
    config = parse_model_config(TINY)
    names = main_names(TINY, config)
    report = load({name: [whole(shape, torch.bfloat16)] for name, shape in names.items()}, TINY, known=lambda name: False)
    assert (report.tensors, report.skipped_mtp, report.unexpected) == (288, 73, ())
    assert "skipped 73 MTP tensors" in report.summary()


def test_known_and_unexpected_tensors(tmp_path: Path) -> None:
    for file in checkpoint("v3").iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / INDEX_NAME).unlink()
    save_file({"model.visual.weight": torch.ones(1), "model.more": torch.ones(1)}, str(tmp_path / "extra.safetensors"))
    name = "model.norm.weight"
    report = load({name: [whole((128,))]}, tmp_path, known=lambda n: not n.startswith(("model.visual", "model.more")))
    assert sorted(report.unexpected) == ["model.more", "model.visual.weight"]
    assert "2 unexpected tensors were ignored: model." in report.summary()


def test_missing_tensors_are_listed() -> None:
    path = checkpoint("v3")
    targets = {f"model.absent.{i}": [whole((2,))] for i in range(7)} | {"model.norm.weight": [whole((128,))]}
    message = (
        f"{path} lacks 7 of the 8 tensors needed here: "
        "model.absent.0, model.absent.1, model.absent.2, model.absent.3, model.absent.4 and 2 more$"
    )
    with pytest.raises(ValueError, match=message):
        load(targets, path)
    with pytest.raises(ValueError, match="lacks 1 of the 1 tensors needed here: model.absent.0$"):
        load({"model.absent.0": [whole((2,))]}, path)


def test_shape_mismatch_names_tensor_expected_and_found() -> None:
    place = whole((64,))
    with pytest.raises(ValueError, match=r"safetensors: tensor model.norm.weight must have shape \[64\], found \[128\]"):
        load({"model.norm.weight": [place]}, checkpoint("v3"))
    assert place.tensor.isnan().all()


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, dtype=torch.int8)}, str(tmp_path / "model.safetensors"))
    shutil.copyfile(checkpoint("v3") / "config.json", tmp_path / "config.json")
    with pytest.raises(ValueError, match="tensor w must be floating point, found torch.int8"):
        load({"w": [whole((2,))]}, tmp_path)


def test_progress_bar_counts_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint("v3")
    load({"model.norm.weight": [whole((128,))]}, path)
    assert capsys.readouterr().err == ""
    load({"lm_head.weight": [whole((512, 128))]}, path, progress=True)
    assert "loading weights: 100%" in capsys.readouterr().err


def test_target_checks_itself() -> None:
    with pytest.raises(AssertionError, match="differs from the part"):
        Target(tensor=torch.empty(3), index=(slice(0, 2),), full_shape=(4,))

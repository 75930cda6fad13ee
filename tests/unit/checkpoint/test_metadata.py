"""Metadata of distributed checkpoints: read without running it; damage is named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megappo.checkpoint.metadata import check_pickles, read_metadata
from megappo.checkpoint.stored import StoredModel, View
from megappo.checkpoint.torch_file import locate_tensor


class _Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as torch writes it: two tensors and an optimizer's."""
    path = tmp_path / "checkpoint"
    tensors = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3).bfloat16()}
    save(
        {**tensors, "optimizer.a": torch.zeros(4, 6)},
        storage_writer=FileSystemWriter(path),
        no_dist=True,
    )
    (path / "metadata.json").write_text("{}")
    torch.save({"step": 1}, path / "common.pt")
    return path


def test_stored_tensors_are_read_by_boxes(folder: Path) -> None:
    """Types and sizes from the metadata; a box beyond the end is filled as far as it goes."""
    stored = StoredModel(folder)
    assert stored.entries == {"a": (torch.float32, (4, 6)), "b": (torch.bfloat16, (3,))}
    assert stored.num_optimizer_tensors == 1
    target = torch.full((3, 2), -1.0)
    stored.read(View("a", (2, 1), (3, 2), 0, (2, 1), padded=True), target)
    assert target.tolist() == [[13, 14], [19, 20], [-1, -1]]
    whole = stored.exact(View("b", (0,), (3,), 0, (1,), padded=False))
    assert whole is not None and torch.equal(whole, torch.ones(3).bfloat16())
    assert stored.exact(View("a", (0, 0), (2, 6), 0, (6, 1), padded=False)) is None


@pytest.mark.parametrize(
    ("function", "args"),
    [(os.mkdir, ("PWNED",)), (eval, ("1",)), (getattr, (dict, "get"))],
)
def test_nothing_in_the_metadata_is_run(
    folder: Path, function: Any, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle that names anything but the format's records is refused, unrun."""
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil(function, *args)))
    with pytest.raises(ValueError, match=r"\.metadata is not a distributed checkpoint's metadata"):
        read_metadata(folder)
    assert not (folder / "PWNED").exists()


def test_nothing_in_common_or_a_tensor_is_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise ``common.pt``, and an item in a file of tensors."""
    monkeypatch.chdir(folder)
    check_pickles(folder)
    evil = _Evil(os.mkdir, "PWNED")
    torch.save({"step": evil}, folder / "common.pt")
    with pytest.raises(ValueError, match=r"common\.pt is not loaded"):
        check_pickles(folder)
    torch.save(evil, folder / "tensor")
    with (folder / "tensor").open("rb") as file, pytest.raises(pickle.UnpicklingError):
        locate_tensor(file)
    assert not (folder / "PWNED").exists()


def test_damage_is_named(folder: Path) -> None:
    """C12: a cut or missing file of tensors, a cut metadata, a path that leaves the folder."""
    [data] = folder.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-5])
    with pytest.raises(ValueError, match=r"distcp is cut off .* not whole"):
        read_metadata(folder)
    data.unlink()
    with pytest.raises(ValueError, match="distcp is missing"):
        read_metadata(folder)
    data.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match=r"distcp: a cannot be read"):
        StoredModel(folder).exact(View("a", (0, 0), (4, 6), 0, (6, 1), padded=False))
    metadata = read_metadata(folder)
    for place in metadata.storage_data.values():
        place.relative_path = f"../{folder.name}/{place.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="which is not a file in"):
        read_metadata(folder)
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"\.metadata is not a distributed checkpoint's metadata"):
        read_metadata(folder)
    (folder / "metadata.json").unlink()
    with pytest.raises(ValueError, match="is not a Megatron-Core distributed checkpoint"):
        read_metadata(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_located_as_torch_loads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also a transposed view into a larger storage."""
    base = torch.arange(60).to(dtype).view(6, 10)
    for tensor in (base, base[2:5, 3:].t(), base[0, 0]):
        torch.save(tensor, tmp_path / "t")
        with (tmp_path / "t").open("rb") as file:
            at = locate_tensor(file)
            file.seek(at.data_offset)
            data = torch.frombuffer(bytearray(file.read(at.num_bytes)), dtype=at.dtype)
        assert torch.equal(data.as_strided(at.size, at.stride, at.start), tensor)

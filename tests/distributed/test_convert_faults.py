"""Conversions that are killed, run out of disk, or are given something wrong.

A child is forked for each: it has everything imported, and dies or fails where it is told.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint_tools.folders import identify
from checkpoint_tools.hf_to_megatron import hf_to_megatron
from checkpoint_tools.megatron_to_hf import megatron_to_hf
from checkpoint_tools.verify import largest_difference, verify
from megappo.reshard.hf import LocalReader
from megappo.weights.families import shape_from_config
from megappo.weights.shape import ModelShape
from tests.support.convert import assert_same, hf_tensors, make_source, stored_tensors, to_megatron
from tests.support.ranks import run_ranks

FOLDER = TemporaryDirectory(prefix="faults-")
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
POINTS = 7


@cache
def source() -> Path:
    """A Hugging Face folder."""
    return make_source(Path(FOLDER.name) / "source", "qwen3", layers=2)


@cache
def megatron() -> Path:
    """Its distributed checkpoint."""
    path = Path(FOLDER.name) / "megatron"
    run_ranks(1, to_megatron, str(source()), str(path), {"check": False})
    return path


def import_to(out: Path) -> None:
    """The one direction."""
    hf_to_megatron(source(), out, check=False)


def export_to(out: Path) -> None:
    """The other."""
    megatron_to_hf(megatron(), out, max_shard_bytes=50_000)


def in_child(action: Callable[[], None]) -> tuple[int, str]:
    """Exit code of a forked child (negative: the signal), and what its exception said."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 0
        try:
            action()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
            code = 1
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def killed_at(point: int, out: Path, action: Callable[[Path], None]) -> int:
    """Run until the ``point``-th event under the folder of ``out``, which it does not survive."""

    def run() -> None:
        left = point

        def watch(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            here = str(out.parent)
            if event in EVENTS and any(here in str(arg) for arg in args[:2]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        action(out)

    return in_child(run)[0]


@pytest.mark.parametrize(
    ("action", "contents", "fresh"),
    [(import_to, stored_tensors, megatron), (export_to, hf_tensors, source)],
    ids=["to_megatron", "to_hf"],
)
def test_killed_at_any_moment(
    action: Callable[[Path], None],
    contents: Callable[[Path], Any],
    fresh: Callable[[], Path],
    tmp_path: Path,
) -> None:
    """C7: there is no folder, or there is a whole one; and the next try succeeds over the rest."""
    expected, megatron_too = contents(fresh()), megatron()
    assert megatron_too.is_dir()
    out = tmp_path / "out"
    survived, point, kills = False, 1, 0
    while not survived:
        survived = killed_at(point, out, action) == 0
        kills += not survived
        if out.exists():
            assert_same(contents(out), expected)
        else:
            assert not survived
            assert identify(out).kind == "missing"
        point += 1 + point // POINTS
    assert kills >= POINTS
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_while_replacing(tmp_path: Path) -> None:
    """An older result is whole in its place, or comes back with the next try, until the new one."""
    out = tmp_path / "out"
    assert killed_at(10**6, out, export_to) == 0
    expected = hf_tensors(out)

    def run() -> None:
        def watch(event: str, args: tuple[Any, ...]) -> None:
            if event == "os.rename" and str(args[1]).endswith("/out"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        export_to(out)

    assert in_child(run)[0] == -signal.SIGKILL
    assert not out.exists() and (tmp_path / ".replaced_out").is_dir()
    assert killed_at(10**6, out, export_to) == 0
    assert_same(hf_tensors(out), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("action", [import_to, export_to])
def test_out_of_disk(action: Callable[[Path], None], tmp_path: Path) -> None:
    """C7: files cannot grow beyond a limit: an OSError, and nothing is left."""
    megatron()
    for limit in (0, 4_000, 40_000):

        def run(limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            action(tmp_path / "out")

        code, said = in_child(run)
        assert code == 1 and said.startswith("OSError")
        assert list(tmp_path.iterdir()) == []


def drop(folder: Path, *keys: str) -> None:
    """Take tensors out of a checkpoint's metadata."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    for key in keys:
        del metadata.state_dict_metadata[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "keys",
    [
        ["decoder.layers.self_attention.q_layernorm.weight"],
        ["decoder.layers.mlp.linear_fc1.layer_norm_weight", "decoder.final_layernorm.weight"],
        ["output_layer.weight"],
    ],
)
def test_absent_tensors_are_listed(keys: list[str], tmp_path: Path) -> None:
    """C7: by name, before anything is written."""
    damaged = tmp_path / "damaged"
    run_ranks(1, to_megatron, str(source()), str(damaged), {"check": False})
    drop(damaged, *keys)
    code, said = in_child(lambda: void(megatron_to_hf(damaged, tmp_path / "out")))
    assert code == 1 and f"lacks {len(keys)} tensors" in said
    assert all(key in said for key in keys)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def void(_: object) -> None:
    """Forget a result."""


@pytest.mark.parametrize(
    "wrong", [{"norm_eps": 1e-6}, {"rope_theta": 9e3}, {"qk_norm": False}, {"head_dim": 16}]
)
def test_a_configuration_carried_over_wrongly_is_noticed(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11: weights alone prove nothing; the logits differ, and nothing is written."""
    folder = make_source(tmp_path / "source", "qwen3", layers=2, rms_norm_eps=1e-2)

    def misread(*args: Any, **kwargs: Any) -> ModelShape:
        return replace(shape_from_config(*args, **kwargs), **wrong)

    monkeypatch.setattr("checkpoint_tools.models.shape_from_config", misread)
    code, said = in_child(lambda: void(hf_to_megatron(folder, tmp_path / "out", check=True)))
    assert code == 1 and ("logits differ" in said or "its configuration" in said)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_swapped_weight_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: the check is of what was written."""
    real = LocalReader.part

    def negated(self: Any, name: str, *args: Any) -> torch.Tensor:
        part = real(self, name, *args)
        return -part if name.endswith("1.mlp.linear_fc2.weight") else part

    monkeypatch.setattr(LocalReader, "part", negated)
    code, said = in_child(lambda: void(hf_to_megatron(source(), tmp_path / "out", check=True)))
    assert code == 1 and "logits differ from transformers' by up to" in said
    assert list(tmp_path.iterdir()) == []


def test_verify_tells_what_differs(tmp_path: Path) -> None:
    """Between formats: equal; another weight, another name, another type."""

    def run() -> None:
        same = verify(source(), megatron())
        assert same.within(1e-4) and set(same.differences.values()) == {0.0}
        assert same.logits is not None and 0 < same.logits <= 1e-4
        other = make_source(tmp_path / "other", "qwen3", layers=2, seed=1)
        unlike = verify(megatron(), other)
        assert not unlike.within(1e-4) and unlike.within(1e4)
        assert unlike.logits is not None and unlike.logits > 0.1
        tied = make_source(tmp_path / "tied", "qwen3", layers=2, tied=True)
        fewer = verify(megatron(), tied, logits=False)
        assert fewer.only_a == ("lm_head.weight",) and not fewer.within(1e4)
        hf_to_megatron(source(), tmp_path / "bf16", dtype=torch.bfloat16, check=True)
        rounded = verify(source(), tmp_path / "bf16", logits=False)
        assert 0 < max(rounded.differences.values()) < 0.1
        alike = verify(source(), tmp_path / "bf16", dtype=torch.bfloat16)
        assert alike.logits is not None and alike.logits <= 1e-4

    code, said = in_child(run)
    assert code == 0, said


def test_differences_of_what_is_no_number() -> None:
    """NaN and infinity differ from everything but themselves, bit for bit."""
    nan, one = torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, 1.0])
    assert largest_difference(nan, one) == torch.inf
    assert largest_difference(one.bfloat16(), one) == 0.0
    assert largest_difference(torch.tensor([torch.inf]), torch.tensor([0.0])) == torch.inf

"""Memory of imports and conversions, measured on a model of 100 million parameters.

Anonymous memory: pages of mapped files can be dropped at any time and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks.child import Usage, measured
from benchmarks.convert import write_model
from benchmarks.models import num_parameters, shape_of
from checkpoint_tools.hf_to_megatron import hf_to_megatron
from checkpoint_tools.megatron_to_hf import megatron_to_hf
from megappo.reshard.hf import import_hf
from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout

SHAPE = shape_of("llama", 100_000_000)
FIXED = 24 * 1000**2
WHOLE = 2 * num_parameters(SHAPE)


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """A random bfloat16 model in several files."""
    with TemporaryDirectory(prefix="memory-") as folder:
        path = Path(folder) / "source"
        measured(write_model, path, SHAPE, torch.bfloat16)
        yield path


def test_the_tools_hold_one_parameter(source: Path) -> None:
    """Whatever the model's size: the largest tensor, and a fixed overhead."""
    largest = max(2 * torch.Size(size).numel() for size in canonical_tensors(SHAPE).values())
    assert largest + FIXED < WHOLE / 4
    megatron, back = source.parent / "megatron", source.parent / "back"
    usages: dict[str, Usage] = {
        "to_megatron": measured(lambda: hf_to_megatron(source, megatron, check=False)),
        "to_hf": measured(lambda: megatron_to_hf(megatron, back)),
        "cast": measured(
            lambda: hf_to_megatron(source, megatron, dtype=torch.float32, check=False)
        ),
    }
    assert usages["to_megatron"].peak_anonymous_bytes <= largest + FIXED, usages
    assert usages["to_hf"].peak_anonymous_bytes <= largest + FIXED, usages
    assert usages["cast"].peak_anonymous_bytes <= 2 * largest + FIXED, usages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rank_holds_its_shard(source: Path, dtype: torch.dtype) -> None:
    """A rank of TP2 x PP2 that imports: its own tensors, one slice, a fixed overhead."""
    layout = megatron_layout(load_shape(source), Topology(4, tp=2, pp=2))
    shapes = layout.local_shapes(3)
    shard = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize

    def read() -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        import_hf(CheckpointReader(source), layout, 3, tensors)
        return tensors

    assert measured(read).peak_anonymous_bytes <= shard + FIXED

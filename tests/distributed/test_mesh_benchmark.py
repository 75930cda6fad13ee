"""The mesh benchmark: a line for each layout, and the same work in both of its ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.convert import write_model
from benchmarks.mesh import bubble, main, make_batch
from benchmarks.models import shape_with
from megappo.data.packing import TOLERANCE
from megappo.topology import Topology
from megappo.weights.families import load_shape


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Stages and chunks; experts over replicas."""
    small = (
        "--layers 4 --vocab 256 --tokens 200 --micro-batch-tokens 128 --runs 1 --layout ".split()
    )
    main([*small, "pp2,vpp2"])
    main(["--family", "mixtral", *small, "dp2,ep2"])
    dense, experts = map(json.loads, capsys.readouterr().out.splitlines())
    assert (dense["layout"], experts["layout"]) == ("pp2,vpp2", "dp2,ep2")
    for line in (dense, experts):
        assert line["tokens"] >= 200 and line["micro_batches"] >= 1
        assert line["ratio"] > 0 and line["cpu_ratio"] > 0 and line["memory_mb"] > 0
    assert dense["bubble"] > 0 == experts["bubble"]


@pytest.mark.parametrize(
    ("topology", "count", "expected"),
    [
        (Topology(1), 4, 0.0),
        (Topology(2, pp=2), 8, 1 / 9),
        (Topology(2, pp=2, vpp=2), 8, 1 / 17),
        (Topology(4, pp=4), 4, 3 / 7),
    ],
)
def test_bubble(topology: Topology, count: int, expected: float) -> None:
    """(pp - 1) / (m vpp + pp - 1)."""
    assert bubble(topology, count) == pytest.approx(expected)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_model_and_batch(family: str, tmp_path: Path) -> None:
    """The folder has the shape that was asked for; replicas have as many tokens."""
    shape = shape_with(family, 256, 2, 128)
    write_model(tmp_path / "model", shape, torch.float32)
    loaded = load_shape(str(tmp_path / "model"))
    assert (loaded.num_layers, loaded.vocab_size, loaded.num_experts) == (2, 128, shape.num_experts)
    rollouts, plan = make_batch(shape, 2000, 2, 256)
    lengths = plan.prompt_lens + plan.response_lens
    assert lengths.sum() == len(rollouts.tokens) >= 2000 and plan.num_steps == 1
    assert lengths[plan.replicas == 0].sum() <= TOLERANCE * lengths.sum() / 2

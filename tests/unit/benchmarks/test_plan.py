"""The planning benchmark: its figures against a count by hand, and its goals at full size."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.plan import figures, layouts, main
from benchmarks.published_models import MODELS
from benchmarks.sizes import engine_sizes, mesh_sizes
from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.families import shape_from_config
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.vllm import vllm_layout
from tests.support.weights import tiny_shape


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("qwen2.5-72b", 72.71),
        ("qwen3-235b-a22b", 235.09),
        ("mixtral-8x7b", 46.70),
    ],
)
def test_published_models_have_their_size(model: str, billions: float) -> None:
    """A wrong field changes the number of parameters."""
    tensors = canonical_tensors(shape_from_config(MODELS[model]))
    total = sum(int(np.prod(size)) for size in tensors.values())
    assert round(total / 1e9, 2) == billions


def test_figures_are_those_of_a_count_by_hand() -> None:
    """Copy by copy in Python, with bf16's two bytes."""
    source = megatron_layout(tiny_shape(layers=4), Topology(8, 2, 2))
    target = vllm_layout(tiny_shape(layers=4), 8, 4)
    the_plan = plan(source, target, ranks_per_node=4)
    taken, sent, kept, crossed = [0] * 8, [0] * 8, 0, 0
    for k in range(len(the_plan.extent)):
        here, there = int(the_plan.source_rank[k]), int(the_plan.destination_rank[k])
        size = 2 * int(the_plan.extent[k].prod())
        if here == there:
            kept += size
        else:
            taken[there] += size
            sent[here] += size
            crossed += size if here // 4 != there // 4 else 0
    found = figures(the_plan, 4)
    assert found["num_copies"] == len(the_plan.extent)
    assert found["received_ratio"] == 1
    assert found["bytes_in"] == {"min": min(taken), "mean": sum(taken) // 8, "max": max(taken)}
    assert found["bytes_out"] == {"min": min(sent), "mean": sum(sent) // 8, "max": max(sent)}
    written = 2 * int(target.local_shape.prod(axis=1).sum())
    assert found["between_nodes_ratio"] == round(crossed / written, 4)
    assert found["kept_ratio"] == round(1 - sum(taken) / written, 4)
    assert sum(taken) + kept + 2 * int(target.zero_extent.prod(axis=1).sum()) == written


def test_imbalance_is_seen() -> None:
    """One replica that sends everything to one taker, where two could."""
    shape = tiny_shape(layers=1)
    source, target = megatron_layout(shape, Topology(2)), vllm_layout(shape, 2, 1)
    fair = plan(source, target)
    assert figures(fair)["source_imbalance"] == 1  # nothing is sent
    ends = fair.ends.copy()
    ends[1] = source.first_local[source.box_tensor[ends[0]]]  # everything from rank 0
    assert figures(replace(fair, ends=ends))["source_imbalance"] == 2


def test_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints what its documentation says."""
    arguments = "--model llama-3.1-8b --source tp2,dp2 --target tp2x3 --disaggregated".split()
    monkeypatch.setattr(sys, "argv", ["benchmarks.plan", *arguments])
    main()
    line = json.loads(capsys.readouterr().out)
    assert line["received_ratio"] == 1
    assert 1 <= line["source_imbalance"] <= 1.1
    assert line["bytes_in"]["min"] > 8e9
    assert line["seconds"] > 0
    assert line["peak_rss_mb"] > 0


def test_405b_on_1024_ranks() -> None:
    """The goal: under 10 s, each byte once, replicas within a tenth of their mean."""
    begin = time.process_time()
    source, target = layouts("llama-3.1-405b", mesh_sizes("tp8,pp16,dp8"), 16, 64)
    the_plan = plan(source, target)
    assert time.process_time() - begin < 10
    found = figures(the_plan)
    assert found["num_copies"] == 1_164_288
    assert found["received_ratio"] == 1
    assert isinstance(found["source_imbalance"], float)
    assert found["source_imbalance"] <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [[], ["--ranks-per-node", "8"]])
def test_235b_with_experts_on_1024_ranks(nodes: list[str]) -> None:
    """The same goal, and under 2 GB, for 38 million copies."""
    case = "--model qwen3-235b-a22b --source tp4,pp16,dp16,ep8 --target tp16x64".split()
    command = [sys.executable, "-m", "benchmarks.plan", *case, *nodes]
    line = json.loads(subprocess.check_output(command, text=True))
    assert line["cpu_seconds"] < 10
    assert line["peak_rss_mb"] < 2048
    assert line["received_ratio"] == 1
    assert line["source_imbalance"] <= 1.1


def test_sizes_on_the_command_line() -> None:
    """What is understood, and that colocated engines fill the mesh."""
    assert mesh_sizes("tp8,pp16") == {"tp": 8, "pp": 16, "dp": 1, "ep": 1, "vpp": 1}
    assert engine_sizes("tp16x64") == (16, 64)
    assert engine_sizes("tp4") == (4, 1)
    for wrong in ("16x64", "tp16x", "tpx4", "tp16,4"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size and a count"):
            engine_sizes(wrong)
    with pytest.raises(ValueError, match="3 engines of 2 ranks do not fill a mesh of 8"):
        layouts("llama-3.1-8b", mesh_sizes("tp2,dp4"), 2, 3)

"""The benchmark of resharding: its ways agree, for every family, and the counts are true."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.models import num_parameters, shape_of
from benchmarks.reshard import Case, Measured, measure
from megappo.topology import Topology
from megappo.weights.families import FAMILIES
from megappo.weights.layout import shifted, widened
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.shape import ModelShape
from megappo.weights.vllm import vllm_layout
from tests.support.ranks import run_ranks


def _tiny(family: str) -> ModelShape:
    """A few thousand parameters, without padding of the vocabulary on either side."""
    shape = shape_of(family, 10_000_000)
    return dataclasses.replace(
        shape,
        num_layers=3,
        hidden_size=24,
        ffn_hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=128,
        num_experts=min(shape.num_experts, 4),
    )


def _case(shape: ModelShape, topology: Topology, engine_tp: int, apart: int) -> Case:
    topology = topology if shape.num_experts else dataclasses.replace(topology, ep=1)
    source = megatron_layout(shape, topology)
    world_size = topology.world_size + apart
    target = vllm_layout(shape, apart or topology.world_size, engine_tp)
    if apart:
        source, target = (
            widened(source, world_size),
            shifted(target, world_size - apart, world_size),
        )
    return Case(plan(source, target), torch.float32, 4096, 1, topology)


@pytest.mark.parametrize(
    ("topology", "engine_tp", "apart"),
    [(Topology(4, 2, 2, 2), 2, 0), (Topology(2, ep=2), 1, 2)],
    ids=["inside", "apart"],
)
def test_every_family_receives_what_it_owns(topology: Topology, engine_tp: int, apart: int) -> None:
    """Bytes counted at the transport are those owned, to the alignment of small messages.

    ``measure`` itself compares executor and full gather with the engines' layout, bit for bit.
    """
    cases = [_case(_tiny(family), topology, engine_tp, apart) for family in FAMILIES]
    results: list[list[Measured]] = run_ranks(topology.world_size + apart, _measure_all, cases)
    for ranks in zip(*results, strict=True):
        engines = [rank for rank in ranks if rank.bytes_owned]
        assert len(engines) == (apart or topology.world_size)
        for rank in engines:
            assert rank.bytes_owned <= rank.bytes_received < 1.05 * rank.bytes_owned
            assert rank.gather_bytes_received >= rank.bytes_owned
            assert all(len(times) == 1 and times[0] > 0 for times in rank.seconds.values())
        if engine_tp > 1:
            assert engines[0].gather_bytes_received > 1.5 * engines[0].bytes_owned


def _measure_all(rank: int, cases: list[Case]) -> list[Measured]:
    return [measure(rank, case) for case in cases]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_models(family: str) -> None:
    """A hundred million parameters are meant as said."""
    assert num_parameters(shape_of(family, 100_000_000)) == pytest.approx(1e8, rel=0.15)

"""Reward models on the mesh give transformers' scores, whatever the layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import MeshSettings, RoleSettings
from megappo.records import ScoreRequest, ScoreText
from megappo.topology import Topology
from tests.support.models import EOS, make_model
from tests.support.ranks import run_ranks

FOLDERS = TemporaryDirectory(prefix="reward-models-")
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"vocab": 64},
    "qwen2": {},
    "qwen3": {"kv_heads": 1},
    "mistral": {},
}
EXPERTS: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "mixtral": {}}
LAYOUTS = [
    (Topology(1), False),
    (Topology(2, tp=2), False),
    (Topology(2, tp=2), True),
    (Topology(2, pp=2), False),
    (Topology(2), False),  # two replicas
    (Topology(4, tp=2, pp=2, vpp=2), True),
    (Topology(4, tp=2, ep=2), True),
    (Topology(2, ep=2), False),
]
CHAT = ({"role": "user", "content": "why?"},)
SAMPLES = [
    ScoreText("1+1=", CHAT, "2", True),
    ScoreText("1+1=", CHAT, "", True),
    ScoreText("tell me of it: ", CHAT, "a longer answer, cut in the mid", False),
    ScoreText("x", CHAT, "yy", True),
    ScoreText("12+34=", CHAT, "46 and that is all", True),
]


@cache
def folder(family: str) -> str:
    """A reward model of five layers."""
    options = {**DENSE, **EXPERTS}[family]
    path = Path(FOLDERS.name) / family
    return str(make_model(path, family, layers=5, value_head=True, **options))


@cache
def expected(family: str, chat: bool) -> list[float]:
    """What transformers says of each sample alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder(family), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder(family))
    scores = []
    for sample in SAMPLES:
        if chat:
            ids = tokenizer(f"user: why?\nassistant: {sample.response}\n")["input_ids"]
        else:
            ids = tokenizer(sample.prompt + sample.response)["input_ids"]
            ids += [EOS] if sample.ended else []
        with torch.no_grad():
            scores.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return scores


def score(
    rank: int, topology: Topology, sequence_parallel: bool, folders: list[str], chat: bool
) -> list[list[float]]:
    """All models' scores of this replica's samples: one replica of two has three of five."""
    settings = MeshSettings(sequence_parallel=sequence_parallel)
    mesh = MeshRank(rank, topology, settings)
    for number, path in enumerate(folders):
        mesh.add_role(
            RoleSettings(f"reward_{number}", path, "value", reads="chat" if chat else "text")
        )
    replica = topology.coordinates(rank).dp
    samples = tuple(
        sample if chat else ScoreText(sample.prompt, None, sample.response, sample.ended)
        for sample in SAMPLES[replica :: topology.dp]
    )
    many = mesh.score(ScoreRequest(samples, token_budget=1000))
    few = mesh.score(ScoreRequest(samples, token_budget=20))
    assert torch.tensor(few).allclose(torch.tensor(many), atol=1e-4)
    none = mesh.score(ScoreRequest(samples if replica else (), token_budget=20))
    assert all(len(scores) == (len(samples) if replica else 0) for scores in none)
    return few


# How a sample is read has to do with no layout.
@pytest.mark.parametrize(
    "chat", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["text", "chat"]
)
@pytest.mark.parametrize(("topology", "sequence_parallel"), LAYOUTS, ids=str)
def test_scores_equal_transformers(topology: Topology, sequence_parallel: bool, chat: bool) -> None:
    """Several models at once; any micro-batches; replicas with fewer samples, or none."""
    experts = topology.tp == 1 or sequence_parallel
    families = [*DENSE, *(EXPERTS if experts else ())]
    ranks = run_ranks(
        topology.world_size, score, topology, sequence_parallel, [folder(f) for f in families], chat
    )
    for rank, found in enumerate(ranks):
        replica = topology.coordinates(rank).dp
        for family, scores in zip(families, found, strict=True):
            wanted = expected(family, chat)[replica :: topology.dp]
            assert scores == pytest.approx(wanted, abs=1e-4), family
            assert len(set(scores)) == len(scores)


def test_chats_on_one_rank() -> None:
    """Rendered by each model's own template."""
    (found,) = run_ranks(1, score, Topology(1), False, [folder("llama"), folder("qwen3")], True)
    for family, scores in zip(("llama", "qwen3"), found, strict=True):
        assert scores == pytest.approx(expected(family, True), abs=1e-4)

"""Every family in Megatron against transformers, and through Megatron back to its files.

One set of ranks per cut of the mesh builds all families one after the other: logits and
values are compared with transformers', and what is exported with what was imported. Shapes
are odd on purpose: a vocabulary that nothing divides, layers that stages share unevenly, heads
wider than their share of the hidden size, one key/value head, windows shorter than sequences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megappo.mesh.schedule import evaluate
from megappo.models import parallel
from megappo.models.build import Head, build_model
from megappo.reshard.hf import export_hf, import_hf
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout
from tests.support.models import make_model
from tests.support.packed import LENGTHS, VOCAB, pack, sequences, whole_logits
from tests.support.ranks import run_ranks

DENSE: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tied": True, "rms_norm_eps": 1e-3},
    "qwen3": {"tied": True},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": 12},
    "qwen3_moe": {},
    "qwen3_moe-unscaled": {"norm_topk_prob": False, "num_experts": 6, "num_experts_per_tok": 3},
}
MODELS = DENSE | EXPERTS


@dataclass(frozen=True)
class Cut:
    """Parallel sizes; replicas are added only where experts need more ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1

    def __str__(self) -> str:
        """Test id."""
        return f"tp{self.tp}-pp{self.pp}-ep{self.ep}-vpp{self.vpp}"

    @property
    def topology(self) -> Topology:
        """The smallest mesh with these sizes."""
        replicas = 1 if self.tp % self.ep == 0 else self.ep
        return Topology(self.tp * self.pp * replicas, self.tp, self.pp, self.ep, self.vpp)

    @property
    def models(self) -> Mapping[str, dict[str, Any]]:
        """All models, or those whose experts can be spread."""
        return MODELS if self.ep == 1 else EXPERTS


CUTS = [Cut(), Cut(2, 2), Cut(1, 2, vpp=2), Cut(2, 1, ep=2), Cut(1, 2, ep=2, vpp=2)]
MORE = [
    Cut(tp, pp, ep, vpp)
    for tp in (1, 2, 4)
    for pp in (1, 2)
    for ep in (1, 2)
    for vpp in ((1, 2) if pp == 2 else (1,))
    if Cut(tp, pp, ep, vpp) not in CUTS
]
every_cut = pytest.mark.parametrize(
    "cut", [*CUTS, *(pytest.param(cut, marks=pytest.mark.slow) for cut in MORE)], ids=str
)


@dataclass(frozen=True)
class Source:
    """A folder and what transformers computes from it, for all sequences end to end.

    ``outputs`` are logits [T, V], or one value per token [T].
    """

    folder: Path
    head: Head
    outputs: torch.Tensor


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """Every model with either head."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for seed, (name, options) in enumerate(MODELS.items()):
        for head in ("lm", "value"):
            folder = make_model(
                root / f"{name}-{head}",
                name.partition("-")[0],
                layers=5,
                seed=seed,
                value_head=head == "value",
                **options,
            )
            found[folder.name] = Source(folder, head, transformers_outputs(folder, head))
    return found


def transformers_outputs(folder: Path, head: Head) -> torch.Tensor:
    """Logits, or the scores of every token, of each sequence alone; then end to end."""
    auto: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        if head == "lm":
            return torch.cat([model(s[None]).logits[0] for s in sequences()])
        hidden = [model.model(s[None]).last_hidden_state[0] for s in sequences()]
        return torch.cat([model.score(h)[:, 0] for h in hidden])


@dataclass(frozen=True)
class Report:
    """What one rank saw of one model; ``outputs`` is empty off the last stage."""

    outputs: list[torch.Tensor]
    wrong_shapes: list[str]


def rank_report(
    rank: int, cut: Cut, folders: dict[str, tuple[str, Head]], out: str
) -> dict[str, Report]:
    """Import every model, run it, and export it again."""
    topology = cut.topology
    parallel.initialize(topology, seed=7)
    reports = {}
    for name, (folder, head) in folders.items():
        shape = load_shape(folder)
        chunks = build_model(
            shape,
            topology,
            head=head,
            dtype=torch.float32,
            sequence_parallel=cut.tp > 1,
            recompute=None,
        )
        layout = megatron_layout(shape, topology, value_head=head == "value")
        tensors = {
            f"{number}.{key}": parameter.detach()
            for number, chunk in enumerate(chunks)
            for key, parameter in chunk.named_parameters()
        }
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        expected = layout.local_shapes(rank)
        wrong = [
            f"{key}: {shapes.get(key)} in the model, {expected.get(key)} in the layout"
            for key in sorted(shapes.keys() | expected.keys())
            if shapes.get(key) != expected.get(key)
        ]
        import_hf(CheckpointReader(folder), layout, rank, tensors)
        outputs = evaluate(
            chunks,
            [pack(sequences()), pack(sequences()[1:3]), pack(sequences()[2:])],
            lambda output, _: whole_logits(output) if output.dim() == 2 else output,
        )
        reports[name] = Report(outputs, wrong)
        export_hf(layout, shape, rank, tensors, f"{out}/{name}", folder)
    return reports


def check_outputs(found: list[torch.Tensor], source: Source) -> None:
    """Each micro-batch gives what transformers gives for its sequences."""
    parts = source.outputs.split(LENGTHS)
    for outputs, expected in zip(found, (parts, parts[1:3], parts[2:]), strict=True):
        reference = torch.cat(expected)
        ours = outputs[: len(reference)]
        if source.head == "lm":
            assert not ours[:, VOCAB:].any()
            ours = ours[:, :VOCAB]
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-4)


def check_folders(source: Path, out: Path) -> None:
    """Tensors bit for bit under their names, configuration field for field."""
    before, after = (load_file(d / "model.safetensors") for d in (source, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    configs = [json.loads((d / "config.json").read_text()) for d in (source, out)]
    assert configs[0] == configs[1]


@every_cut
def test_families_equal_transformers_and_export_their_source(
    cut: Cut, sources: dict[str, Source], tmp_path: Path
) -> None:
    """Logits and values to 1e-4 in fp32; import and export are the identity (C6, C8, C11)."""
    chosen = {
        name: source
        for name, source in sources.items()
        if name.rpartition("-")[0] in cut.models
        and (source.head == "lm" or cut in (Cut(), Cut(2, 2)))
    }
    folders = {name: (str(source.folder), source.head) for name, source in chosen.items()}
    world = cut.topology.world_size
    reports = run_ranks(world, rank_report, cut, folders, str(tmp_path))
    wrong = {name: [r[name].wrong_shapes for r in reports] for name in chosen}
    assert wrong == {name: [[]] * world for name in chosen}
    for name, source in chosen.items():
        last = [report[name].outputs for report in reports if report[name].outputs]
        assert len(last) == world // cut.pp
        for found in last:
            check_outputs(found, source)
        check_folders(source.folder, tmp_path / name)

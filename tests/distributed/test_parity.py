"""Megatron models against transformers, on real process groups and real checkpoint folders.

Every test writes a tiny random Llama, imports it into the ranks of a mesh by its layout, and
compares with what transformers makes of the same folder.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megappo.mesh.schedule import accumulate_gradients, evaluate
from megappo.models import parallel
from megappo.models.build import Head, build_model
from megappo.models.config import Recompute
from megappo.models.forward import forward_packed
from megappo.reshard.hf import export_hf, import_hf
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.layout import Layout
from megappo.weights.megatron import megatron_layout
from tests.support.models import make_llama
from tests.support.packed import LENGTHS, pack, sequences, whole_logits
from tests.support.ranks import run_ranks

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "one_kv_head": {"kv_heads": 1, "layers": 2},
    "llama3": {"rope": LLAMA3, "kv_heads": 4, "layers": 2},
    "linear": {
        "rope": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        "tied": True,
        "layers": 2,
    },
}
# Tensor- and pipeline-parallel size, sequence parallelism, recomputation.
Cut = tuple[int, int, bool, Recompute | None]
CUTS: list[Cut] = [
    (1, 1, False, None),
    (2, 1, False, "full"),
    (2, 1, True, None),
    (1, 2, False, "selective"),
    (2, 2, True, None),
    (4, 1, True, "selective"),
]
KINDS = (
    "word_embeddings.weight",
    "input_layernorm.weight",
    "linear_qkv.weight",
    "linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "linear_fc1.weight",
    "linear_fc2.weight",
    "final_layernorm.weight",
    "output_layer.weight",
)


HALVES = (sequences()[:2], sequences()[2:])


def load(
    folder: str,
    topology: Topology,
    *,
    head: Head = "lm",
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    recompute: Recompute | None = None,
) -> tuple[Any, Layout, dict[str, torch.Tensor]]:
    """Build this rank's part of the model and read its weights from the folder."""
    parallel.initialize(topology, seed=7)
    shape = load_shape(folder)
    [model] = build_model(
        shape,
        topology,
        head=head,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    layout = megatron_layout(shape, topology, value_head=head == "value")
    tensors = {f"0.{name}": p.detach() for name, p in model.named_parameters()}
    import_hf(CheckpointReader(folder), layout, dist.get_rank(), tensors)
    return model, layout, tensors


def rank_logits(rank: int, folder: str, cut: Cut, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of all sequences packed together, and of each alone, on the last stage."""
    tp, pp, sequence_parallel, recompute = cut
    model, *_ = load(
        folder,
        Topology(tp * pp, tp, pp),
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    batches = [pack(sequences()), *(pack([s]) for s in sequences())]
    return evaluate([model], batches, lambda output, _: whole_logits(output))


def transformers_logits(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return [model(s[None]).logits[0] for s in sequences()]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[torch.Tensor]]:
    """A folder, and the logits that transformers computes from it."""
    folder = make_llama(tmp_path_factory.mktemp(request.param), **MODELS[request.param])
    return folder, transformers_logits(folder, torch.float32)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_logits_equal_transformers(checkpoint: tuple[Path, list[torch.Tensor]], cut: Cut) -> None:
    """fp32 logits agree to 1e-4 at every cut of the mesh, for real and padded columns alike."""
    folder, expected = checkpoint
    packed, *alone = run_ranks(cut[0] * cut[1], rank_logits, str(folder), cut, torch.float32)[-1]
    assert packed.shape[1] % (8 * cut[0]) == 0
    assert not packed[:, 101:].any()
    together = packed[: sum(LENGTHS), :101].split(LENGTHS)
    for ours, one, reference in zip(together, alone, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-4)
        # C30: what shares the micro-batch changes nothing.
        one = one[: len(reference), :101]
        assert (ours.log_softmax(-1) - one.log_softmax(-1)).abs().max() <= 1e-5


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[4]], ids=str)
def test_bf16_logits_follow_transformers(tmp_path: Path, cut: Cut) -> None:
    """In bf16, rounding apart: as near to transformers as its own bf16 is to its fp32."""
    folder = make_llama(tmp_path, layers=2)
    packed = run_ranks(cut[0] * cut[1], rank_logits, str(folder), cut, torch.bfloat16)[-1][0]
    assert packed.dtype == torch.bfloat16
    exact, rounded = (
        torch.cat(transformers_logits(folder, dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    ours = packed[: sum(LENGTHS), :101].float()
    assert (ours - exact).norm() <= 1.5 * (rounded.float() - exact).norm()


def rank_shapes(rank: int, folder: str, cut: Cut, head: Head) -> list[str]:
    """Where the layout's local tensors and the model's parameters differ, in words."""
    tp, pp, sequence_parallel, _ = cut
    model, layout, _ = load(
        folder, Topology(tp * pp, tp, pp), head=head, sequence_parallel=sequence_parallel
    )
    found = {f"0.{name}": tuple(p.shape) for name, p in model.named_parameters()}
    expected = layout.local_shapes(rank)
    stored = {f"0.{name}" for name, value in model.state_dict().items() if value is not None}
    return [
        f"rank {rank}: {name} is {found.get(name)} in the model, {expected.get(name)} in the layout"
        for name in sorted(found.keys() | expected.keys() | stored)
        if found.get(name) != expected.get(name)
    ]


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("name", ["untied", "tied", "one_kv_head"])
def test_layout_names_the_models_parameters(tmp_path: Path, name: str, head: Head) -> None:
    """Every local tensor of the layout is a parameter of that name and shape, and none is left."""
    folder = make_llama(tmp_path, **MODELS[name], value_head=head == "value")
    for cut in [(1, 1, False, None), (4, 1, False, None), (1, 2, False, None), (2, 2, True, None)]:
        assert run_ranks(cut[0] * cut[1], rank_shapes, str(folder), cut, head) == [[]] * (
            cut[0] * cut[1]
        )


def rank_export(rank: int, folder: str, out: str, cut: Cut, head: Head) -> None:
    """Import the folder into the mesh and export it again."""
    tp, pp, sequence_parallel, _ = cut
    topology = Topology(tp * pp, tp, pp)
    _, layout, tensors = load(folder, topology, head=head, sequence_parallel=sequence_parallel)
    export_hf(layout, load_shape(folder), rank, tensors, out, folder)


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[4], CUTS[5]], ids=str)
@pytest.mark.parametrize(("name", "head"), [("untied", "lm"), ("tied", "lm"), ("tied", "value")])
def test_export_equals_the_source(tmp_path: Path, cut: Cut, name: str, head: Head) -> None:
    """What went through the real model comes out bit for bit, and transformers agrees."""
    value = head == "value"
    source = make_llama(tmp_path / "source", **MODELS[name], value_head=value)
    out = tmp_path / "out"
    run_ranks(cut[0] * cut[1], rank_export, str(source), str(out), cut, head)
    before, after = (load_file(d / "model.safetensors") for d in (source, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    if not value:
        ours, theirs = (transformers_logits(d, torch.float32) for d in (out, source))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def rank_values(rank: int, folder: str, cut: Cut) -> list[torch.Tensor]:
    """Values of all sequences packed together, on the last stage."""
    tp, pp, sequence_parallel, _ = cut
    topology = Topology(tp * pp, tp, pp)
    model, *_ = load(folder, topology, head="value", sequence_parallel=sequence_parallel)
    return evaluate([model], [pack(sequences())], lambda output, _: output)


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[2], CUTS[4]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_values_equal_transformers(tmp_path: Path, cut: Cut, tied: bool) -> None:
    """Values are the scores that transformers' one-label classifier gives to every token."""
    folder = make_llama(tmp_path, value_head=True, tied=tied, layers=2)
    for values in run_ranks(cut[0] * cut[1], rank_values, str(folder), cut)[-cut[0] :]:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = [
                model.score(model.model(s[None]).last_hidden_state)[0, :, 0] for s in sequences()
            ]
        assert values[0].dtype == torch.float32
        found = values[0][: sum(LENGTHS)]
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-4)


def rank_fresh_head(rank: int, folder: str, cut: Cut) -> list[torch.Tensor]:
    """The head's weight under two seeds, on the last stage."""
    tp, pp, sequence_parallel, _ = cut
    topology = Topology(tp * pp, tp, pp)
    parallel.initialize(topology, seed=3)
    weights = []
    for seed in (1, 2):
        [model] = build_model(
            load_shape(folder),
            topology,
            head="value",
            dtype=torch.bfloat16,
            sequence_parallel=sequence_parallel,
            recompute=None,
            seed=seed,
        )
        if parallel_state.is_pipeline_last_stage():
            weights.append(model.output_layer.weight.detach())
    return weights


def test_fresh_value_head_does_not_depend_on_the_mesh(tmp_path: Path) -> None:
    """Every rank of every cut starts from the same small weight; the seed moves it."""
    folder = make_llama(tmp_path, layers=2)
    heads = [
        weights
        for cut in (CUTS[0], CUTS[4])
        for weights in run_ranks(cut[0] * cut[1], rank_fresh_head, str(folder), cut)
        if weights
    ]
    assert len(heads) == 3
    for first, second in heads:
        assert first.dtype == torch.bfloat16 and first.shape == (1, 64)
        assert torch.equal(first, heads[0][0]) and torch.equal(second, heads[0][1])
    assert not torch.equal(heads[0][0], heads[0][1])
    assert 0 < heads[0][0].abs().max() < 0.1


def rank_slopes(rank: int, folder: str, cut: Cut) -> dict[str, tuple[float, float]]:
    """For each kind of parameter, the loss's slope along its gradient: predicted and measured."""
    tp, pp, sequence_parallel, _ = cut
    topology = Topology(tp * pp, tp, pp)
    model, *_ = load(folder, topology, head="value", sequence_parallel=sequence_parallel)
    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    batches = [replace(b, action_mask=b.tokens > 0) for b in (pack(s) for s in HALVES)]
    generator = torch.Generator().manual_seed(2)
    targets = [torch.randn(len(b.tokens), generator=generator) for b in batches]

    def loss(values: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        return ((values - targets[index]).square() * batches[index].action_mask).sum(), None

    numbers = {id(b): i for i, b in enumerate(batches)}
    wrapped.zero_grad_buffer()
    accumulate_gradients([wrapped], batches, loss)
    num_tokens = sum(int(b.action_mask.sum()) for b in batches)

    def objective() -> float:
        sums = evaluate([model], batches, lambda output, b: loss(output, numbers[id(b)])[0])
        total = torch.tensor(sum(float(x) for x in sums) / num_tokens, dtype=torch.float64)
        dist.broadcast(total, topology.output_rank(0))
        return float(total)

    slopes = {}
    for kind in KINDS:
        chosen = [p for name, p in model.named_parameters() if name.endswith(kind)]
        predicted = torch.tensor(0.0, dtype=torch.float64)
        for p in chosen:
            if param_is_not_tensor_parallel_duplicate(p):
                predicted += p.main_grad.double().square().sum()
        dist.all_reduce(predicted)
        step = 1e-2 / float(predicted)
        heights = []
        for sign in (1, -2):
            for p in chosen:
                p.data.add_(p.main_grad, alpha=sign * step)
            heights.append(objective())
        for p in chosen:
            p.data.add_(p.main_grad, alpha=step)
        slopes[kind] = (float(predicted), (heights[0] - heights[1]) / (2 * step))
    return slopes


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[4]], ids=str)
def test_value_gradients_are_slopes(tmp_path: Path, cut: Cut) -> None:
    """Finite differences of the value loss along each kind of parameter's own gradient."""
    folder = make_llama(tmp_path, value_head=True, layers=2)
    for slopes in run_ranks(cut[0] * cut[1], rank_slopes, str(folder), cut):
        assert set(slopes) == set(KINDS)
        for kind, (predicted, measured) in slopes.items():
            assert measured == pytest.approx(predicted, rel=0.02), kind


def rank_leftovers(rank: int, folder: str) -> int:
    """Build, run and drop three models; how many of them are still alive."""
    topology = Topology(1)
    models = []
    for _ in range(3):
        if parallel_state.model_parallel_is_initialized():
            parallel.destroy()
        model, *_ = load(folder, topology)
        with torch.no_grad():
            forward_packed(model, pack(sequences()))
        models.append(weakref.ref(model))
        del model, _
    gc.collect()
    return sum(m() is not None for m in models)


def test_dropped_models_are_freed(tmp_path: Path) -> None:
    """No cache keeps a model alive that has run."""
    assert run_ranks(1, rank_leftovers, str(make_llama(tmp_path, layers=2))) == [0]

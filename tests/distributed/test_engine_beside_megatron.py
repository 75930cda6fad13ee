"""A Megatron model and a vLLM engine in the same processes: neither disturbs the other.

Two tensor-parallel ranks train a step, start an engine on other weights, sync the live
parameters into it, generate, and train the same step again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from megappo.models import parallel
from megappo.models.build import build_model
from megappo.models.forward import align_with_tokens, forward_packed, next_tokens
from megappo.models.log_probs import log_probs_and_entropy
from megappo.records import PackedBatch, Rollouts
from megappo.reshard.executor import Executor
from megappo.reshard.hf import import_hf
from megappo.rollout.process import SHARED_MEMORY, import_vllm
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.vllm import vllm_layout
from tests.support.engines import generate, start_engine
from tests.support.models import make_llama
from tests.support.ranks import run_ranks

VOCAB = 101
TEMPERATURE = 0.7
MESH = Topology(2, tp=2)


@dataclass
class Seen:
    """What a rank saw: gradients without and with an engine, log-probs twice, shared memory."""

    gradients: list[dict[str, torch.Tensor]]
    trainer_log_probs: torch.Tensor
    rollouts: Rollouts
    shared_memory: list[str]


def trainer_log_probs(model: torch.nn.Module, rollouts: Rollouts) -> torch.Tensor:
    """Log-probs [T] of all tokens at the sampling temperature, aligned with tokens."""
    batch = PackedBatch(
        tokens=rollouts.tokens,
        cu_seqlens=rollouts.cu_seqlens.int(),
        action_mask=rollouts.action_mask,
        engine_log_probs=rollouts.log_probs,
        samples=torch.arange(len(rollouts.sample_ids)),
    )
    log_probs, _ = log_probs_and_entropy(
        forward_packed(model, batch),
        next_tokens(batch),
        temperature=TEMPERATURE,
        vocab_size=VOCAB,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        with_entropy=False,
    )
    return align_with_tokens(log_probs, batch.cu_seqlens)


def gradients(model: torch.nn.Module, rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """Gradients of the actions' mean log-prob."""
    model.zero_grad()
    trainer_log_probs(model, rollouts)[rollouts.action_mask].mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train_and_generate(rank: int, policy: Path, other: Path) -> Seen:
    """A step, an engine and a sync, the same step."""
    parallel.initialize(MESH, seed=7)
    shape = load_shape(policy)
    [model] = build_model(
        shape, MESH, head="lm", dtype=torch.float32, sequence_parallel=False, recompute=None
    )
    layout = megatron_layout(shape, MESH)
    tensors = {f"0.{name}": p.detach() for name, p in model.named_parameters()}
    import_hf(CheckpointReader(policy), layout, rank, tensors)
    tokens = torch.arange(5, 65)
    batch = Rollouts(
        sample_ids=torch.arange(2),
        tokens=tokens,
        cu_seqlens=torch.tensor([0, 25, 60]),
        prompt_lens=torch.tensor([5, 5]),
        action_mask=(tokens - 5) % 25 > 5,
        log_probs=torch.zeros(60),
    )
    before = gradients(model, batch)
    engine = start_engine(other, MESH.tp)
    Executor(plan(layout, vllm_layout(shape, 2, MESH.tp)), rank).run(tensors, engine.begin_update())
    engine.finish_update(1)
    rollouts, _ = generate(engine, temperature=TEMPERATURE)
    after = gradients(model, batch)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "cpushm" in line]
    with torch.no_grad():
        return Seen([before, after], trainer_log_probs(model, rollouts), rollouts, mapped)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Seen]]:
    """Both ranks' observations, on a machine where another engine like theirs was killed."""
    import_vllm()
    base = tmp_path_factory.mktemp("beside")
    policy, other = (make_llama(base / f"seed{seed}", vocab=VOCAB, seed=seed) for seed in (1, 2))
    left = SHARED_MEMORY / "-tp:0-[0-1]-cpushm_0"  # as vLLM names it
    left.touch()
    try:
        yield run_ranks(2, train_and_generate, policy, other)
    finally:
        left.unlink()


def test_the_ranks_meet_in_memory_of_their_own(seen: list[Seen]) -> None:
    """No other engine on the machine knows its name, and it is gone when the ranks are.

    There is none where vLLM has no such memory for the processor (without AVX-512).
    """
    for rank in seen:
        assert all("megappo-" in line and "(deleted)" in line for line in rank.shared_memory)


def test_training_is_bit_equal_with_an_engine_in_the_process(seen: list[Seen]) -> None:
    """Gradients of a step are the same before and after an engine lived in the process."""
    for rank in seen:
        before, after = rank.gradients
        assert len(before) == len(after) > 20
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert any(gradient.abs().max() > 1e-3 for gradient in before.values())


def test_engine_and_trainer_agree_on_log_probs(seen: list[Seen]) -> None:
    """fp32, temperature 0.7: |engine - trainer| is at most 1e-3 on average (seen: 1e-6)."""
    for rank in seen:
        actions = rank.rollouts.action_mask
        difference = (rank.rollouts.log_probs - rank.trainer_log_probs)[actions].abs()
        assert float(difference.mean()) <= 1e-4
        assert float(difference.max()) <= 1e-3

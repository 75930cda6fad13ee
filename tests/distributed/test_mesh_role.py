"""One role on one rank: schedule, clipping, fresh heads, export, bf16, entropy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pytest
from safetensors.torch import load_file

from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import (
    ExperienceMetrics,
    ExperienceSettings,
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
    UpdateMetrics,
    ValueLossSettings,
)
from megappo.topology import Topology
from tests.support.canonical import local_weights
from tests.support.models import make_llama, make_model
from tests.support.ranks import run_ranks
from tests.support.rollouts import KEY, make_plan, make_rollouts

ADAM = OptimizerSettings(lr=1e-3)
PLAIN = ExperienceSettings(kl_coef=0.0)
ONE_RANK = Topology(1)
MODELS = TemporaryDirectory(prefix="role-")


@cache
def folder() -> str:
    """A policy's checkpoint."""
    return str(make_llama(Path(MODELS.name) / "model", layers=2))


@cache
def folder_with_experts() -> str:
    """A policy of five layers, each with experts."""
    return str(make_model(Path(MODELS.name) / "experts", "qwen3_moe", layers=5))


def ready(
    dtype: Literal["fp32", "bf16"] = "fp32",
    adam: OptimizerSettings = ADAM,
    loss: PolicyLossSettings | None = None,
    number: int = 0,
    topology: Topology = ONE_RANK,
    model: str | None = None,
    critic: str | None = None,
) -> MeshRank:
    """Actor and critic on a mesh of one replica, with experience made; rank 0 holds all tokens."""
    settings = MeshSettings(dtype=dtype, sequence_parallel=topology.tp > 1)
    rank = MeshRank(number, topology, settings)
    policy, model = loss or PolicyLossSettings(), model or folder()
    rank.add_role(RoleSettings("actor", model, "lm", adam, policy))
    rank.add_role(RoleSettings("critic", critic or model, "value", adam, ValueLossSettings()))
    rollouts = make_rollouts([3, 2, 4], [5, 1, 6])
    zeros = [0, 0, 0]
    if number == 0:
        rank.store[KEY] = rollouts
    rank.load_batch(
        make_plan(
            rollouts,
            holder_ranks=zeros,
            steps=zeros,
            replicas=zeros,
            micro_batches=zeros,
            num_micro_batches=[1],
        )
    )
    rank.compute_log_probs("actor")
    rank.compute_values("critic")
    rank.make_experience(PLAIN)
    return rank


def updates(
    number: int,
    dtype: Literal["fp32", "bf16"],
    adam: OptimizerSettings,
    loss: PolicyLossSettings | None,
    count: int,
) -> list[UpdateMetrics]:
    """Metrics of some updates of the actor."""
    rank = ready(dtype, adam, loss)
    return [rank.update("actor", 0) for _ in range(count)]


def whole_step(
    number: int, topology: Topology, dense_critic: bool = False
) -> tuple[ExperienceMetrics, list[UpdateMetrics]]:
    """A batch's experience and two updates of either role; the actor has experts."""
    critic = folder() if dense_critic else folder_with_experts()
    rank = ready(number=number, topology=topology, model=folder_with_experts(), critic=critic)
    metrics = rank.make_experience(PLAIN)
    return metrics, [rank.update(role, 0) for role in ("critic", "actor") * 2]


@pytest.mark.parametrize(
    "topology",
    [Topology(2, pp=2, vpp=2), Topology(2, tp=2, ep=2), Topology(4, tp=2, pp=2, ep=2, vpp=2)],
    ids=str,
)
def test_chunks_and_spread_experts_take_the_same_steps(topology: Topology) -> None:
    """One micro-batch, fewer than stages: experience and updates are those of one rank."""
    _agree(topology)


def test_a_dense_critic_beside_an_actor_with_experts() -> None:
    """Expert parallelism is the mesh's; a model without experts has nothing to spread."""
    _agree(Topology(2, tp=2, ep=2), dense_critic=True)


def _agree(topology: Topology, dense_critic: bool = False) -> None:
    folder(), folder_with_experts()  # before the ranks are forked: each would write the same files
    [(experience, updated)] = run_ranks(1, whole_step, ONE_RANK, dense_critic)
    for found, steps in run_ranks(topology.world_size, whole_step, topology, dense_critic):
        assert vars(found) == pytest.approx(vars(experience), rel=1e-4, abs=1e-5)
        for step, expected in zip(steps, updated, strict=True):
            one, two = (
                {k: v for k, v in vars(x).items() if v is not None} for x in (step, expected)
            )
            assert one == pytest.approx(two, rel=1e-3, abs=1e-4)


def test_learning_rate_is_that_of_this_very_step() -> None:
    """Warm-up ends at the peak, the cosine at its floor; the first step is not wasted."""
    cosine = replace(
        ADAM, lr_scheduler="cosine_with_min_lr", warmup_steps=2, total_steps=6, min_lr_ratio=0.1
    )
    (cosine_run,) = run_ranks(1, updates, "fp32", cosine, None, 7)
    expected = [0.5, 1.0] + [0.1 + 0.45 * (1 + np.cos(np.pi * i / 4)) for i in range(1, 5)] + [0.1]
    assert [update.lr for update in cosine_run] == pytest.approx([1e-3 * x for x in expected])
    (constant,) = run_ranks(1, updates, "fp32", replace(ADAM, warmup_steps=2), None, 4)
    assert [update.lr for update in constant] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


def test_reported_gradient_norm_is_before_clipping() -> None:
    """Clipping changes what happens to the weights, not the norm that is logged."""
    norms = [
        run_ranks(1, updates, "fp32", replace(ADAM, max_norm=max_norm), None, 1)[0][0].grad_norm
        for max_norm in (1e-3, 1.0, 0.0)
    ]
    assert norms[0] == norms[1] == norms[2] > 1.0


def test_entropy_is_reported_only_where_it_is_used() -> None:
    """An entropy bonus raises the entropy and is named in the metrics."""
    loss = PolicyLossSettings(entropy_coef=10.0)
    (with_bonus,) = run_ranks(1, updates, "fp32", ADAM, loss, 4)
    entropies = [update.entropy for update in with_bonus]
    assert None not in entropies and entropies[-1] > entropies[0] > 0
    assert run_ranks(1, updates, "fp32", ADAM, None, 1)[0][0].entropy is None


def test_bf16_parameters_train_with_fp32_main_parameters() -> None:
    """Steps far below bf16's resolution still move the policy, and nothing overflows."""
    small = replace(ADAM, lr=1e-5)
    (half,) = run_ranks(1, updates, "bf16", small, None, 40)
    assert half[0].ratio_max_diff == 0
    assert half[-1].loss < half[0].loss and np.isfinite(half[-1].grad_norm)


def exported(number: int, out: str) -> tuple[bool, ...]:
    """Write actor and fresh critic before any update; read the actor back as a role."""
    rank = ready()
    for name in ("actor", "critic"):
        rank.export_hf(name, Path(out) / name)
    rank.add_role(RoleSettings("again", str(Path(out) / "actor"), "lm"))
    rank.add_role(RoleSettings("critic_again", str(Path(out) / "critic"), "value"))
    return tuple(
        all(np.array_equal(one[key], two[key]) for key in one) and set(one) == set(two)
        for one, two in (
            (local_weights(rank.roles[a]), local_weights(rank.roles[b]))
            for a, b in (("actor", "again"), ("critic", "critic_again"))
        )
    )


def test_export_and_import_are_the_identity(tmp_path: Path) -> None:
    """A policy comes back bit for bit, equal to its source; a critic with its own head."""
    (same,) = run_ranks(1, exported, str(tmp_path))
    assert same == (True, True)
    source = load_file(Path(folder()) / "model.safetensors")
    written = load_file(tmp_path / "actor" / "model.safetensors")
    assert set(source) == set(written)
    assert all(source[name].equal(written[name]) for name in source)


def fresh_head(number: int, tp: int, seed: int) -> list[float]:
    """The value head that a critic without one starts with."""
    rank = MeshRank(number, Topology(tp, tp), MeshSettings(seed=seed))
    rank.add_role(RoleSettings("critic", folder(), "value", ADAM, ValueLossSettings()))
    weights: list[float] = local_weights(rank.roles["critic"])["0.output_layer.weight"].tolist()
    return weights


def test_a_fresh_value_head_depends_on_the_seed_alone() -> None:
    """Every tensor rank of every mesh draws the same head; another seed another one."""
    one = run_ranks(1, fresh_head, 1, 7)
    assert run_ranks(2, fresh_head, 2, 7) == one * 2
    assert run_ranks(1, fresh_head, 1, 8) != one


def frozen(number: int) -> tuple[bool, bool]:
    """A frozen role has no optimizer and no gradients."""
    rank = MeshRank(number, Topology(1), MeshSettings())
    rank.add_role(RoleSettings("ref", folder(), "lm"))
    role = rank.roles["ref"]
    parameters = [p for module in role.modules for p in module.parameters()]
    return role.optimizer is None, not any(p.requires_grad for p in parameters)


def test_a_role_without_optimizer_is_frozen() -> None:
    """The reference takes no optimizer memory."""
    assert run_ranks(1, frozen) == [(True, True)]


def test_a_mesh_that_does_not_cut_the_model_is_refused() -> None:
    """The line names the key; no rank is left waiting."""
    with pytest.raises(RuntimeError, match="tensor_model_parallel_size = 3 does not divide"):
        run_ranks(3, fresh_head, 3, 0)

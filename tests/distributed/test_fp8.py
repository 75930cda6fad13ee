"""Emulated FP8 in real Megatron models: what it touches, and what meshes make of it.

Hidden size, heads and feed-forward are such that tensor-parallel shards end where 128 x 128
blocks end: block scales are then the same on every mesh, per-tensor scales are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from safetensors.torch import load_file

from megappo.checkpoint.sharded import load_role, save_role
from megappo.mesh.role import Role
from megappo.mesh.schedule import accumulate_gradients, evaluate
from megappo.mesh.settings import MeshSettings, OptimizerSettings, PolicyLossSettings, RoleSettings
from megappo.models import parallel
from megappo.models.build import build_model
from megappo.models.fp8 import Fp8
from megappo.models.fp8_emulation import block_scales, round_to_fp8
from megappo.reshard.hf import export_hf, import_hf
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout
from tests.support.canonical import Shards, canonical_vector, local_gradients, local_weights
from tests.support.models import make_llama, make_model
from tests.support.packed import pack, sequences, whole_logits
from tests.support.ranks import run_ranks

FOLDER = TemporaryDirectory(prefix="fp8-")
ADAM = OptimizerSettings(lr=1e-3)
Recipe = Literal["tensorwise", "delayed", "blockwise"]
RECIPES: tuple[Recipe, ...] = ("tensorwise", "delayed", "blockwise")


@cache
def policy() -> str:
    """The folder of a policy with aligned blocks, made once."""
    sizes: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256}
    return str(make_llama(Path(FOLDER.name) / "policy", layers=2, **sizes))


def build(folder: str, fp8: Fp8 | None, topology: Topology | None = None) -> Any:
    """This rank's chunk with the folder's weights; ``parallel`` is initialised."""
    topology = topology or Topology(1)
    shape = load_shape(folder)
    [model] = build_model(
        shape,
        topology,
        head="lm",
        dtype=torch.float32,
        sequence_parallel=topology.tp > 1,
        recompute=None,
        fp8=fp8,
    )
    tensors = {f"0.{name}": p.detach() for name, p in model.named_parameters()}
    layout = megatron_layout(shape, topology, value_head=False)
    import_hf(CheckpointReader(folder), layout, dist.get_rank(), tensors)
    return model


def emulated(model: torch.nn.Module) -> list[str]:
    """The linear layers that compute in FP8."""
    return [name for name, module in model.named_modules() if "_forward_impl" in vars(module)]


def rank_log_probs(rank: int, folder: str) -> dict[Any, torch.Tensor]:
    """Log-probs of the whole vocabulary, plain and under every recipe."""
    parallel.initialize(Topology(1), seed=7)
    found: dict[Any, torch.Tensor] = {}
    for fp8 in (None, *(Fp8("hybrid", recipe) for recipe in RECIPES)):
        model = build(folder, fp8)
        [logits] = evaluate([model], [pack(sequences())], lambda output, _: whole_logits(output))
        found[fp8 and fp8.recipe] = logits[:, :101].log_softmax(-1)
    return found


def test_log_probs_are_near_but_not_equal() -> None:
    """FP8's rounding shows in every recipe, and is small next to the log-probs' own spread."""
    [found] = run_ranks(1, rank_log_probs, policy())
    plain = found.pop(None)
    # A reference that never trains has no history: delayed scaling is then per-tensor scaling.
    assert torch.equal(found["delayed"], found["tensorwise"])
    for log_probs in (found["tensorwise"], found["blockwise"]):
        assert 1e-3 < (log_probs - plain).abs().mean() < 0.1 * plain.std()
    assert not torch.equal(found["blockwise"], found["tensorwise"])


def rank_touched(rank: int, folder: str, experts: str) -> dict[str, Any]:
    """Which linear layers are emulated; names of parameters and of the state."""
    parallel.initialize(Topology(1), seed=7)
    plain, whole = build(folder, None), build(folder, Fp8("hybrid", "delayed"))
    inner, moe = build(folder, Fp8(layers_at_end=1)), build(experts, Fp8())
    linear = [
        name
        for name, module in whole.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    return {
        "plain": emulated(plain),
        "whole": emulated(whole),
        "linear": linear,
        "inner": emulated(inner),
        "experts": emulated(moe),
        "same_state": list(plain.state_dict()) == list(whole.state_dict())
        and list(dict(plain.named_parameters())) == list(dict(whole.named_parameters()))
        and list(dict(plain.named_buffers())) == list(dict(whole.named_buffers())),
    }


def test_only_the_layers_linears_are_touched(tmp_path: Path) -> None:
    """Not embedding, head or router; not a layer that is left alone; experts are."""
    experts = make_model(tmp_path, "qwen3_moe", layers=1)
    [found] = run_ranks(1, rank_touched, policy(), str(experts))
    assert found["plain"] == [] and found["same_state"]
    assert found["linear"] == [*found["whole"], "output_layer"] and len(found["whole"]) == 2 * 4
    assert found["inner"] == [name for name in found["whole"] if ".layers.0." in name]
    assert len(found["experts"]) == 2 + 2 * 4
    assert not any("router" in name for name in found["experts"])


def rank_linear(rank: int, folder: str) -> list[float]:
    """How far a layer of TP1 is from the formula: output, both gradients."""
    parallel.initialize(Topology(1), seed=7)
    layer = build(folder, Fp8("hybrid", "blockwise")).decoder.layers[0].mlp.linear_fc1
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 1, 256, generator=generator, requires_grad=True)
    dy = torch.randn(8, 1, 512, generator=generator)
    y, _ = layer(x)
    y.backward(dy)

    def rounded(tensor: torch.Tensor, kind: torch.dtype, rows: int) -> torch.Tensor:
        return round_to_fp8(tensor, kind, block_scales(tensor, kind, rows)).flatten(0, -2)

    w = layer.weight.detach()
    qx, qw = rounded(x.detach(), torch.float8_e4m3fn, 1), rounded(w, torch.float8_e4m3fn, 128)
    qdy = rounded(dy, torch.float8_e5m2, 1)
    pairs = [(y, qx @ qw.t()), (x.grad, qdy @ qw), (layer.weight.grad, qdy.t() @ qx)]
    return [float((a.flatten(0, -2) - b).detach().abs().max()) for a, b in pairs]


def test_megatrons_linear_layer_follows_the_formula() -> None:
    """Output and gradients of a real layer are products of rounded operands."""
    [distances] = run_ranks(1, rank_linear, policy())
    assert max(distances) < 1e-4


HALVES = (sequences()[:2], sequences()[2:])


@dataclass(frozen=True)
class Seen:
    """Of one rank: log-probs of all tokens and the gradient of a step."""

    log_probs: torch.Tensor
    gradient: Shards


def make_role(
    rank: int, topology: Topology, fp8: Fp8 | None, sequence_parallel: bool, folder: str = ""
) -> Role:
    """A trainable actor, of the policy unless a folder is given."""
    settings = MeshSettings(sequence_parallel=sequence_parallel, fp8=fp8)
    actor = RoleSettings("actor", folder or policy(), "lm", ADAM, PolicyLossSettings())
    return Role(rank, topology, settings, actor)


def gradient(role: Role) -> list[torch.Tensor]:
    """Accumulate a fixed weighted sum of all log-probs over two micro-batches; returns these."""
    batches = [pack(half) for half in HALVES]
    real = [sum(map(len, half)) for half in HALVES]
    for index, batch in enumerate(batches):
        batches[index] = replace(batch, action_mask=torch.arange(len(batch.tokens)) < real[index])
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(count, generator=generator) for count in real]

    def loss(output: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = role.log_probs(output, batches[index])
        return (log_probs[: real[index]] * weights[index]).sum(), log_probs.detach()

    role.zero_gradients()
    return accumulate_gradients(role.chunks, batches, loss)


def rank_step(
    rank: int, topology: Topology, fp8: Fp8 | None, sequence_parallel: bool, folder: str = ""
) -> Seen:
    """Log-probs and a gradient on a mesh; all replicas have the same micro-batches."""
    parallel.initialize(topology, seed=7)
    role = make_role(rank, topology, fp8, sequence_parallel, folder)
    batch = pack(sequences())
    [log_probs] = evaluate(role.chunks, [batch], role.log_probs)
    gradient(role)
    return Seen(log_probs[: sum(map(len, sequences()))], local_gradients(role))


@dataclass(frozen=True)
class Step:
    """Log-probs, and the gradient in canonical coordinates; ``faulty`` is 1 % off on one rank."""

    log_probs: torch.Tensor
    gradient: torch.Tensor
    faulty: torch.Tensor


@cache
def step(tp: int, recipe: Recipe | None, sp: bool = False) -> Step:
    """The step of a mesh."""
    policy()  # made once, before the ranks are
    fp8 = None if recipe is None else Fp8("hybrid", recipe)
    ranks = run_ranks(tp, rank_step, Topology(tp, tp), fp8, sp)
    shards = [seen.gradient for seen in ranks]
    faulty = [*shards[:-1], {name: 1.01 * shard for name, shard in shards[-1].items()}]
    joined, wrong = (
        canonical_vector(
            each, policy(), Topology(tp, tp), value_head=False, copies_agree=each is shards
        )
        for each in (shards, faulty)
    )
    return Step(ranks[0].log_probs, joined, wrong)


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """Norm of the difference, relative."""
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize("sp", [False, True])
def test_aligned_blocks_do_not_depend_on_the_mesh(sp: bool) -> None:
    """FP8's own error is some 4 % of the log-probs, 20 % of the gradient; of this, nothing shows.

    Where two orders of summation land on two sides of a rounding, FP8 makes a step of it, so
    that it cannot be the last bit. One rank's gradient that is 1 % too large is seen.
    """
    one, two = step(1, "blockwise"), step(2, "blockwise", sp)
    assert apart(two.log_probs, one.log_probs) < 1e-4
    assert apart(two.gradient, one.gradient) < 2e-3 < apart(two.faulty, one.gradient)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_scales_of_shards_differ_by_less_than_fp8_does(recipe: Recipe) -> None:
    """Each shard of a tensor has a scale of its own: another rounding, of the same size."""
    plain, one, two = step(1, recipe=None), step(1, recipe), step(2, recipe)
    for found, same, exact in (
        (two.log_probs, one.log_probs, plain.log_probs),
        (two.gradient, one.gradient, plain.gradient),
    ):
        assert 0 < apart(found, same) < 1.5 * apart(same, exact)
        assert apart(found, exact) < 1.5 * apart(same, exact)


@pytest.mark.parametrize("recipe", RECIPES)
def test_sequence_parallelism_does_not_change_the_scales(recipe: Recipe) -> None:
    """The amax of what it cuts along the tokens is taken over all tensor ranks."""
    one, two = step(2, recipe), step(2, recipe, sp=True)
    assert apart(two.log_probs, one.log_probs) < 1e-6
    assert apart(two.gradient, one.gradient) < 1e-6


def test_spread_experts_round_as_on_one_rank(tmp_path: Path) -> None:
    """Experts are whole wherever they are, and blocks are cut within one token."""
    folder = str(make_model(tmp_path, "qwen3_moe", layers=2))
    vectors = []
    for topology in (Topology(1), Topology(2, ep=2)):
        ranks = run_ranks(
            topology.world_size, rank_step, topology, Fp8(recipe="blockwise"), False, folder
        )
        shards = [seen.gradient for seen in ranks]
        vectors.append(canonical_vector(shards, folder, topology, value_head=False))
    assert apart(vectors[1], vectors[0]) < 1e-5
    plain = run_ranks(1, rank_step, Topology(1), None, False, folder)
    exact = canonical_vector([plain[0].gradient], folder, Topology(1), value_head=False)
    assert apart(vectors[0], exact) > 1e-2


def rank_ratio(rank: int, recipe: Recipe) -> list[float]:
    """How far a training pass's log-probs are from those before it, twice in a row."""
    parallel.initialize(Topology(1), seed=7)
    role = make_role(rank, Topology(1), Fp8("hybrid", recipe), False)
    apart = []
    for _ in range(2):
        old = evaluate(role.chunks, [pack(half) for half in HALVES], role.log_probs)
        new = gradient(role)
        apart.append(max(float((a - b).abs().max()) for a, b in zip(old, new, strict=True)))
    return apart


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_ratio_is_one(recipe: Recipe) -> None:
    """Old log-probs are those of the update, on the same micro-batches; delayed scales move on."""
    policy()
    [[first, second]] = run_ranks(1, rank_ratio, recipe)
    if recipe == "delayed":
        assert first > 0 or second > 0
    else:
        assert first < 1e-6 and second < 1e-6


def rank_stage(rank: int, folder: str) -> list[str]:
    """What is emulated on a stage of a pipeline where the model's last layer is left alone."""
    topology = Topology(2, pp=2)
    parallel.initialize(topology, seed=7)
    return emulated(build(folder, Fp8(layers_at_end=1), topology))


def test_layers_are_counted_over_all_stages() -> None:
    """The first stage's last layer is not the model's."""
    first, last = run_ranks(2, rank_stage, policy())
    assert len(first) == 4 and last == []


def rank_train(rank: int, folder: str, recipe: Recipe) -> tuple[Shards, Shards]:
    """Train in FP8 on TP2, save, export, train on; weights at the save and at the end."""
    topology = Topology(2, 2)
    parallel.initialize(topology, seed=7)
    role = make_role(rank, topology, Fp8("hybrid", recipe), True)
    gradient(role)
    role.step()
    saved = local_weights(role)
    save_role(Path(folder) / "saved", role.modules, role.optimizer, role.scheduler)
    export_hf(role.layout, role.shape, rank, role.tensors, f"{folder}/hf", policy())
    gradient(role)
    role.step()
    return saved, local_weights(role)


def rank_load(rank: int, folder: str, tp: int, recipe: Recipe | None) -> tuple[Shards, Shards]:
    """Load, train on; weights after the load and at the end."""
    topology = Topology(tp, tp)
    parallel.initialize(topology, seed=7)
    fp8 = None if recipe is None else Fp8("hybrid", recipe)
    role = make_role(rank, topology, fp8, tp > 1)
    load_role(Path(folder) / "saved", role.modules, role.optimizer, role.scheduler)
    loaded = local_weights(role)
    gradient(role)
    role.step()
    return loaded, local_weights(role)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_actor_trained_in_fp8_goes_anywhere(tmp_path: Path, recipe: Recipe) -> None:
    """Checkpoint and export hold the plain weights, bit for bit, on this mesh and another.

    Going on from the checkpoint equals going on without it; delayed scaling starts a new history.
    """
    policy()
    trained = run_ranks(2, rank_train, str(tmp_path), recipe)
    tp2 = Topology(2, 2)

    def whole(shards: list[Shards], topology: Topology) -> torch.Tensor:
        return canonical_vector(shards, policy(), topology, value_head=False)

    saved = whole([s for s, _ in trained], tp2)
    plain = run_ranks(1, rank_load, str(tmp_path), 1, None)
    assert torch.equal(whole([s for s, _ in plain], Topology(1)), saved)
    source, exported = (
        load_file(Path(d) / "model.safetensors") for d in (policy(), tmp_path / "hf")
    )
    assert source.keys() == exported.keys()
    assert not torch.equal(source["model.norm.weight"], exported["model.norm.weight"])
    layout = megatron_layout(load_shape(policy()), tp2, value_head=False)
    joined = torch.cat([exported[name].double().flatten() for name in layout.canonical_names])
    assert torch.equal(joined, saved)
    again = run_ranks(2, rank_load, str(tmp_path), 2, recipe)
    assert torch.equal(whole([s for s, _ in again], tp2), saved)
    same = torch.equal(whole([e for _, e in again], tp2), whole([e for _, e in trained], tp2))
    assert same == (recipe == "tensorwise")

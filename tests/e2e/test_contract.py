"""The trainer's contract, with groups built by hand: one runtime serves several trainers.

The ranks keep their weights from one ``fit`` to the next, which is of no concern here: what
is asked is which prompts each ``fit`` trains on, and what it refuses.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from ray._private import ray_constants

from megappo.config import load
from megappo.config.schema import Config
from megappo.runtime.ray import RayRuntime
from megappo.trainer import PPOTrainer
from megappo.trainer.build import make_runtime
from megappo.trainer.inputs import load_inputs
from tests.e2e.runs import make_inputs

PROMPTS = 10


@dataclasses.dataclass(frozen=True)
class Made:
    """A started runtime and the configuration that it was made from."""

    args: Config
    runtime: RayRuntime
    environment_before: dict[str, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """One rank with actor, critic, reference and engine."""
    folder = tmp_path_factory.mktemp("contract")
    config = make_inputs(folder, prompts=PROMPTS)
    args = load(["--config", str(config), "--output_dir", str(folder / "out")])
    before = dict(os.environ)
    runtime = make_runtime(args)
    yield Made(args, runtime, before)
    runtime.shutdown()


def trainer(made: Made, args: Config, **groups: Any) -> PPOTrainer:
    """A trainer on all groups, but for those given."""
    everything: dict[str, Any] = {
        "actor_model_group": made.runtime.role_group("actor"),
        "critic_model_group": made.runtime.role_group("critic"),
        "reward_model_group": None,
        "ref_model_group": made.runtime.role_group("ref"),
        "vllm_engines": made.runtime.engine_group(),
        "strategy": made.runtime,
        "args": args,
    }
    return PPOTrainer(**(everything | groups))


def changed(args: Config, name: str, **train: Any) -> Config:
    """The configuration with another output folder and other ``train`` keys."""
    return dataclasses.replace(
        args,
        output_dir=str(Path(args.output_dir).parent / name),
        train=dataclasses.replace(args.train, **train),
    )


def trained_on(args: Config) -> list[int]:
    """Prompt ids in the order in which the run trained on them."""
    order: list[int] = []
    for step in range(1, 1 + len(list(Path(args.output_dir).glob("samples/step_*.jsonl")))):
        lines = (Path(args.output_dir) / "samples" / f"step_{step}.jsonl").read_text().splitlines()
        order += [json.loads(line)["prompt_id"] for line in lines]
    n = args.rollout.n_samples_per_prompt
    assert all(len(set(order[i : i + n])) == 1 for i in range(0, len(order), n))
    return order[::n]


def test_what_keeps_this_cluster_on_loopback_is_not_handed_on(made: Made) -> None:
    """A `ray start` from this process is not to listen on loopback alone because of this run."""
    switch = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    assert os.environ.get(switch) == made.environment_before.get(switch)
    assert ray_constants.ENABLE_RAY_CLUSTER


def test_fit_trains_on_every_prompt_of_every_episode(made: Made) -> None:
    """10 prompts, twice, 4 a step: 5 steps across the epochs; the last metrics come back."""
    args = changed(made.args, "all", num_episodes=2)
    metrics = trainer(made, args).fit(args)
    order = trained_on(args)
    assert sorted(order[:PROMPTS]) == sorted(order[PROMPTS:]) == list(range(PROMPTS))
    assert order[:PROMPTS] != order[PROMPTS:]
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"step": 5} | metrics


@pytest.mark.parametrize("consumed", [4, 7, 12])
def test_fit_skips_consumed_samples(made: Made, consumed: int) -> None:
    """The prompts that are left are the tail of the whole run's."""
    whole = changed(made.args, "all", num_episodes=2)
    stream = load_inputs(whole).stream(whole)
    expected = [prompt.prompt_id for batch in stream for prompt in batch][consumed:]
    args = changed(made.args, f"from_{consumed}", num_episodes=2)
    trainer(made, args).fit(args, consumed_samples=consumed)
    assert trained_on(args) == expected


def test_fit_caps_the_steps_of_an_episode(made: Made) -> None:
    """One step of 4 prompts in each of 3 episodes."""
    args = changed(made.args, "capped", num_episodes=3)
    trainer(made, args).fit(args, num_update_steps_per_episode=1)
    order = trained_on(args)
    assert len(order) == 12 and all(len(set(order[i : i + 4])) == 4 for i in (0, 4, 8))


def test_fit_refuses_other_args(made: Made) -> None:
    """The trainer belongs to one configuration."""
    args = changed(made.args, "first")
    with pytest.raises(ValueError, match="args that PPOTrainer was constructed with"):
        trainer(made, args).fit(changed(made.args, "second"))


@pytest.mark.parametrize("consumed", [-1, 11, 1000])
def test_fit_refuses_a_position_outside_the_run(made: Made, consumed: int) -> None:
    """Both numbers are named."""
    args = changed(made.args, "outside")
    with pytest.raises(ValueError, match=rf"consumed_samples = {consumed} .* 10 prompts"):
        trainer(made, args).fit(args, consumed_samples=consumed)


def test_fit_refuses_a_position_with_a_checkpoint(made: Made) -> None:
    """Only one of the two can say where the run stands."""
    args = changed(made.args, "saved", max_steps=1)
    args = dataclasses.replace(args, ckpt=dataclasses.replace(args.ckpt, save_steps=1))
    trainer(made, args).fit(args)
    resumed = dataclasses.replace(args, ckpt=dataclasses.replace(args.ckpt, load_enable=True))
    with pytest.raises(ValueError, match=r"consumed_samples = 4 was given, but .*step_1"):
        trainer(made, resumed).fit(resumed, consumed_samples=4)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ("critic_model_group", "estimator = gae needs a critic_model_group"),
        ("ref_model_group", "init_coef = 0.05 needs a ref_model_group"),
    ],
)
def test_a_group_that_the_algorithm_needs_is_asked_for(made: Made, group: str, reason: str) -> None:
    """The key that needs it is named."""
    with pytest.raises(ValueError, match=reason):
        trainer(made, made.args, **{group: None})


def test_a_reward_model_group_goes_with_its_key(made: Made) -> None:
    """Not taken without ``reward.model_name_or_path``, and needed with it."""
    group = made.runtime.role_group("ref")
    with pytest.raises(ValueError, match="= None takes no reward_model_group"):
        trainer(made, made.args, reward_model_group=group)
    keys = dataclasses.replace(made.args.reward, model_name_or_path="a/judge")
    with pytest.raises(ValueError, match="= a/judge needs a reward_model_group"):
        trainer(made, dataclasses.replace(made.args, reward=keys))


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "reinforce"])
def test_critic_and_reference_may_be_absent(
    made: Made, estimator: Literal["group_norm", "rloo", "reinforce"]
) -> None:
    """Without values and without a KL penalty neither group is needed, or taken."""
    algo = dataclasses.replace(
        made.args.algo,
        advantage=dataclasses.replace(made.args.algo.advantage, estimator=estimator),
        kl=dataclasses.replace(made.args.algo.kl, init_coef=0.0, target=None),
    )
    args = dataclasses.replace(changed(made.args, estimator, max_steps=1), algo=algo)
    alone = trainer(made, args, critic_model_group=None, ref_model_group=None)
    metrics = alone.fit(args)
    assert "train/critic_loss" not in metrics and "train/policy_loss" in metrics
    with pytest.raises(ValueError, match="takes no critic_model_group"):
        trainer(made, args, ref_model_group=None)

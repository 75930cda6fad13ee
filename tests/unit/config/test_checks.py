"""The checks that need no model: each refuses with one line that names the key and the fix."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from megappo.config import check
from megappo.config.keys import keys
from megappo.config.ranges import RANGES
from tests.unit.config.refusals import Make, refusal


def test_good_configurations_pass(make: Make) -> None:
    """The defaults with the required keys, and combinations at the edge of each rule."""
    check(make())
    check(make(rollout__batch_size=4, train__batch_size=4))
    check(make(data__max_len=1025, train__max_tokens_per_gpu=1025))
    check(
        make(
            megatron__world_size=8,
            megatron__tensor_model_parallel_size=2,
            megatron__pipeline_model_parallel_size=2,
            megatron__sequence_parallel=True,
            vllm__tensor_parallel_size=4,
            vllm__num_engines=2,
        )
    )
    for engines, size in ((None, 3), (2, 1), (5, 4)):  # engines of their own fill nothing
        check(
            make(
                megatron__world_size=2,
                train__colocate_all=False,
                vllm__num_engines=engines,
                vllm__tensor_parallel_size=size,
            )
        )
    check(make(algo__advantage__estimator="rloo", rollout__n_samples_per_prompt=2))
    check(make(algo__kl__init_coef=0, actor__max_norm=0, actor__adam__lr=0))
    check(make(algo__kl__target=6, algo__kl__horizon=1))
    check(make(data__input_template="Q: {}\n"))


@pytest.mark.parametrize(
    ("key", "missing"),
    [("actor.model_name_or_path", ""), ("data.prompt_dataset", ""), ("reward.remote_url", None)],
)
def test_required_keys(make: Make, key: str, missing: str | None) -> None:
    """A required key that is missing is named, with what it is for."""
    assert refusal(make(**{key: missing})).startswith(f"{key} is required: ")


def _outside(expected: str) -> list[float]:
    """Values that a rule with this text must refuse; whole, so that every type takes them."""
    if expected.startswith("-1 or"):
        return [0, -2]
    if expected.startswith(("1 (off)", "-1 (off)")):
        return [0]
    if expected.startswith("above"):
        return [int(expected.split()[1]), -1]
    if "below" in expected:
        return [-1, 2**32]
    if expected.startswith("from 0 to 1"):
        return [-1, 2]
    if expected.startswith("a whole number: NCCL"):
        return [0, 1.5]
    if expected == "finite numbers":
        return []
    if expected.startswith("0 (greedy)"):
        return [-1, 0.001]
    lowest = float(expected.removeprefix("at least ").split()[0])
    return [int(lowest) - 1] if lowest.is_integer() else [0, lowest / 2]


@pytest.mark.parametrize("key", RANGES)
def test_ranges(make: Make, key: str) -> None:
    """Every ranged key refuses values outside its range, naming key, value and range."""
    pair = "tuple" in str(keys()[key].type)
    values: list[Any] = list(_outside(RANGES[key].expected))
    if keys()[key].type in (float, float | None):
        values += [math.nan, math.inf]
    for value in values:
        config = make(**{key: (0.5, value) if pair else value})
        message = refusal(config)
        assert message.startswith(f"{key} = ")
        assert RANGES[key].expected in message


def test_every_number_has_a_range() -> None:
    """A number without a range would be unchecked; clip_range alone may be anything."""
    numbers = {
        key.name for key in keys().values() if "int" in str(key.type) or "float" in str(key.type)
    }
    assert numbers - set(RANGES) == {"reward.clip_range"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # C35: counts that would come out as 0, or not come out even.
        (
            {"rollout.batch_size": 2, "train.batch_size": 4},
            "train.batch_size = 4: must divide the samples of one step, rollout.batch_size x "
            "rollout.n_samples_per_prompt = 2 x 1 = 2",
        ),
        ({"rollout.batch_size": 1, "train.batch_size": 128}, "= 1 x 1 = 1"),
        (
            {"rollout.batch_size": 6, "rollout.n_samples_per_prompt": 2, "train.batch_size": 5},
            "= 6 x 2 = 12",
        ),
        ({"rollout.batch_size": 100}, "train.batch_size = 128: must divide"),
        # memory
        (
            {"ref.swap_with_actor": True, "ref.offload": True},
            "ref.offload = True: ref.swap_with_actor keeps it in host memory already",
        ),
        # reward models
        (
            {"reward.model_weights": (1.0, 2.0)},
            "reward.model_weights = (1.0, 2.0): expected one for each of the 0 folders",
        ),
        ({"reward.normalize_enable": True}, "reward.normalize_enable = True: there is no reward"),
        (
            {"reward.model_name_or_path": "no/such, neither"},
            "reward.model_name_or_path = 'no/such': ",
        ),
        # the mesh and its engines
        (
            {"megatron.world_size": 6, "megatron.tensor_model_parallel_size": 4},
            "megatron.world_size = 6 is not a multiple of tensor_model_parallel_size x "
            "pipeline_model_parallel_size = 4 x 1 = 4",
        ),
        ({"megatron.pipeline_model_parallel_size": 2}, "megatron.world_size = 1 is not a multiple"),
        (
            {"megatron.world_size": 4, "megatron.expert_model_parallel_size": 3},
            "megatron.expert_model_parallel_size = 3 does not divide the 4 ranks of a pipeline",
        ),
        (
            {
                "megatron.world_size": 8,
                "megatron.pipeline_model_parallel_size": 4,
                "megatron.expert_model_parallel_size": 4,
            },
            "megatron.expert_model_parallel_size = 4 does not divide the 2 ranks of a pipeline",
        ),
        (
            {"megatron.world_size": 2, "megatron.virtual_pipeline_model_parallel_size": 2},
            "megatron.virtual_pipeline_model_parallel_size = 2 needs pipeline_model_parallel_size",
        ),
        (
            {"megatron.expert_model_parallel_size": 0},
            "megatron.expert_model_parallel_size = 0: expected",
        ),
        (
            {"megatron.world_size": 4, "vllm.tensor_parallel_size": 3},
            "vllm.tensor_parallel_size = 3: expected a divisor of megatron.world_size = 4",
        ),
        (
            {"megatron.world_size": 4, "vllm.tensor_parallel_size": 2, "vllm.num_engines": 1},
            "2 = 2 must equal megatron.world_size = 4: give 2, or leave it out, or give engines "
            "processes of their own with train.colocate_all = false",
        ),
        ({"vllm.num_engines": 2}, "vllm.num_engines = 2: "),
        ({"megatron.sequence_parallel": True}, "needs megatron.tensor_model_parallel_size above 1"),
        # C52: prompt plus response
        ({"data.max_len": 1024}, "data.max_len = 1024: prompt plus response; must be above"),
        ({"rollout.max_new_tokens": 4096}, "must be above rollout.max_new_tokens = 4096"),
        (
            {"train.max_tokens_per_gpu": 2047},
            "train.max_tokens_per_gpu = 2047: a micro-batch must hold the longest sample, "
            "data.max_len = 2048",
        ),
        # C43: the adaptive controller
        ({"algo.kl.target": 0}, "algo.kl.target = 0: expected above 0"),
        ({"algo.kl.target": -6}, "algo.kl.target = -6: expected above 0"),
        ({"algo.kl.horizon": 0}, "algo.kl.horizon = 0: expected at least 1"),
        ({"algo.kl.target": 6, "algo.kl.init_coef": 0}, "algo.kl.target = 6: "),
        # estimators over a group
        ({"algo.advantage.estimator": "rloo"}, "rollout.n_samples_per_prompt = 1: "),
        ({"algo.advantage.estimator": "group_norm"}, "algo.advantage.estimator = group_norm"),
        # data and evaluation
        ({"data.input_template": "no place"}, "expected exactly one {} for the prompt"),
        ({"data.input_template": "{} {}"}, "expected exactly one {} for the prompt"),
        (
            {"data.input_template": "{}", "data.apply_chat_template": True},
            "cannot be used with data.apply_chat_template = true",
        ),
        ({"eval.steps": 5}, "eval.steps = 5: needs eval.dataset"),
        ({"reward.clip_range": (1.0, 1.0)}, "reward.clip_range = (1.0, 1.0): expected [low, high]"),
        ({"reward.clip_range": (5.0, -5.0)}, "expected [low, high]"),
        ({"reward.clip_range": (math.nan, 5.0)}, "expected [low, high]"),
        ({"output_dir": ""}, "output_dir = '': expected the name of a folder"),
    ],
)
def test_combinations(make: Make, changes: dict[str, object], expected: str) -> None:
    """Keys at odds with each other: the numbers, their product, and what to change."""
    assert expected in refusal(make(**changes))


def test_checks_need_no_torch() -> None:
    """Reading and checking a configuration loads no torch."""
    program = "import sys, megappo.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

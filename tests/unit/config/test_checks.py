"""The checks that need no model: each refuses with one line that names the key and the fix."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config import Config, ConfigError, check
from megappo.config.keys import keys
from megappo.config.ranges import RANGES

Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Builds a configuration that passes, with the given keys changed."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"x")
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1"}\n')
    (tmp_path / "reward.py").write_text("def reward_func(samples): ...\n")

    def build(**changes: object) -> Config:
        values: dict[str, object] = {
            "actor.model_name_or_path": str(model),
            "data.prompt_dataset": str(tmp_path / "prompts.jsonl"),
            "reward.remote_url": str(tmp_path / "reward.py"),
            "output_dir": str(tmp_path / "out"),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        config = Config()
        for key, value in values.items():
            config = changed(config, key.split("."), value)
        return config

    return build


def changed(instance: Any, path: list[str], value: object) -> Any:
    """A copy of a nested frozen dataclass with one field changed; a ``Path`` becomes text."""
    if len(path) > 1:
        value = changed(getattr(instance, path[0]), path[1:], value)
    return dataclasses.replace(
        instance, **{path[0]: str(value) if isinstance(value, Path) else value}
    )


def refusal(config: Config) -> str:
    """The message that ``config`` is refused with; always one line."""
    with pytest.raises(ConfigError) as caught:
        check(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    check(make(algo__advantage__estimator="rloo", rollout__n_samples_per_prompt=2))
    check(make(algo__kl__init_coef=0, actor__max_norm=0, actor__adam__lr=0))
    check(make(algo__kl__target=6, algo__kl__horizon=1))
    check(make(data__input_template="Q: {}\n"))


@pytest.mark.parametrize(
    "key", ["actor.model_name_or_path", "data.prompt_dataset", "reward.remote_url"]
)
def test_required_keys(make: Make, key: str) -> None:
    """A required key that is missing is named, with what it is for."""
    assert refusal(make(**{key: ""})).startswith(f"{key} is required: ")


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
    if expected.startswith("a share"):
        return [0, 1.5]
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
        # the mesh and its engines
        (
            {"megatron.world_size": 6, "megatron.tensor_model_parallel_size": 4},
            "megatron.world_size = 6: expected a multiple of tensor_model_parallel_size x "
            "pipeline_model_parallel_size = 4 x 1 = 4",
        ),
        ({"megatron.pipeline_model_parallel_size": 2}, "megatron.world_size = 1: "),
        (
            {"megatron.world_size": 4, "vllm.tensor_parallel_size": 3},
            "vllm.tensor_parallel_size = 3: expected a divisor of megatron.world_size = 4",
        ),
        (
            {"megatron.world_size": 4, "vllm.tensor_parallel_size": 2, "vllm.num_engines": 1},
            "2 = 2 must equal megatron.world_size = 4: give 2, or leave it out",
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


def _empty_folder(path: Path) -> None:
    path.mkdir()


def _checkpoint(path: Path) -> None:
    (path / "actor").mkdir(parents=True)
    (path / "run_state.json").write_text("{}")


def _file(path: Path) -> None:
    path.write_text("x")


def _bad_json(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": ')


def _list_json(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("[]")


def _no_weights(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "pytorch_model.bin").write_text("x")


@pytest.mark.parametrize("key", ["actor.model_name_or_path", "critic.model_name_or_path"])
@pytest.mark.parametrize(
    ("lay", "expected"),
    [
        (lambda path: None, "no such folder; expected a local Hugging Face folder"),
        (_empty_folder, "no config.json in it, expected a Hugging Face folder; it holds nothing"),
        (_checkpoint, "no config.json in it, expected a Hugging Face folder; it holds actor, run"),
        (_file, "a file, expected a Hugging Face folder"),
        (_bad_json, "its config.json is not valid JSON"),
        (_list_json, "its config.json is not a JSON object"),
        (_no_weights, "no .safetensors file in it"),
    ],
)
def test_model_folders(
    make: Make, tmp_path: Path, key: str, lay: Callable[[Path], None], expected: str
) -> None:
    """C12: the wrong folder is named, with what it holds."""
    path = tmp_path / "given"
    lay(path)
    message = refusal(make(**{key: path}))
    assert message.startswith(f"{key} = '{path}': ")
    assert expected in message


def test_critic_folder_is_not_read_without_a_critic(make: Make) -> None:
    """The estimator may be changed on the command line without editing the file."""
    check(
        make(
            critic__model_name_or_path="nowhere",
            algo__advantage__estimator="reinforce",
        )
    )


def test_hub_name_is_not_a_folder(make: Make) -> None:
    """A model's name on a hub is told apart from a folder."""
    message = refusal(make(actor__model_name_or_path="Qwen/Qwen2.5-0.5B"))
    assert "models on a hub must be downloaded first" in message


@pytest.mark.parametrize("key", ["data.prompt_dataset", "eval.dataset"])
def test_prompt_files(make: Make, tmp_path: Path, key: str) -> None:
    """Missing, empty, or a folder."""
    assert "no such file; expected a JSON-lines file" in refusal(make(**{key: "nowhere.jsonl"}))
    assert "a folder, expected a JSON-lines file" in refusal(make(**{key: tmp_path}))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert f"{key} = '{empty}': the file is empty" in refusal(make(**{key: empty}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://host/score", "reward services are not supported yet; give a Python file"),
        ("HTTPS://host/score", "reward services are not supported yet; give a Python file"),
        ("reward.txt", "expected a Python file, as path.py or path.py:function"),
        ("megappo.rewards", "expected a Python file, as path.py or path.py:function"),
        ("nowhere.py", "no such file; expected a Python file with a reward function"),
        ("nowhere.py:score", "no such file; expected a Python file with a reward function"),
        ("nowhere.py:not-a-name", "'not-a-name' after the colon is not the name of a function"),
        ("nowhere.py:", "'' after the colon is not the name of a function"),
    ],
)
def test_reward_files(make: Make, value: str, expected: str) -> None:
    """Whatever cannot be a reward function is refused with what can."""
    assert expected in refusal(make(reward__remote_url=value))


def test_reward_function_by_name(make: Make, tmp_path: Path) -> None:
    """``path.py:name`` passes; an empty file does not."""
    check(make(reward__remote_url=f"{tmp_path / 'reward.py'}:score"))
    (tmp_path / "empty.py").touch()
    assert "the file is empty" in refusal(make(reward__remote_url=tmp_path / "empty.py"))


@pytest.mark.parametrize("key", ["output_dir", "ckpt.path", "logger.tensorboard_dir"])
def test_output_folders(make: Make, tmp_path: Path, key: str) -> None:
    """A file where a folder must be made, at the end of the path or on the way."""
    file = tmp_path / "file"
    file.write_text("x")
    assert f"but {file} is a file" in refusal(make(**{key: file}))
    assert f"but {file} is a file" in refusal(make(**{key: file / "deep" / "er"}))
    check(make(**{key: tmp_path / "new" / "folder"}))


@pytest.mark.parametrize(
    "key",
    ["actor.model_name_or_path", "critic.model_name_or_path", "data.prompt_dataset"]
    + ["eval.dataset", "reward.remote_url", "output_dir", "ckpt.path"],
)
@pytest.mark.parametrize("name", ["x" * 300, "deep/" * 2000])
def test_names_that_no_file_can_have(make: Make, key: str, name: str) -> None:
    """What the operating system refuses is named by key as well."""
    message = refusal(make(**{key: name + "/r.py"}))
    assert message.startswith(f"{key} = ") and "File name too long" in message


@pytest.mark.parametrize("key", [key.name for key in keys().values() if key.type == str | None])
def test_empty_text_is_not_null(make: Make, key: str) -> None:
    """``--ckpt.path ''`` (an unset shell variable) would mean something else for every key."""
    assert refusal(make(**{key: ""})).startswith(f"{key} = '': expected text, or null")


def test_the_final_policy_can_be_written(make: Make, tmp_path: Path) -> None:
    """Found before the run, not after it: ``hf`` is the policy itself, a file, or other things."""
    final = tmp_path / "out" / "hf"
    final.parent.mkdir()
    (tmp_path / "model").rename(final)
    message = refusal(make(actor__model_name_or_path=final))
    assert message.startswith("output_dir = ") and "actor.model_name_or_path itself" in message
    other = {"output_dir": tmp_path / "other", "actor.model_name_or_path": final}
    check(make(**other))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "hf").write_text("x")
    assert "no Hugging Face folder" in refusal(make(**other))
    (tmp_path / "other" / "hf").unlink()
    (tmp_path / "other" / "hf").mkdir()
    check(make(**other))
    (tmp_path / "other" / "hf" / "notes.txt").write_text("x")
    assert "no Hugging Face folder" in refusal(make(**other))
    (tmp_path / "other" / "hf" / "config.json").write_text("{}")
    check(make(**other))


def test_checks_need_no_torch() -> None:
    """Reading and checking a configuration loads no torch."""
    program = "import sys, megappo.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

"""Checks of a configuration before anything starts: ranges, combinations of keys, files.

What needs the model's own configuration (heads divisible by the tensor-parallel size, say)
is checked where the trainer is built. Every failure is a one-line ``ConfigError``: the key,
what was found, what is expected. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from megappo.config.errors import ConfigError, show
from megappo.config.keys import keys
from megappo.config.mesh import topology
from megappo.config.ranges import RANGES
from megappo.config.schema import Config, MegatronConfig

_GROUP_ESTIMATORS = ("rloo", "group_norm")


def check(config: Config) -> None:
    """Check everything that needs no model.

    Raises:
        ConfigError: at the first fault found.
    """
    _check_required(config)
    _check_ranges(config)
    _check_mesh(config)
    _check_fp8(config.megatron)
    _check_engines(config)
    _check_batches(config)
    _check_lengths(config)
    _check_algorithm(config)
    _check_data(config)
    for name, check_file in _FILE_CHECKS.items():
        value = _get(config, name)
        if value is None or (
            name.startswith("critic.") and config.algo.advantage.estimator != "gae"
        ):
            continue
        try:
            check_file(name, value)
        except OSError as error:
            raise _fail(name, value, f"cannot be used ({error.strerror})") from error
    _check_final_policy(config)


def _get(config: Config, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def reward_folders(value: str | None) -> tuple[str, ...]:
    """The folders that ``reward.model_name_or_path`` names."""
    return () if value is None else tuple(folder.strip() for folder in value.split(","))


def _fail(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name} = {show(value)}: {expected}")


def _check_required(config: Config) -> None:
    for name, what in (
        ("actor.model_name_or_path", "the Hugging Face folder of the policy"),
        ("data.prompt_dataset", "the JSON-lines file of prompts"),
    ):
        if not _get(config, name):
            raise ConfigError(f"{name} is required: {what}")
    if config.reward.remote_url is None and config.reward.model_name_or_path is None:
        raise ConfigError(
            "reward.remote_url is required: the Python file with the reward function (or "
            "reward.model_name_or_path, the Hugging Face folder of a reward model)"
        )
    if not config.output_dir:
        raise _fail("output_dir", config.output_dir, "expected the name of a folder")
    for key in keys().values():
        if key.type == str | None and _get(config, key.name) == "":
            raise _fail(key.name, "", "expected text, or null")


def _check_ranges(config: Config) -> None:
    for name, rule in RANGES.items():
        value = _get(config, name)
        values = value if isinstance(value, tuple) else (value,)
        if not all(item is None or rule.holds(item) for item in values):
            raise _fail(name, value, f"expected {rule.expected}")
    if config.ref.swap_with_actor and config.ref.offload:
        raise _fail(
            "ref.offload", True, "ref.swap_with_actor keeps it in host memory already; choose one"
        )
    folders, weights = reward_folders(config.reward.model_name_or_path), config.reward.model_weights
    if weights is not None and len(weights) != len(folders):
        raise _fail(
            "reward.model_weights",
            weights,
            f"expected one for each of the {len(folders)} folders in reward.model_name_or_path",
        )
    if config.reward.normalize_enable and not folders:
        raise _fail(
            "reward.normalize_enable", True, "there is no reward model: reward.model_name_or_path"
        )
    low, high = config.reward.clip_range
    if not low < high:
        raise _fail("reward.clip_range", config.reward.clip_range, "expected [low, high]")


def _check_mesh(config: Config) -> None:
    mesh = config.megatron
    try:
        topology(mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if mesh.sequence_parallel and mesh.tensor_model_parallel_size == 1:
        raise _fail(
            "megatron.sequence_parallel",
            True,
            "needs megatron.tensor_model_parallel_size above 1, found 1",
        )


def _check_fp8(mesh: MegatronConfig) -> None:
    """Keys that mean nothing without another one are refused, not ignored."""
    defaults = MegatronConfig()
    dependent = (
        ("fp8_recipe", "megatron.fp8 (hybrid or e4m3)", mesh.fp8 is not None),
        ("first_last_layers_bf16", "megatron.fp8 (hybrid or e4m3)", mesh.fp8 is not None),
        *(
            (name, "megatron.first_last_layers_bf16 = true", mesh.first_last_layers_bf16)
            for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        ),
    )
    for name, needed, there in dependent:
        value = getattr(mesh, name)
        if value != getattr(defaults, name) and not there:
            raise _fail(f"megatron.{name}", value, f"needs {needed}")
    if mesh.first_last_layers_bf16 and mesh.fp8_recipe == "delayed":
        raise _fail(
            "megatron.first_last_layers_bf16",
            True,
            "Megatron cannot with megatron.fp8_recipe = delayed; give another recipe",
        )


def _check_engines(config: Config) -> None:
    """Engines inside the mesh's ranks fill them; engines of their own are free of the mesh."""
    if not config.train.colocate_all:
        return
    mesh, engine = config.megatron, config.vllm
    apart = "or give engines processes of their own with train.colocate_all = false"
    if mesh.world_size % engine.tensor_parallel_size:
        raise _fail(
            "vllm.tensor_parallel_size",
            engine.tensor_parallel_size,
            f"expected a divisor of megatron.world_size = {mesh.world_size} (engines fill the "
            f"mesh), {apart}",
        )
    fitting = mesh.world_size // engine.tensor_parallel_size
    if engine.num_engines is not None and engine.num_engines != fitting:
        raise _fail(
            "vllm.num_engines",
            engine.num_engines,
            f"num_engines x tensor_parallel_size = {engine.num_engines} x "
            f"{engine.tensor_parallel_size} = {engine.num_engines * engine.tensor_parallel_size} "
            f"must equal megatron.world_size = {mesh.world_size}: give {fitting}, or leave it out, "
            f"{apart}",
        )


def _check_batches(config: Config) -> None:
    prompts, per_prompt = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    samples = prompts * per_prompt
    if samples % config.train.batch_size:
        raise _fail(
            "train.batch_size",
            config.train.batch_size,
            "must divide the samples of one step, rollout.batch_size x "
            f"rollout.n_samples_per_prompt = {prompts} x {per_prompt} = {samples}",
        )


def _check_lengths(config: Config) -> None:
    data, rollout = config.data, config.rollout
    if data.max_len <= rollout.max_new_tokens:
        raise _fail(
            "data.max_len",
            data.max_len,
            "prompt plus response; must be above rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}",
        )
    if config.train.max_tokens_per_gpu < data.max_len:
        raise _fail(
            "train.max_tokens_per_gpu",
            config.train.max_tokens_per_gpu,
            f"a micro-batch must hold the longest sample, data.max_len = {data.max_len}",
        )


def _check_algorithm(config: Config) -> None:
    estimator, kl = config.algo.advantage.estimator, config.algo.kl
    if estimator in _GROUP_ESTIMATORS and config.rollout.n_samples_per_prompt < 2:
        raise _fail(
            "rollout.n_samples_per_prompt",
            config.rollout.n_samples_per_prompt,
            f"algo.advantage.estimator = {estimator} compares responses to one prompt and needs "
            "at least 2",
        )
    if kl.target is not None and kl.init_coef == 0:
        raise _fail(
            "algo.kl.target",
            kl.target,
            "the adaptive controller cannot leave algo.kl.init_coef = 0; give a coefficient "
            "above 0, or no target",
        )


def _check_data(config: Config) -> None:
    template = config.data.input_template
    if template is not None and template.count("{}") != 1:
        raise _fail("data.input_template", template, "expected exactly one {} for the prompt")
    if template is not None and config.data.apply_chat_template:
        raise _fail(
            "data.input_template", template, "cannot be used with data.apply_chat_template = true"
        )
    if config.eval.steps != -1 and config.eval.dataset is None:
        raise _fail("eval.steps", config.eval.steps, "needs eval.dataset, the held-out prompts")


def _check_model_folder(name: str, value: str) -> None:
    folder = Path(value)
    if not folder.exists():
        raise _fail(
            name,
            value,
            "no such folder; expected a local Hugging Face folder (models on a hub must be "
            "downloaded first)",
        )
    if not folder.is_dir():
        raise _fail(name, value, "a file, expected a Hugging Face folder")
    config_file = folder / "config.json"
    if not config_file.is_file():
        found = sorted(path.name for path in folder.iterdir())[:5]
        listing = ", ".join(found) if found else "nothing"
        raise _fail(
            name, value, f"no config.json in it, expected a Hugging Face folder; it holds {listing}"
        )
    try:
        parsed = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _fail(name, value, f"its config.json is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise _fail(name, value, "its config.json is not a JSON object")
    if not any(folder.glob("*.safetensors")):
        raise _fail(name, value, "no .safetensors file in it (other weight formats are not read)")


def _check_file(name: str, value: str, path: Path, what: str) -> None:
    if not path.exists():
        raise _fail(name, value, f"no such file; expected {what}")
    if not path.is_file():
        raise _fail(name, value, f"a folder, expected {what}")
    if path.stat().st_size == 0:
        raise _fail(name, value, f"the file is empty; expected {what}")


def _check_prompt_file(name: str, value: str) -> None:
    _check_file(name, value, Path(value), "a JSON-lines file of prompts")


def _check_reward(name: str, value: str) -> None:
    if value.lower().startswith(("http://", "https://")):
        raise _fail(name, value, "reward services are not supported yet; give a Python file")
    path, separator, function = value.rpartition(":")
    if not separator:
        path, function = value, "reward_func"
    if not path.endswith(".py"):
        raise _fail(name, value, "expected a Python file, as path.py or path.py:function")
    if not function.isidentifier():
        raise _fail(name, value, f"{function!r} after the colon is not the name of a function")
    _check_file(name, value, Path(path), "a Python file with a reward function")


def _check_reward_models(name: str, value: str) -> None:
    for folder in reward_folders(value):
        _check_model_folder(name, folder)


def _check_output(name: str, value: str) -> None:
    path = Path(value)
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise _fail(name, value, f"expected a folder, but {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _fail(name, value, f"nothing may be written into {existing}")


def _check_final_policy(config: Config) -> None:
    """What would only be found out when the run is over: that ``hf/`` cannot be written."""
    final = Path(config.output_dir) / "hf"
    if final.resolve() == Path(config.actor.model_name_or_path).resolve():
        raise _fail(
            "output_dir",
            config.output_dir,
            "its folder hf, which the final policy goes to, is actor.model_name_or_path itself; "
            "give another output_dir",
        )
    replaceable = (final / "config.json").is_file() or (final.is_dir() and not any(final.iterdir()))
    if final.exists() and not replaceable:
        raise _fail(
            "output_dir",
            config.output_dir,
            "the final policy goes to its folder hf, but what is there is no Hugging Face folder",
        )


_FILE_CHECKS: dict[str, Callable[[str, str], None]] = {
    "actor.model_name_or_path": _check_model_folder,
    "critic.model_name_or_path": _check_model_folder,
    "data.prompt_dataset": _check_prompt_file,
    "eval.dataset": _check_prompt_file,
    "reward.remote_url": _check_reward,
    "reward.model_name_or_path": _check_reward_models,
    "output_dir": _check_output,
    "ckpt.path": _check_output,
    "logger.tensorboard_dir": _check_output,
}

"""A configuration that passes every check, to be spoilt key by key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megappo.config import Config
from tests.unit.config.refusals import Make


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

"""The checks of files and folders that keys name: each refuses with one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.config import check
from megappo.config.keys import keys
from tests.unit.config.refusals import Make, refusal


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
    check(make(critic__model_name_or_path="nowhere", algo__advantage__estimator="reinforce"))


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

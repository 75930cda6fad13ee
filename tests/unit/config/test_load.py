"""Reading YAML and the command line: precedence, types, and one-line errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megappo.config import Config, ConfigError, dump, load
from megappo.config.keys import keys


def write(folder: Path, text: str | bytes, name: str = "run.yaml") -> str:
    """A file in ``folder``, by its path."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def error(*argv: str) -> str:
    """The message that a command line is refused with; always one line."""
    with pytest.raises(ConfigError) as caught:
        load(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_schema() -> None:
    """An empty command line is the schema's defaults."""
    assert load([]) == Config()


def test_file_then_command_line(tmp_path: Path) -> None:
    """The command line wins over files, wherever it stands; later files win over earlier."""
    first = write(tmp_path, "actor: {adam: {lr: 1e-5, betas: [0.5, 0.6]}}\ntrain: {seed: 1}\n")
    second = write(tmp_path, "train:\n  seed: 2\n  batch_size: 4\n", "second.yaml")
    config = load(["--train.batch_size", "8", "--config", first, f"--config={second}"])
    assert config.actor.adam.lr == 1e-5
    assert config.actor.adam.betas == (0.5, 0.6)
    assert config.critic.adam == Config().critic.adam
    assert (config.train.seed, config.train.batch_size) == (2, 8)


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--actor.adam.lr=2e-6"], "actor.adam.lr", 2e-6),
        (["--actor.max_norm", "1"], "actor.max_norm", 1.0),
        (["--train.max_steps", "null"], "train.max_steps", None),
        (["--train.max_steps", "7"], "train.max_steps", 7),
        (["--rollout.top_k", "-1"], "rollout.top_k", -1),
        (["--data.apply_chat_template", "true"], "data.apply_chat_template", True),
        (["--data.apply_chat_template"], "data.apply_chat_template", True),
        (["--vllm.enforce_eager", "false"], "vllm.enforce_eager", False),
        (["--reward.clip_range", "-5", "5"], "reward.clip_range", (-5.0, 5.0)),
        (["--reward.clip_range", "[-5, 5]"], "reward.clip_range", (-5.0, 5.0)),
        (["--actor.eps_clip_low_high", "0.2", "0.3"], "actor.eps_clip_low_high", (0.2, 0.3)),
        (["--actor.eps_clip_low_high", "null"], "actor.eps_clip_low_high", None),
        (["--data.input_template", "Q: {} A:"], "data.input_template", "Q: {} A:"),
        (["--output_dir", "7"], "output_dir", "7"),
        (["--megatron.params_dtype", "fp32"], "megatron.params_dtype", "fp32"),
    ],
)
def test_values(argv: list[str], key: str, value: object) -> None:
    """Every kind of value, in the ways people write it (OpenRLHF's included)."""
    found: object = load(argv)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_flag_before_another_key() -> None:
    """A flag without a value does not swallow the key after it."""
    config = load(["--data.apply_chat_template", "--train.seed", "3"])
    assert config.data.apply_chat_template
    assert config.train.seed == 3


def test_frozen() -> None:
    """Nothing can be changed after parsing, at any depth."""
    config, name = load([]), "seed"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config.train, name, 3)


def test_dump_is_read_back(tmp_path: Path) -> None:
    """What dump writes, load reads to an equal configuration."""
    config = load(["--actor.eps_clip_low_high", "0.1", "0.2", "--ray_address", "auto"])
    assert load(["--config", write(tmp_path, dump(config))]) == config


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--actor.adam.lr", "abc"], "actor.adam.lr = abc: expected a number"),
        (["--train.seed", "1.5"], "train.seed = 1.5: expected a whole number"),
        (["--train.seed", "true"], "train.seed = True: expected a whole number"),
        (["--train.max_steps", "1e3"], "train.max_steps = 1e3: expected a whole number or null"),
        (["--train.max_steps", "none"], "train.max_steps = none: expected a whole number or null"),
        (["--data.apply_chat_template", "maybe"], "= maybe: expected true or false"),
        (["--algo.kl.estimator", "k9"], "algo.kl.estimator = k9: expected k1 or k2 or k3"),
        (["--reward.clip_range", "1"], "reward.clip_range = [1]: expected a list of 2 numbers"),
        (["--reward.clip_range", "[1, 2, 3]"], "expected a list of 2 numbers"),
        (["--train.seed", "null"], "train.seed = null: expected a whole number"),
        (["--train.seed"], "--train.seed: expected a whole number after it"),
        (["--train.seed", "--train.max_steps", "3"], "--train.seed: expected a whole number"),
        (["--actor.adam", "3"], "--actor.adam is a group of keys; give a key"),
        (["train.seed=3"], "unexpected argument 'train.seed=3'; give keys as --KEY VALUE"),
        (["--train.sede", "3"], "unknown key train.sede; did you mean train.seed?"),
        (["--train.see", "3"], "unknown key train.see; did you mean train.seed?"),
        (["--actor.lr", "1e-6"], "unknown key actor.lr; did you mean actor.adam.lr?"),
        (["--n_samples_per_prompt", "4"], "did you mean rollout.n_samples_per_prompt?"),
        (["--qqqqqqqq", "4"], "unknown key qqqqqqqq; megappo train --help lists all keys"),
        (["--ds.param_dtype", "bf16"], "it is megatron.params_dtype here (bf16 or fp32)"),
        (["--ds.lora.rank", "8"], "OpenRLHF's key has no equal here (not supported yet)"),
        (["--config"], "--config: expected the name of a YAML file after it"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--config", "/"], "--config /: a folder, expected a YAML file"),
    ],
)
def test_command_line_errors(argv: list[str], expected: str) -> None:
    """One line that names the key, what was found and what is expected."""
    assert expected in error(*argv)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  seed: abc\n", "train.seed = abc: expected a whole number ({}:2)"),
        ("train:\n  seed:\n", "train.seed = null: expected a whole number ({}:2)"),
        (
            "\n\nalgo: {kl: {target: [1]}}\n",
            "algo.kl.target = [1]: expected a number or null ({}:3)",
        ),
        ("train:\n  sede: 1\n", "{}:2: unknown key train.sede; did you mean train.seed?"),
        ("trian:\n  seed: 1\n", "{}:1: unknown key trian; did you mean train?"),
        ("ds:\n  zero_stage: 3\n", "{}:1: unknown key ds; "),
        ("train:\n  seed: 1\n  seed: 2\n", "{}:3: train.seed is already given in line 2"),
        ("train:\n", "{}:1: train is a group of keys, found nothing"),
        ("train: 3\n", "{}:1: train is a group of keys, found the value '3'"),
        ("train: [1]\n", "{}:1: train is a group of keys, found a list"),
        ("train:\n  seed: [1\nactor: 2\n", "{}:3: not valid YAML: "),
        ("train:\n\tseed: 1\n", "{}:2: not valid YAML: "),
        ("train: {seed: 1}\n--- \ntrain: {}\n", "{}:2: not valid YAML: "),
        ("- train\n", "{}: expected keys such as `actor:`, found a list"),
        ("just text\n", "{}: expected keys such as `actor:`, found the value 'just text'"),
        ("", "{}: expected keys such as `actor:`, found nothing"),
        (b"train: \xe6\n", "--config {}: not UTF-8 text"),
    ],
)
def test_file_errors(tmp_path: Path, text: str | bytes, expected: str) -> None:
    """Faults in a file name the file and the line."""
    path = write(tmp_path, text)
    assert expected.format(path) in error("--config", path)


def test_line_is_not_named_where_the_command_line_is_at_fault(tmp_path: Path) -> None:
    """A good value in the file, a bad one on the command line: the file is not blamed."""
    path = write(tmp_path, "train: {seed: 1}\n")
    assert error("--config", path, "--train.seed", "x").endswith("expected a whole number")


def test_help_documents_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--help shows each key with the field's own doc line."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as caught:
        load(["--help"])
    assert caught.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for key in keys().values():
        assert f"--{key.name} " in words
        assert key.doc in words


def test_print_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print_config prints YAML that gives the same configuration."""
    argv = ["--train.seed", "9", "--actor.adam.betas", "0.1", "0.2"]
    with pytest.raises(SystemExit) as caught:
        load([*argv, "--print_config"])
    assert caught.value.code == 0
    assert load(["--config", write(tmp_path, capsys.readouterr().out)]) == load(argv)

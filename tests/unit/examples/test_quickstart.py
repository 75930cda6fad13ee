"""The quickstart's problems, tokenizer, policy and reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from examples.quickstart.prepare import (
    NUM_EVAL,
    NUM_TRAIN,
    Assets,
    Supervision,
    byte_tokenizer,
    new_policy,
    prepare,
    prompt_and_answer,
    split_problems,
)
from examples.quickstart.reward import reward_func
from megappo.rewards.function import load_reward_function
from megappo.weights.families import load_shape
from tests.unit.examples.samples import sample

BRIEF = Supervision(max_steps=2, batch_size=8)


def rows(path: Path) -> list[dict[str, str]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """The quickstart's files, with next to no supervision."""
    return prepare(tmp_path_factory.mktemp("quickstart") / "assets", 7, BRIEF)


@pytest.mark.parametrize(
    ("problem", "carry", "expected"),
    [
        ((7, 35), True, ("07+35=", "042")),
        ((7, 35), False, ("07+35=", "032")),
        ((99, 99), True, ("99+99=", "198")),
        ((95, 5), False, ("95+05=", "090")),
        ((12, 34), False, ("12+34=", "046")),
        ((0, 0), True, ("00+00=", "000")),
    ],
)
def test_prompt_and_answer(
    problem: tuple[int, int], carry: bool, expected: tuple[str, str]
) -> None:
    """The careless teacher is wrong by ten where there is a carry, and right elsewhere."""
    assert prompt_and_answer(problem, carry=carry) == expected


@pytest.mark.parametrize("seed", [0, 42])
def test_held_out_problems_are_held_out(seed: int) -> None:
    """No held-out problem is among those that supervision and PPO learn from."""
    train, held_out = split_problems(seed)
    assert len(held_out) == len(set(held_out)) == NUM_EVAL
    assert len(set(train)) == len(train) == 10_000 - NUM_EVAL
    assert not set(train) & set(held_out)


def test_prompt_files(assets: Assets) -> None:
    """Right labels, no prompt in both files, as many rows as promised."""
    train, held_out = rows(assets.train), rows(assets.eval)
    assert (len(train), len(held_out)) == (NUM_TRAIN, NUM_EVAL)
    assert not {row["input"] for row in train} & {row["input"] for row in held_out}
    for row in train + held_out:
        assert set(row) == {"input", "label"}
        a, b = row["input"].rstrip("=").split("+")
        assert len(row["label"]) == 3 and int(row["label"]) == int(a) + int(b)


@pytest.mark.parametrize("text", ["12+34=046", "", "Grüße, 世界!\n", "  two  spaces\t"])
def test_tokenizer_round_trip(assets: Assets, text: str) -> None:
    """One token a byte, nothing added, and the same text back, also after saving."""
    for tokenizer in (byte_tokenizer(), AutoTokenizer.from_pretrained(assets.policy)):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    """Begin, end and padding are three tokens, and the policy's configuration names them."""
    tokenizer = byte_tokenizer()
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert ids == [256, 257, 258] and len(tokenizer) == 259
    config = new_policy(tokenizer, 0).generation_config
    assert config is not None and config.eos_token_id == tokenizer.eos_token_id


def test_policy_is_one_that_megappo_reads(assets: Assets) -> None:
    """1 to 3 M parameters, a head size that vLLM takes, heads that two ranks can share."""
    shape = load_shape(assets.policy)
    assert shape.head_dim in (32, 64)
    assert shape.num_heads % 2 == shape.num_kv_heads % 2 == 0
    policy = LlamaForCausalLM.from_pretrained(assets.policy)
    assert 1e6 <= sum(parameter.numel() for parameter in policy.parameters()) <= 3e6


def test_made_once_and_remade_when_stale(assets: Assets, tmp_path: Path) -> None:
    """The same seed returns what is there and makes the same; another seed replaces it."""
    folder = assets.policy.parent
    before = (assets.policy / "model.safetensors").stat().st_mtime_ns
    assert prepare(folder, 7, BRIEF) == assets
    assert (assets.policy / "model.safetensors").stat().st_mtime_ns == before

    other = prepare(tmp_path / "assets", 7, BRIEF)
    weights = [LlamaForCausalLM.from_pretrained(a.policy).state_dict() for a in (assets, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    prompts = other.train.read_text()
    prepare(tmp_path / "assets", 8, BRIEF)
    assert other.train.read_text() != prompts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["assets"]


def test_an_unfinished_folder_is_remade(tmp_path: Path) -> None:
    """A folder without its last file does not count as made."""
    assets = prepare(tmp_path / "assets", 7, BRIEF)
    (tmp_path / "assets" / "made_with.json").unlink()
    assets.eval.unlink()
    prepare(tmp_path / "assets", 7, BRIEF)
    assert assets.eval.exists()


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("042", 1.0),
        ("032", 1 / 3),
        ("", 0.0),
        ("04", 1 / 3),
        ("0421", 3 / 8),
        ("999", 0.0),
        ("42", 0.0),
    ],
)
def test_reward(response: str, reward: float) -> None:
    """Half for the exact answer, half for digits in their place, relative to the longer one."""
    [score] = reward_func([sample(response, "042")])
    assert score["reward"] == pytest.approx(reward)
    assert score["accuracy"] == (response == "042")


def test_reward_loads_as_a_user_function() -> None:
    """By its path, as the configuration names it."""
    function = load_reward_function("examples/quickstart/reward.py")
    [score] = function([sample("042", "042")])
    assert (score.reward, dict(score.named)) == (1.0, {"accuracy": 1.0})

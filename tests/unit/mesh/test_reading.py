"""C60: a reward model reads text with its own tokenizer and template, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.mesh.reading import RewardReader
from megappo.records import ScoreText
from megappo.rewards.protocol import RewardError
from tests.support.models import EOS, make_tokenizer

CHAT = ({"role": "user", "content": "1+1="},)


def reader(
    folder: Path, *, vocab: int = 101, max_len: int = 64, chat: bool = False
) -> RewardReader:
    """Of a tokenizer with ``vocab`` entries."""
    make_tokenizer(vocab).save_pretrained(folder)
    return RewardReader(folder, vocab_size=vocab, max_len=max_len, chat=chat)


def plain(response: str, *, ended: bool = True) -> ScoreText:
    """A sample without a chat."""
    return ScoreText("1+1=", None, response, ended)


def test_plain_text_and_its_end(tmp_path: Path) -> None:
    """The end-of-sequence token is there where the policy chose to end."""
    tokenizer = make_tokenizer(101)
    ended, cut, empty = reader(tmp_path)([plain("2"), plain("2", ended=False), plain("")])
    assert cut == tokenizer("1+1=2")["input_ids"]
    assert ended == [*cut, EOS]
    assert empty == [*tokenizer("1+1=")["input_ids"], EOS]


def test_a_chat_is_rendered_by_the_models_own_template(tmp_path: Path) -> None:
    """With the answer as the assistant's message; the policy's rendering is not looked at."""
    sample = ScoreText("<policy's own markup>1+1=", CHAT, "2", True)
    (ids,) = reader(tmp_path, chat=True)([sample])
    assert make_tokenizer(101).decode(ids) == "user: 1+1=\nassistant: 2\n"


def test_other_vocabularies_give_other_ids(tmp_path: Path) -> None:
    """The same text in a vocabulary of 64: no id beyond it, whatever the policy's ids were."""
    small = reader(tmp_path, vocab=64)
    (ids,) = small([plain("xyz {~}")])
    assert max(ids) < 64


@pytest.mark.parametrize("vocab_size", [20, 31, 64])
def test_a_tokenizer_of_another_model(tmp_path: Path, vocab_size: int) -> None:
    """Ids that the embedding has no row for are refused, naming both files."""
    make_tokenizer(101).save_pretrained(tmp_path)
    read = RewardReader(tmp_path, vocab_size=vocab_size, max_len=64, chat=False)
    with pytest.raises(RewardError, match=rf"gives token \d+, .* vocab_size = {vocab_size}"):
        read([plain("z~")])


def test_what_is_too_long_loses_its_beginning(tmp_path: Path) -> None:
    """The score is read at the end, so the end stays."""
    (ids,) = reader(tmp_path, max_len=5)([plain("123456789")])
    assert make_tokenizer(101).decode(ids) == "6789</s>"


def test_no_template_and_no_tokenizer(tmp_path: Path) -> None:
    """One line each, before any model loads."""
    tokenizer = make_tokenizer(101)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"reward.model_name_or_path = .*no chat template"):
        RewardReader(tmp_path / "plain", vocab_size=101, max_len=64, chat=True)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"no tokenizer can be read .*reward.model_name_or_path"):
        RewardReader(tmp_path / "none", vocab_size=101, max_len=64, chat=False)


@pytest.mark.parametrize("template", ["{{ raise_exception('no user') }}", "{{ messages.x.y }}"])
def test_a_template_that_refuses(tmp_path: Path, template: str) -> None:
    """The reason is the template's."""
    tokenizer = make_tokenizer(101)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    read = RewardReader(tmp_path, vocab_size=101, max_len=64, chat=True)
    with pytest.raises(RewardError, match="its chat template refuses a chat"):
        read([ScoreText("", CHAT, "2", True)])


def test_nothing_to_read(tmp_path: Path) -> None:
    """A replica without samples."""
    assert reader(tmp_path)([]) == []

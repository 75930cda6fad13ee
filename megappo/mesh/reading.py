"""How a reward model reads a sample: as text, with its own tokenizer and chat template.

The policy's tokens mean nothing to a model with another vocabulary, so what the policy wrote
is always encoded anew. Knows no model; ``scoring`` lays out what comes out of here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2.exceptions import TemplateError

from megappo.data.tokenizer import load_tokenizer
from megappo.records import ScoreText
from megappo.rewards.protocol import RewardError

KEY = "reward.model_name_or_path"


class RewardReader:
    """Texts to the token ids that a reward model is scored on.

    A chat is rendered by the model's own template, the response as the assistant's message.
    A plain prompt and its response are one text, with the tokenizer's end-of-sequence token
    behind it where the policy ended its response. What is longer than the model takes loses
    its beginning.

    Args:
        hf_dir: Hugging Face folder of the model.
        vocab_size: Of the model.
        max_len: Most tokens that the model takes.
        chat: Whether chats will come, rather than plain prompts.

    Raises:
        ValueError: no tokenizer can be read, or it has no chat template and needs one.
    """

    def __init__(self, hf_dir: str | Path, *, vocab_size: int, max_len: int, chat: bool) -> None:
        self._where = f"{KEY} = {hf_dir}"
        self._tokenizer = load_tokenizer(hf_dir, KEY)
        self._vocab_size = vocab_size
        self._max_len = max_len
        if chat and not self._tokenizer.chat_template:
            raise ValueError(
                f"{self._where}: its tokenizer has no chat template, and data.apply_chat_template "
                "is true; add one to the folder (chat_template.jinja), or set it to false"
            )

    def __call__(self, samples: Sequence[ScoreText]) -> list[list[int]]:
        """Token ids of each sample, at least one.

        Raises:
            RewardError: the template refuses a chat, or a token is not in the model's vocabulary.
        """
        if not samples:
            return []
        encoded = self._tokenizer(
            [self._text(sample) for sample in samples],
            add_special_tokens=samples[0].messages is None,  # a template writes them itself
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return [self._finished(i, s) for i, s in zip(ids, samples, strict=True)]

    def _text(self, sample: ScoreText) -> str:
        if sample.messages is None:
            return sample.prompt + sample.response
        answer = {"role": "assistant", "content": sample.response}
        try:
            return str(
                self._tokenizer.apply_chat_template([*sample.messages, answer], tokenize=False)
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RewardError(
                f"{self._where}: its chat template refuses a chat: {error}"
            ) from error

    def _finished(self, ids: list[int], sample: ScoreText) -> list[int]:
        end = self._tokenizer.eos_token_id
        if sample.messages is None and sample.ended and isinstance(end, int) and ids[-1:] != [end]:
            ids = [*ids, end]
        if not ids or max(ids) >= self._vocab_size:
            found = f"token {max(ids)}" if ids else "no token"
            raise RewardError(
                f"{self._where}: its tokenizer gives {found}, but its config.json says "
                f"vocab_size = {self._vocab_size}: they do not belong together"
            )
        return ids[-self._max_len :]

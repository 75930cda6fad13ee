"""One line of a JSON-lines prompt file to text: parsing, checks and templates.

Knows the keys of ``config.DataConfig`` and the tokenizer's chat template. Does not know
files, line numbers or token counts: ``prompts.py`` adds those to the reasons given here.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from megappo.config.schema import DataConfig


class RowError(ValueError):
    """Why one row cannot be used; the message does not name the file or the line."""


@dataclass(frozen=True)
class Row:
    """A usable row: the rendered prompt text, the label as the file holds it, the chat if any."""

    text: str
    label: Any
    messages: tuple[dict[str, Any], ...] | None = None


class RowReader:
    """Turns the bytes of a line into a :class:`Row`."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the template settings can work.

        Raises:
            ValueError: if they cannot, whatever the row.
        """
        self._config = config
        self._tokenizer = tokenizer
        _check_templates(config, tokenizer)

    def read(self, line: bytes) -> Row:
        """Parse and render one line.

        Raises:
            RowError: with the reason, if the line is not a usable row.
        """
        fields = _parse(line)
        prompt = self._field(fields, self._config.input_key, "data.input_key")
        label = None
        if self._config.label_key is not None:
            label = self._field(fields, self._config.label_key, "data.label_key")
        messages = None
        if self._config.apply_chat_template:
            messages = self._chat(prompt)
            text = self._render_chat(messages)
        else:
            text = self._plain(prompt)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(
                f"{self._config.input_key!r} holds half a surrogate pair "
                f"(\\u{ord(text[error.start]):04x}), which is not a character"
            ) from error
        return Row(text, label, None if messages is None else tuple(messages))

    def _field(self, fields: dict[str, Any], name: str, key: str) -> Any:
        if name not in fields:
            present = ", ".join(repr(field) for field in fields) or "none"
            raise RowError(f"no field {name!r} ({key}); fields present: {present}")
        return fields[name]

    def _plain(self, prompt: Any) -> str:
        name = self._config.input_key
        if isinstance(prompt, list):
            raise RowError(
                f"{name!r} is a list, wanted text; "
                "chat messages need data.apply_chat_template: true"
            )
        text = self._text(prompt)
        template = self._config.input_template
        return text if template is None else template.format(text)

    def _text(self, prompt: Any) -> str:
        name = self._config.input_key
        if not isinstance(prompt, str):
            raise RowError(f"{name!r} is {_kind(prompt)}, wanted text")
        if not prompt.strip():
            raise RowError(f"{name!r} is empty")
        return prompt

    def _chat(self, prompt: Any) -> list[dict[str, Any]]:
        if isinstance(prompt, list):
            return self._messages(prompt)
        return [{"role": "user", "content": self._text(prompt)}]

    def _render_chat(self, messages: list[dict[str, Any]]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError(
                f"the chat template refuses {self._config.input_key!r}: {error}"
            ) from error
        if not isinstance(text, str) or not text:
            raise RowError(f"the chat template renders {self._config.input_key!r} to nothing")
        return text

    def _messages(self, prompt: list[Any]) -> list[dict[str, Any]]:
        name = self._config.input_key
        for index, message in enumerate(prompt):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise RowError(
                    f"message {index} of {name!r} is {_kind(message)}, "
                    "wanted an object with 'role' and 'content'"
                )
        if not any(message["content"] for message in prompt):
            raise RowError(f"{name!r} is empty")
        return prompt


def _parse(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise RowError(f"not UTF-8 (byte 0x{byte:02X} at column {error.start + 1})") from error
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise RowError(
            f"not valid JSON ({what} at column {error.colno}); wanted one JSON object per line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"not readable as JSON ({error}); wanted one JSON object per line"
        ) from error
    if not isinstance(fields, dict):
        raise RowError(f"the line is {_kind(fields)}, wanted one JSON object per line")
    return fields


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _check_templates(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    template = config.input_template
    if template is not None and config.apply_chat_template:
        raise ValueError(
            "data.input_template and data.apply_chat_template are both set; keep one of them"
        )
    if config.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            "data.apply_chat_template is true, but the tokenizer of actor.model_name_or_path "
            "has no chat template; set it to false or use data.input_template"
        )
    if template is None:
        return
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"data.input_template = {template!r}: {error}") from error
    if names != [""]:
        raise ValueError(
            f"data.input_template = {template!r} must hold {{}} exactly once "
            "(write other braces doubled: {{ and }})"
        )

"""Checkpoints for tests of the tools: source folders, contents, and conversions in ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from checkpoint_tools.hf_to_megatron import hf_to_megatron
from checkpoint_tools.megatron_to_hf import megatron_to_hf
from megappo.checkpoint.stored import StoredModel, View
from tests.support.models import make_model

Tensors = dict[str, torch.Tensor]
# Uneven layers, heads that do not fill the hidden size, a vocabulary that is padded.
ODD: dict[str, Any] = {"layers": 3, "vocab": 103, "eos": [2, 7], "max_shard_size": "50KB"}


def make_source(folder: Path, family: str, **options: Any) -> Path:
    """A folder with an added token, a chat template of its own, and two EOS ids."""
    make_model(folder, family, **{**ODD, **options})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file()
    return folder


def hf_tensors(folder: Path) -> Tensors:
    """Everything in a folder's safetensors files."""
    return {k: t for f in sorted(folder.glob("*.safetensors")) for k, t in load_file(f).items()}


def other_files(folder: Path) -> dict[str, bytes]:
    """Everything else in it, less the index."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.endswith((".safetensors", ".index.json"))
    }


def stored_tensors(folder: Path) -> Tensors:
    """Everything in a distributed checkpoint but optimizer state and extra states, by key."""
    stored = StoredModel(folder)
    found = {}
    for key, (dtype, size) in stored.entries.items():
        found[key] = torch.full(size, torch.nan, dtype=dtype)
        whole = View(key, (0,) * len(size), tuple(size), 0, (0,) * len(size), padded=False)
        stored.read(whole, found[key])
    stored.close()
    return found


def assert_same(found: Tensors, expected: Tensors) -> None:
    """The same names and, bit for bit, the same tensors."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def to_megatron(rank: int, source: str, out: str, options: dict[str, Any]) -> float | None:
    """``hf_to_megatron`` on one rank."""
    return hf_to_megatron(source, out, **options)


def to_hf(rank: int, source: str, out: str, options: dict[str, Any]) -> str:
    """``megatron_to_hf`` on one rank."""
    return str(megatron_to_hf(source, out, **options))


def there_and_back(rank: int, source: str, megatron: str, back: str) -> float | None:
    """Both, and the difference of logits that the first found."""
    worst = hf_to_megatron(source, megatron, check=True)
    megatron_to_hf(megatron, back, max_shard_bytes=50_000)
    return worst

"""Says what a folder is and what is in it, and which command takes it.

``python -m checkpoint_tools.inspect_checkpoint DIR``, for any folder or file. Reads headers
and metadata; no weights, and nothing is unpickled that could run code.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from checkpoint_tools.command import FAILED, run
from checkpoint_tools.folders import MEANING, Found, identify
from megappo.checkpoint.metadata import COMMON
from megappo.checkpoint.model_files import HF, dtype_name, read_record
from megappo.checkpoint.run_state import read_run_state
from megappo.checkpoint.stored import StoredModel
from megappo.weights.families import VALUE_HEAD, shape_from_config
from megappo.weights.hf_files import CheckpointReader, Entry, read_config

Facts = Iterator[tuple[str, str]]
UNSUPPORTED = "not supported"


def facts(found: Found) -> Facts:
    """What there is to say of a path, as pairs of a heading and a text."""
    yield "path", str(found.path)
    yield "is", MEANING[found.kind]
    supported = True
    for heading, text in _inside(found):
        supported = supported and heading != UNSUPPORTED
        yield heading, text
    if found.hint and supported:
        yield "next", found.hint


def _inside(found: Found) -> Facts:
    match found.kind:
        case "hf":
            yield from _hf(found.path)
        case "hf_config_only" | "hf_pickled":
            yield from _config(found.path, value_head=False)
        case "megatron":
            yield from _megatron(found.path)
        case "step":
            yield from _step(found)
        case "run":
            yield "checkpoints", ", ".join(path.name for path in found.inner) or "none yet"
        case _:
            pass


def tensors(found: Found) -> dict[str, Entry]:
    """The tensors of a Hugging Face folder or a distributed checkpoint, under its own names."""
    if found.kind == "hf":
        reader = CheckpointReader(found.path)
        return {n: Entry(reader.dtype(n), reader.shape(n)) for n in sorted(reader.names)}
    if found.kind == "megatron":
        entries = StoredModel(found.path).entries
        return {key: Entry(*entries[key]) for key in sorted(entries)}
    return {}


def _hf(folder: Path) -> Facts:
    if quantized := read_config(folder).get("quantization_config"):
        yield from _config(folder, value_head=False)
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else ""
        yield UNSUPPORTED, f"quantised weights ({method}); pass the model they were made from"
        return
    entries = tensors(Found(folder, "hf"))
    yield from _config(folder, value_head=VALUE_HEAD in entries)
    yield from _weights(entries)
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    yield "weight files", f"{len(files)}, {_size(sum((folder / f).stat().st_size for f in files))}"
    yield "tokenizer", "yes" if any(folder.glob("tokenizer*")) else "no"


def _config(folder: Path, *, value_head: bool) -> Facts:
    config = read_config(folder)
    yield "family", str(config.get("model_type"))
    try:
        shape = shape_from_config(config, value_head=value_head, where="config.json")
    except ValueError as error:
        yield UNSUPPORTED, str(error)
        return
    yield "head", "value (score.weight)" if value_head else "language model"
    yield (
        "sizes",
        f"{shape.num_layers} layers, hidden {shape.hidden_size}, ffn {shape.ffn_hidden_size}, "
        f"{shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} KV heads, "
        f"vocabulary {shape.vocab_size}{', tied' if shape.tied else ''}",
    )
    if shape.num_experts:
        yield "experts", f"{shape.num_experts}, {shape.experts_per_token} per token"


def _megatron(folder: Path) -> Facts:
    stored = StoredModel(folder)
    record = read_record(folder)
    if (folder / HF).is_dir():
        for heading, text in _config(folder / HF, value_head=False):
            if heading != "head":
                yield heading, text
    else:
        yield "family", f"not recorded: no {HF}/ in it, give megatron_to_hf --hf"
    if record is not None:
        yield "head", "value" if record.head == "value" else "language model"
        sizes = ", ".join(f"{name} {size}" for name, size in record.parallel.items())
        yield "written by a mesh of", sizes or "unknown size"
    yield from _weights({key: Entry(*entry) for key, entry in stored.entries.items()})
    yield "optimizer", "yes" if stored.num_optimizer_tensors else "no"
    files = [path for path in folder.iterdir() if path.suffix in (".distcp", Path(COMMON).suffix)]
    yield "weight files", f"{len(files)}, {_size(sum(path.stat().st_size for path in files))}"


def _weights(entries: Mapping[str, Entry]) -> Facts:
    count = sum(torch.Size(entry.shape).numel() for entry in entries.values())
    yield "parameters", f"{count:,} in {len(entries)} tensors"
    dtypes = Counter(dtype_name(entry.dtype) for entry in entries.values())
    yield "types", ", ".join(f"{name} ({number})" for name, number in dtypes.most_common())


def _step(found: Found) -> Facts:
    state = read_run_state(found.path)
    yield "step", str(state.step)
    yield "consumed prompts", str(state.consumed_samples)
    yield "roles", ", ".join(path.name for path in found.inner) or "none"
    sizes = _sizes(state.config)
    if sizes:
        yield "written by a mesh of", sizes
    for role in found.inner:
        for heading, text in _megatron(role):
            yield f"{role.name}: {heading}", text


def _sizes(config: Mapping[str, Any]) -> str:
    megatron = config.get("megatron") or {}
    known = (
        ("world_size", "ranks"),
        ("tensor_model_parallel_size", "tp"),
        ("pipeline_model_parallel_size", "pp"),
        ("expert_model_parallel_size", "ep"),
    )
    return ", ".join(f"{name} {megatron[key]}" for key, name in known if megatron.get(key))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoint_tools.inspect_checkpoint", description=__doc__
    )
    parser.add_argument("path", metavar="DIR", help="any folder or file")
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor with its type and shape"
    )
    args = parser.parse_args(argv)
    found = identify(args.path)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    told = dict(facts(found))
    for heading, text in told.items():
        console.print(f"{heading + ':':24}{text}")
    if args.tensors:
        for name, entry in tensors(found).items():
            console.print(f"{dtype_name(entry.dtype):10} {list(entry.shape)!s:20} {name}")
    known = ("hf", "megatron", "step", "run", "hf_config_only", "megatron_parent")
    return 0 if found.kind in known and UNSUPPORTED not in told else FAILED


if __name__ == "__main__":
    sys.exit(run(main))

"""How fast checkpoints are converted, and in how much memory, against copying the files.

    python -m benchmarks.convert --params 100M

prints one JSON line. Writes a random model as a Hugging Face folder, then in turns, each in a
child forked after the imports: copies its files (``cp``), converts it to a distributed
checkpoint, and converts that back (the result must equal the first folder bit for bit); and
imports it as rank 0 of a mesh of TP2 x PP2 does when training starts.
Seconds are medians over ``--runs``, and the least (``best``): what a shared machine adds
is in the former. All of them end with the files on disk (fsync), as the
tools leave them; ``*_cached`` is the copy without that, into the page cache only. CPU seconds
are disturbed less by a busy machine. Where mbridge can be imported, ``mbridge`` is its way into a
live model and out into files again, without a checkpoint between and without fsync;
``mbridge_ratio`` is its seconds to those of both our commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import mbridge_peer
from benchmarks.child import Usage, measured
from benchmarks.models import num_parameters, shape_of
from benchmarks.sizes import count
from checkpoint_tools.hf_to_megatron import hf_to_megatron
from checkpoint_tools.megatron_to_hf import megatron_to_hf
from megappo.reshard.hf import import_hf
from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout
from megappo.weights.shape import ModelShape
from megappo.weights.whole_folder import sync

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FILE_BYTES = 256 * 1000**2
IMPORTED = Topology(4, tp=2, pp=2)  # of which rank 0 imports, as a training rank does


@dataclass
class Step:
    """One thing that is measured, and what it took each time."""

    run: Callable[[], Any]
    usages: list[Usage] = field(default_factory=list)

    def fields(self, name: str) -> dict[str, float]:
        """Medians, the least time, and the largest peak of memory."""
        return {
            f"{name}_seconds": round(median(u.seconds for u in self.usages), 3),
            f"{name}_best_seconds": round(min(u.seconds for u in self.usages), 3),
            f"{name}_cpu_seconds": round(median(u.cpu_seconds for u in self.usages), 3),
            f"{name}_peak_anon_mb": round(
                max(u.peak_anonymous_bytes for u in self.usages) / 1e6, 1
            ),
        }


def write_model(folder: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    """A random model of any size, file by file; no model class is involved."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": shape.family,
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    if shape.num_experts:
        config["architectures"] = ["MixtralForCausalLM"]
        config["num_local_experts"] = shape.num_experts
        config["num_experts_per_tok"] = shape.experts_per_token
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    where: dict[str, str] = {}
    for name, size in canonical_tensors(shape).items():
        if sum(t.nbytes for t in files[-1].values()) > FILE_BYTES:
            _write_file(folder, files, where)
        files[-1][name] = torch.randn(size, generator=random).to(dtype) * 0.02
    _write_file(folder, files, where)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_file(folder: Path, files: list[dict[str, torch.Tensor]], where: dict[str, str]) -> None:
    file = f"model-{len(files):05d}.safetensors"
    save_file(files[-1], folder / file)
    where.update(dict.fromkeys(files[-1], file))
    files[-1] = {}
    files.append({})


def copy(source: Path, target: Path, *, synced: bool) -> None:
    """``cp -r``, and the files put on disk."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    if synced:
        for path in (*target.iterdir(), target):
            sync(path)


def check_equal(a: Path, b: Path) -> None:
    """Both folders hold the same tensors, bit for bit."""
    found = [
        {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}
        for folder in (a, b)
    ]
    if found[0].keys() != found[1].keys():
        raise AssertionError("the round trip lost or made tensors")
    for name in found[0]:
        tensors = []
        for files in found:
            with safe_open(files[name], framework="pt") as file:
                tensors.append(file.get_tensor(name))
        if not torch.equal(*tensors):
            raise AssertionError(f"the round trip changed {name}")


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def run_case(folder: Path, params: int, dtype: str, runs: int) -> dict[str, Any]:
    """Measure one size; ``folder`` is emptied of what it made."""
    shape = shape_of("llama", params)
    source, copied, megatron, back = (folder / n for n in ("source", "copy", "megatron", "back"))
    measured(write_model, source, shape, TYPES[dtype])
    steps = {
        "cp": Step(lambda: copy(source, copied, synced=True)),
        "cp_cached": Step(lambda: copy(source, copied, synced=False)),
        "to_megatron": Step(lambda: hf_to_megatron(source, megatron, check=False)),
        "to_hf": Step(lambda: megatron_to_hf(megatron, back)),
    }
    layout = megatron_layout(shape, IMPORTED)
    shapes = layout.local_shapes(0)

    def read() -> dict[str, torch.Tensor]:
        tensors = {n: torch.empty(size, dtype=TYPES[dtype]) for n, size in shapes.items()}
        import_hf(CheckpointReader(source), layout, 0, tensors)
        return tensors

    steps["import"] = Step(read)
    peer = folder / "mbridge"
    if mbridge_peer.available():
        steps["mbridge"] = Step(lambda: mbridge_peer.load_and_save(source, peer, TYPES[dtype]))
    # What a step made last time is gone when it begins; to_hf reads what to_megatron made.
    made = {"cp": copied, "cp_cached": copied, "to_megatron": megatron, "to_hf": back}
    made |= {"import": folder / "nothing", "mbridge": peer}
    for _ in range(runs):
        for name, step in steps.items():
            shutil.rmtree(made[name], ignore_errors=True)
            os.sync()
            step.usages.append(measured(step.run))
    check_equal(source, back)
    if "mbridge" in steps:
        check_equal(source, peer)
    shard = sum(torch.Size(size).numel() for size in shapes.values()) * TYPES[dtype].itemsize
    result: dict[str, Any] = {
        "import_shard_mb": round(shard / 1e6, 1),
        "params": num_parameters(shape),
        "dtype": dtype,
        "mb": round(sum(p.stat().st_size for p in source.iterdir()) / 1e6, 1),
        "largest_tensor_mb": round(
            max(torch.Size(s).numel() for s in canonical_tensors(shape).values())
            * TYPES[dtype].itemsize
            / 1e6,
            1,
        ),
        "runs": runs,
    }
    for name, step in steps.items():
        result |= step.fields(name)
    for name in ("to_megatron", "to_hf"):
        for which in ("", "best_"):
            seconds = result[f"{name}_{which}seconds"] / result[f"cp_{which}seconds"]
            result[f"{name}_{which}ratio"] = round(seconds, 2)
    if "mbridge" in steps:
        there_and_back = result["to_megatron_seconds"] + result["to_hf_seconds"]
        result["mbridge_ratio"] = round(result["mbridge_seconds"] / there_and_back, 2)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=__doc__)
    parser.add_argument("--params", type=count, default="100M", help="about this many parameters")
    parser.add_argument("--dtype", choices=TYPES, default="bf16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", help="folder for the files, on the disk that is measured")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.dir) as folder:
        print(json.dumps(run_case(Path(folder), args.params, args.dtype, args.runs)))


if __name__ == "__main__":
    main()

"""Megatron-Core distributed checkpoint to Hugging Face folder.

``python -m checkpoint_tools.megatron_to_hf --megatron DIR --out DIR``, in one process. Reads
checkpoints of any parallel sizes, training checkpoints included (optimizer state is left
out). Memory holds one parameter at a time; the folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint_tools.command import DTYPES, parse_bytes, progress, run
from checkpoint_tools.folders import hf_folder_or_config, megatron_folder
from checkpoint_tools.models import MegatronModel, say
from checkpoint_tools.process import mesh, one_thread
from megappo.checkpoint.model_files import dtype_change
from megappo.reshard.hf import value_config
from megappo.weights.hf_files import SHARD_BYTES, CheckpointWriter, Entry


def megatron_to_hf(
    megatron: str | Path,
    out: str | Path,
    *,
    role: str | None = None,
    hf: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    show_progress: bool = False,
) -> Path:
    """Convert a distributed checkpoint.

    Args:
        megatron: the checkpoint; or a training checkpoint or run, of which ``role`` says the
            model where there are several.
        out: folder to make; an older Hugging Face folder of that name is replaced.
        role: "actor" or "critic".
        hf: Hugging Face folder with configuration and tokenizer, for checkpoints without a
            copy of it.
        dtype: type of the weights; by default each tensor's in the folder that the model came
            from, or the stored one where that is not known.
        max_shard_bytes: largest file, unless one tensor is larger.
        show_progress: show a bar on stderr.

    Returns:
        The distributed checkpoint that was read.

    Raises:
        ValueError: the folders cannot be used, or the weights are not the configuration's.
    """
    folder = megatron_folder(megatron, role)
    source = hf_folder_or_config(hf) if hf is not None else None
    target = Path(out).resolve()
    if target in (folder.resolve(), *folder.resolve().parents):
        raise ValueError(f"--out {out} is or holds the checkpoint that is read: choose another")
    with mesh() as topology:
        model = MegatronModel(folder, topology, source)
        entries = {
            name: Entry(_dtype(model, name, dtype), entry.shape)
            for name, entry in model.entries.items()
        }
        writer = CheckpointWriter(
            out,
            entries,
            model.hf_dir,
            max_shard_bytes=max_shard_bytes,
            config_changes=_config_changes(model, dtype),
        )
        try:
            total = sum(entry.num_bytes for entry in entries.values())
            bar = progress(f"writing {Path(out).name}", total, shown=show_progress)
            with one_thread(), bar as on_bytes:
                for name, entry in entries.items():
                    writer.add(name, model.read(name).to(entry.dtype))
                    on_bytes(entry.num_bytes)
            writer.commit()
        finally:
            writer.discard()
            model.close()
    return folder


def _dtype(model: MegatronModel, name: str, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return model.record.dtype_of(name) if model.record else model.entries[name].dtype


def _config_changes(model: MegatronModel, dtype: torch.dtype | None) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if model.head == "value":
        fields = value_config(model.shape)
        changes |= {key: value for key, value in fields.items() if model.config.get(key) != value}
    if dtype is not None:
        changes |= dtype_change(model.config, dtype)
    return changes


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoint_tools.megatron_to_hf", description=__doc__
    )
    parser.add_argument(
        "--megatron",
        required=True,
        metavar="DIR",
        help="distributed checkpoint, or a training checkpoint or run that holds it",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--role", help="model of a training checkpoint: actor or critic")
    parser.add_argument(
        "--hf",
        metavar="DIR",
        help="Hugging Face folder with configuration and tokenizer, if DIR holds none",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the weights; by default as they came"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file")
    args = parser.parse_args(argv)
    folder = megatron_to_hf(
        args.megatron,
        args.out,
        role=args.role,
        hf=args.hf,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        max_shard_bytes=parse_bytes(args.max_shard_size),
        show_progress=sys.stderr.isatty(),
    )
    say(f"{args.out} is the Hugging Face folder of {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

"""Hugging Face folder to Megatron-Core distributed checkpoint.

``python -m checkpoint_tools.hf_to_megatron --hf DIR --out DIR``, in one process or under
``torchrun`` with any number of ranks. The result loads at any parallel sizes. Memory holds
one parameter at a time; the folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint_tools.command import DTYPES, progress, run
from checkpoint_tools.folders import hf_folder, identify
from checkpoint_tools.models import HFModel, MegatronModel, fits_twice, sample_tokens, say
from checkpoint_tools.process import mesh, one_thread
from megappo.checkpoint.convert_write import write_model
from megappo.checkpoint.model_files import write_model_files
from megappo.models.build import Head
from megappo.models.meta import build_on_meta, fresh_value_head
from megappo.reshard.hf import LocalReader
from megappo.topology import Topology
from megappo.weights.families import VALUE_HEAD, load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.layout import Layout
from megappo.weights.megatron import megatron_layout
from megappo.weights.shape import ModelShape
from megappo.weights.whole_folder import WholeFolder

TOLERANCE = 1e-4


def hf_to_megatron(
    hf: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    check: bool | None = None,
    tolerance: float = TOLERANCE,
    show_progress: bool = False,
) -> float | None:
    """Convert a Hugging Face folder; all ranks of a process group call it, or one process.

    Args:
        hf: folder with ``config.json`` and safetensors.
        out: folder to make; an older distributed checkpoint of that name is replaced.
        dtype: type of the weights; by default the widest in the folder, so that nothing is lost.
        value_head: make a critic: the folder's ``score.weight``, or a fresh one, is the head. A
            folder with ``score.weight`` always becomes one.
        check: compare logits with transformers' before the result gets its name; by default
            where two float32 copies of the model take less than half of the free memory.
        tolerance: largest difference allowed.
        show_progress: show a bar on stderr.

    Returns:
        The largest difference of the logits, None when they were not compared or on ranks
        other than 0.

    Raises:
        ValueError: the folders cannot be used, the model is not supported, or the check failed.
    """
    folder, target = hf_folder(hf), Path(out)
    shape, reader = load_shape(folder), CheckpointReader(folder)
    head: Head = "value" if value_head or shape.value_head else "lm"
    layout = megatron_layout(shape, Topology(1), value_head=head == "value")
    local = LocalReader(reader, layout, 0)
    chosen = dtype or _widest(reader, layout)
    _check_target(target, folder)
    with mesh() as topology:
        modules = build_on_meta(shape, topology, head=head, dtype=chosen)
        whole = WholeFolder(target) if dist.get_rank() == 0 else None
        try:
            path = _shared(str(whole.path) if whole else "")
            total = sum(p.nbytes for p in modules[0].parameters()) // topology.world_size
            bar = progress(f"writing {target.name}", total, shown=show_progress)
            with one_thread(), bar as on_bytes:
                write_model(Path(path), modules, _content(local, modules[0]), on_bytes)
            worst: float | None = None
            if whole is not None:
                write_model_files(whole.path, folder, head=head, topology=Topology(1), dtype=dtype)
                source = HFModel(folder)
                if check or (check is None and fits_twice(source.entries)):
                    worst = _compare(source, whole.path, topology, chosen, shape)
                    _report(worst, tolerance)
                whole.commit()
            dist.barrier()
            return worst
        finally:
            if whole is not None:
                whole.discard()


def _widest(reader: CheckpointReader, layout: Layout) -> torch.dtype:
    """Of the tensors that the model uses; a folder may hold others."""
    used = reader.names.intersection(layout.canonical_names)
    return reduce(torch.promote_types, {reader.dtype(name) for name in used})


def _check_target(out: Path, source: Path) -> None:
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"--out {out} is or holds the folder that the model comes from")
    found = identify(out)
    if found.kind not in ("missing", "empty", "megatron"):
        raise ValueError(f"--out: {found}; expected a new folder, or an older result to replace")


def _shared(text: str) -> str:
    """Rank 0's text on every rank."""
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _content(local: LocalReader, model: Any) -> Callable[[str, int, int], torch.Tensor]:
    """What the parameters of the one chunk hold, by their names behind the chunk's number."""
    dtypes = {f"0.{name}": parameter.dtype for name, parameter in model.named_parameters()}

    def content(name: str, start: int, count: int) -> torch.Tensor:
        if not local.has(name):
            return fresh_value_head(model).to(dtypes[name]).reshape(-1)
        return local.part(name, dtypes[name], start, count)

    return content


def _compare(
    source: HFModel, written: Path, topology: Topology, dtype: torch.dtype, shape: ModelShape
) -> float:
    """Largest difference between what transformers and Megatron say of random tokens."""
    result = MegatronModel(written, topology)
    if result.head == "value" and not shape.value_head:
        source = HFModel(source.folder, score=result.read(VALUE_HEAD))
    tokens = sample_tokens(source.config)
    outputs = [model.outputs(tokens, dtype) for model in (source, result)]
    result.close()
    return float((outputs[0] - outputs[1]).abs().max())


def _report(worst: float, tolerance: float) -> None:
    if not worst <= tolerance:
        raise ValueError(
            f"logits differ from transformers' by up to {worst:.3g}, more than {tolerance:g}: "
            "nothing is written"
        )
    say(f"logits differ from transformers' by at most {worst:.3g}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoint_tools.hf_to_megatron", description=__doc__
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the weights; by default the widest in the folder"
    )
    parser.add_argument(
        "--value-head",
        action="store_true",
        help="make a critic, with the folder's score.weight or a fresh head",
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare logits with transformers'; by default where memory allows it easily",
    )
    args = parser.parse_args(argv)
    first = os.environ.get("RANK", "0") == "0"
    hf_to_megatron(
        args.hf,
        args.out,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        value_head=args.value_head,
        check=args.check,
        show_progress=first and sys.stderr.isatty(),
    )
    if first:
        say(f"{args.out} is a Megatron-Core distributed checkpoint")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

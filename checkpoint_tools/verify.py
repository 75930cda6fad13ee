"""Compares two checkpoints of either format, tensor by tensor and by what they answer.

``python -m checkpoint_tools.verify A B [--prompts FILE]``. Exit code 1 when a tensor is on
one side only, or when a tensor or a logit differs by more than the tolerance. A Hugging Face
folder answers through transformers, a distributed checkpoint through Megatron, both in
float32.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint_tools.command import DTYPES, FAILED, progress, run
from checkpoint_tools.folders import hf_folder, hf_folder_or_config, identify, megatron_folder
from checkpoint_tools.models import (
    HFModel,
    MegatronModel,
    Model,
    fits_twice,
    sample_tokens,
    say,
)
from checkpoint_tools.process import mesh, one_thread
from megappo.data.tokenizer import load_tokenizer
from megappo.topology import Topology
from megappo.weights.families import VALUE_HEAD

TOLERANCE = 1e-4
HF_KINDS = ("hf", "hf_config_only", "hf_pickled", "safetensors_file")


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ.

    Attributes:
        only_a: tensors of the first alone.
        only_b: tensors of the second alone.
        reshaped: tensors of unequal shape.
        differences: largest difference of each common tensor.
        logits: largest difference of the logits or values, None when not compared.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    reshaped: tuple[str, ...]
    differences: dict[str, float]
    logits: float | None

    def within(self, tolerance: float) -> bool:
        """Whether they hold the same tensors and nothing differs by more than ``tolerance``."""
        numbers = [*self.differences.values(), *([] if self.logits is None else [self.logits])]
        odd = self.only_a or self.only_b or self.reshaped
        return not odd and all(number <= tolerance for number in numbers)  # NaN is not within


def verify(
    a: str | Path,
    b: str | Path,
    *,
    prompts: str | Path | None = None,
    logits: bool | None = None,
    role: str | None = None,
    hf: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    show_progress: bool = False,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        a: Hugging Face folder, distributed checkpoint, or training checkpoint or run.
        b: likewise.
        prompts: text file whose lines are the prompts for the logits; random tokens without.
        logits: whether to compare logits; by default where memory allows it easily.
        role: model of a training checkpoint.
        hf: Hugging Face folder with the configuration of a distributed checkpoint without one.
        dtype: type that weights are rounded to before logits are compared.
        show_progress: show a bar on stderr.

    Raises:
        ValueError: a path is no checkpoint, or the prompts cannot be used.
    """
    with mesh() as topology, contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_opened(path, topology, role, hf)) for path in (a, b)]
        only = [sorted(set(x.entries) - set(y.entries)) for x, y in (sides, sides[::-1])]
        common = [name for name in sides[0].entries if name in sides[1].entries]
        shapes = [{name: side.entries[name].shape for name in common} for side in sides]
        alike = [name for name in common if shapes[0][name] == shapes[1][name]]
        differences = {}
        total = sum(sides[0].entries[name].num_bytes for name in alike)
        with one_thread(), progress("comparing", total, shown=show_progress) as on_bytes:
            for name in alike:
                differences[name] = largest_difference(*(side.read(name) for side in sides))
                on_bytes(sides[0].entries[name].num_bytes)
        worst: float | None = None
        comparable = not any(only) and len(alike) == len(common)
        if logits or (logits is None and comparable and fits_twice(sides[0].entries)):
            worst = _compare_logits(sides, prompts, dtype)
    reshaped = tuple(name for name in common if name not in differences)
    return Comparison(tuple(only[0]), tuple(only[1]), reshaped, differences, worst)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two tensors in float32, in bounded memory; inf where one has NaN."""
    if a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    worst = 0.0
    for x, y in zip(a.reshape(-1).split(1 << 22), b.reshape(-1).split(1 << 22), strict=True):
        part = (x.float() - y.float()).abs()
        worst = max(worst, float(part.nan_to_num(torch.inf, torch.inf).max()))
    return worst


@contextlib.contextmanager
def _opened(
    path: str | Path, topology: Topology, role: str | None, hf: str | Path | None
) -> Iterator[Model]:
    if identify(path).kind in HF_KINDS:
        yield HFModel(hf_folder(path))
        return
    found = identify(path)
    wanted = role if found.kind in ("step", "run") else None
    config = hf_folder_or_config(hf) if hf is not None else None
    model = MegatronModel(megatron_folder(path, wanted), topology, config)
    try:
        yield model
    finally:
        model.close()


def _compare_logits(
    sides: Sequence[Model], prompts: str | Path | None, dtype: torch.dtype
) -> float:
    sequences = _sequences(sides, prompts)
    scores = [side.read(VALUE_HEAD) for side in sides if VALUE_HEAD in side.entries]
    outputs = []
    for side in sides:
        if isinstance(side, HFModel) and scores and VALUE_HEAD not in side.entries:
            side = HFModel(side.folder, score=scores[0])
        outputs.append(side.outputs(sequences, dtype))
    if outputs[0].shape != outputs[1].shape:
        raise ValueError(
            f"the models do not compare: outputs of {tuple(outputs[0].shape)} and "
            f"{tuple(outputs[1].shape)}"
        )
    return largest_difference(*outputs)


def _sequences(sides: Sequence[Model], prompts: str | Path | None) -> list[torch.Tensor]:
    if prompts is None:
        return sample_tokens(sides[0].config)
    lines = [line for line in Path(prompts).read_text(encoding="utf-8").splitlines() if line]
    if not lines:
        raise ValueError(f"--prompts {prompts} has no line with text")
    folders = [side.hf_dir if isinstance(side, MegatronModel) else side.folder for side in sides]
    tokenizer = load_tokenizer(folders[0])
    sequences = [torch.tensor(tokenizer(line)["input_ids"], dtype=torch.int64) for line in lines]
    return [tokens for tokens in sequences if len(tokens)]


def report(result: Comparison, tolerance: float, a: str, b: str) -> None:
    """Print what differs, the largest difference last."""
    for names, path in ((result.only_a, a), (result.only_b, b)):
        for name in names:
            say(f"only in {path}: {name}")
    for name in result.reshaped:
        say(f"shapes differ: {name}")
    differing = {name: d for name, d in result.differences.items() if d > 0}
    for name, difference in sorted(differing.items(), key=lambda item: item[1]):
        mark = "  > tolerance" if not difference <= tolerance else ""
        say(f"{difference:.3e}  {name}{mark}")
    equal = len(result.differences) - len(differing)
    say(f"{len(result.differences)} tensors compared, {equal} equal bit for bit")
    if result.logits is None:
        say("logits not compared")
    else:
        say(f"logits differ by at most {result.logits:.3e}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint_tools.verify", description=__doc__)
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="checkpoint of either format")
    parser.add_argument(
        "--prompts", metavar="FILE", help="text file, one prompt a line; random tokens without"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="largest difference of a weight or a logit (default: %(default)s)",
    )
    parser.add_argument(
        "--logits",
        action=argparse.BooleanOptionalAction,
        help="compare logits; by default where memory allows it easily",
    )
    parser.add_argument("--role", help="model of a training checkpoint: actor or critic")
    parser.add_argument(
        "--hf", metavar="DIR", help="Hugging Face folder with the configuration, if there is none"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="fp32",
        help="type that weights are rounded to before logits are compared",
    )
    args = parser.parse_args(argv)
    result = verify(
        args.a,
        args.b,
        prompts=args.prompts,
        logits=args.logits,
        role=args.role,
        hf=args.hf,
        dtype=DTYPES[args.dtype],
        show_progress=sys.stderr.isatty(),
    )
    report(result, args.tolerance, args.a, args.b)
    passed = result.within(args.tolerance)
    say("equal within the tolerance" if passed else "NOT equal within the tolerance")
    return 0 if passed else FAILED


if __name__ == "__main__":
    sys.exit(run(main))

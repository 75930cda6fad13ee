"""What the commands share: one-line errors, exit codes, progress bars, names of types."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAILED, INTERRUPTED = 1, 130
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def run(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a command's ``main``; what the user can mend is one line on stderr."""
    try:
        return main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED


@contextlib.contextmanager
def progress(text: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of ``total`` bytes on stderr; yields what is called with the bytes that are done."""
    bar = Progress(
        TextColumn(text),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def parse_bytes(text: str) -> int:
    """``5GB`` as a number of bytes; K, M, G and T are powers of 1000.

    Raises:
        ValueError: it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if not match or float(match[1]) == 0:
        raise ValueError(f"--max-shard-size {text!r} is no size: write 5GB or 500MB, say")
    return int(float(match[1]) * _UNITS[match[2]])

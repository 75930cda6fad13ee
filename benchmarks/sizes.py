"""Sizes as they are written on the command line: ``100M``, ``tp8,pp16,dp8``, ``tp16x64``."""

from __future__ import annotations

import argparse
import re

AXES = ("tp", "pp", "dp", "ep", "vpp")


UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


def count(text: str) -> int:
    """A number of parameters: ``500M``, ``1.5B``, or digits alone.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number like 100M or 1.5B")
    return round(float(found[1]) * UNITS.get(found[2], 1))


def mesh_sizes(text: str) -> dict[str, int]:
    """The size of every axis; 1 for those that are not named.

    Raises:
        argparse.ArgumentTypeError: for anything else than axes and sizes.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis = part.rstrip("0123456789")
        if axis not in sizes or not part[len(axis) :]:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(AXES)} and a size")
        sizes[axis] = int(part[len(axis) :])
    return sizes


def engine_sizes(text: str) -> tuple[int, int]:
    """Tensor-parallel size of an engine and number of engines: ``tp16x64``, or ``tp16`` for one.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    found = re.fullmatch(r"tp(\d+)(?:x(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size and a count, like tp16x64")
    return int(found[1]), int(found[2] or 1)

"""The console: a line per step, and the live bar on a terminal."""

from __future__ import annotations

import io

from rich.console import Console as RichConsole

from megappo.metrics.console import Console
from megappo.records import StepMetrics

STEP = {
    "train/reward": 0.51234,
    "train/kl": 0.0031,
    "train/response_length": 34.25,
    "train/unknown": 1.0,
    "timing/generation": 2.14,
    "timing/make_experience": 1.0,
    "timing/step_total": 4.0,
    "timing/tokens_per_second": 900.0,
}


def test_lines_in_a_log_file() -> None:
    """Without a terminal there is one plain line per step, however long."""
    out = io.StringIO()
    console = Console(20, console=RichConsole(file=out, width=40))
    console.show_phase("generation")
    console.log(StepMetrics(0, {"eval/reward_mean": 0.25}))
    console.log(StepMetrics(1, STEP))
    console.log(StepMetrics(2, {**STEP, "timing/step_total": 2.0}))
    console.close()
    assert out.getvalue().splitlines()[:3] == [
        "step 0/20 | eval reward 0.25",
        "step 1/20 | reward 0.5123 | kl 0.0031 | length 34.25 | "
        "generation 2.1 s, make experience 1.0 s | left 0:01:16",
        "step 2/20 | reward 0.5123 | kl 0.0031 | length 34.25 | "
        "generation 2.1 s, make experience 1.0 s | left 0:00:54",
    ]
    assert not out.getvalue().splitlines()[3:] or not "".join(out.getvalue().splitlines()[3:])


def test_live_bar_on_a_terminal() -> None:
    """On a terminal the bar shows position, phase and time left, and goes away at the end."""
    out = io.StringIO()
    console = Console(
        20, first_step=4, console=RichConsole(file=out, width=120, force_terminal=True)
    )
    console.show_phase("make_experience")
    console.log(StepMetrics(5, STEP))
    console.close()
    text = out.getvalue()
    assert "step 5/20 | reward 0.5123" in text
    assert "5/20" in text and "make experience" in text and "left 0:01:00" in text


def test_markup_in_values_is_not_interpreted() -> None:
    """Lines are written as they are."""
    out = io.StringIO()
    console = Console(1, console=RichConsole(file=out))
    console.log(StepMetrics(1, {"train/kl": float("nan"), "timing/[red]x": 1.0}))
    console.close()
    assert out.getvalue().startswith("step 1/1 | kl nan | [red]x 1.0 s | left ?")

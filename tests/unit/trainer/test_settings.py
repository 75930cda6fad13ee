"""What the configuration makes of the parts of a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.config import load
from megappo.config.schema import VLLMConfig
from megappo.trainer.settings import host_settings
from tests.e2e.runs import flags, make_inputs


@pytest.mark.parametrize("asked", [False, True])
def test_checksums_are_compared_where_the_key_says_so(tmp_path: Path, asked: bool) -> None:
    """C14: ``vllm.verify_weights`` reaches the ranks; it is off unless asked for."""
    config = make_inputs(tmp_path)
    keys = {"vllm.verify_weights": asked, "output_dir": tmp_path / "out"}
    args = load(["--config", str(config), *flags(keys)])
    assert host_settings(args).verify_weights is asked
    assert not VLLMConfig().verify_weights

"""What an engine may not leave behind in the process that it shares with the trainer."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from megappo.rollout.process import launched_as, unchanged_random_state


def test_launched_as_sets_the_launcher_and_takes_back_vllms_leaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RANK and WORLD_SIZE are set; LD_PRELOAD and LOCAL_WORLD_SIZE are as before."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with launched_as(2, 4):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "4")
        os.environ.update(LD_PRELOAD="libtcmalloc.so", LOCAL_WORLD_SIZE="1")
    assert "LD_PRELOAD" not in os.environ
    assert os.environ["LOCAL_WORLD_SIZE"] == "4"


def test_random_generators_are_left_as_they_were() -> None:
    """Seeding and drawing inside changes nothing outside, also when it raises."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = (torch.rand(1).item(), random.random(), np.random.random())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with pytest.raises(KeyError), unchanged_random_state():
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        torch.rand(3)
        raise KeyError
    assert (torch.rand(1).item(), random.random(), np.random.random()) == expected

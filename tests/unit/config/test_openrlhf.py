"""The tables of OpenRLHF's keys are at one with the schema."""

from __future__ import annotations

from megappo.config.keys import groups, keys
from megappo.config.openrlhf import RENAMED, WITHOUT, unknown_key


def test_renamed_keys_lead_to_keys_that_exist() -> None:
    """A hint that names a key must name a real one."""
    assert {key for key, _ in RENAMED.values()} <= set(keys())


def test_a_key_is_in_one_place_only() -> None:
    """A key of ours is neither renamed nor missing, and no key is both."""
    ours = {*keys(), *groups()}
    assert set(RENAMED).isdisjoint(WITHOUT)
    assert ours.isdisjoint(RENAMED)
    assert ours.isdisjoint(WITHOUT)


def test_hints() -> None:
    """Every entry gives its own hint; other keys give the nearest key, or none."""
    for name, (key, _) in RENAMED.items():
        assert f"it is {key} here" in unknown_key(name)
    for name, reason in WITHOUT.items():
        assert reason in unknown_key(name)
    assert unknown_key("megatron.tensor_parallel_size").endswith(
        "did you mean megatron.tensor_model_parallel_size?"
    )
    assert "did you mean" not in unknown_key("zzzz")

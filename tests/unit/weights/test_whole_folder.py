"""A folder that appears whole or not at all, whoever else writes or has written it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.weights.whole_folder import WholeFolder


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """The second is refused and spoils nothing; after the first, others may write."""
    first = WholeFolder(tmp_path / "out")
    (first.path / "a").write_text("1")
    with pytest.raises(ValueError, match="another process is writing .*out"):
        WholeFolder(tmp_path / "out")
    first.commit()
    assert (tmp_path / "out" / "a").read_text() == "1"
    second = WholeFolder(tmp_path / "out")
    first.discard()  # long committed: not its business
    assert second.path.exists()
    second.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_link_goes_on_pointing(tmp_path: Path) -> None:
    """What it points to is replaced, on that disk, and again the next time."""
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    for text in ("1", "2"):
        folder = WholeFolder(tmp_path / "link")
        assert folder.path.parent == tmp_path / "disk"
        (folder.path / "a").write_text(text)
        folder.commit()
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "link" / "a").read_text() == text

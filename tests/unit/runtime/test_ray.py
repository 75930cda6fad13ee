"""What the Ray runtime says of a cluster that it cannot reach; no cluster is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.mesh.settings import MeshSettings
from megappo.rollout.engine import EngineSettings
from megappo.runtime.host import HostSettings
from megappo.runtime.ray import RayRuntime, RaySettings
from megappo.topology import Topology


@pytest.mark.parametrize(
    "address",
    ["somewhere", "two words", "127.0.0.1:port", "127.0.0.1:9", "no-such-host.invalid:6379"],
)
def test_an_address_that_is_none(tmp_path: Path, address: str) -> None:
    """The key is named, and nothing is left to shut down."""
    host = HostSettings(Topology(1), MeshSettings(), (), EngineSettings("nowhere"), on_gpu=False)
    runtime = RayRuntime(host, RaySettings(address, 0.25, 1.0, 1.0), tmp_path / "logs")
    with pytest.raises(ValueError, match=rf"^ray_address = {address}: no Ray cluster answers"):
        runtime.start()
    runtime.shutdown()
    assert not (tmp_path / "logs").exists()

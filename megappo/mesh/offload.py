"""Puts tensors into host memory and back, bit for bit, between a role's phases.

A storage that has left takes no memory on the device; every view of it (Megatron's buffers
and the parameters in them) is whole again when it has come back. Knows no phases: ``rank``
says when. On CUDA host memory is pinned; that has not been run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


class Offload:
    """The storages of some tensors, on their device or in host memory.

    Args:
        tensors: names them anew each time, since an optimizer may replace its state.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """All are on the device."""
        self._tensors = tensors
        self._hosts: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def leave(self) -> None:
        """Move everything to host memory and free the device's; nothing if it is there already."""
        if self._away:
            return
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors()}
        self._hosts = {key: host for key, host in self._hosts.items() if key in storages}
        for key, storage in storages.items():
            host = self._hosts.get(key)
            if host is None or len(host) != storage.nbytes():
                pinned = storage.device.type == "cuda"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                self._hosts[key] = host
            host.copy_(_bytes(storage))
            storage.resize_(0)
            self._away.append((storage, host))

    def come_back(self) -> None:
        """Move everything to the device; nothing if it is there."""
        for storage, host in self._away:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
        self._away.clear()


class Swap:
    """Weights in host memory that take the place of a role's own ones for a while.

    Args:
        tensors: the role's parameters; what they hold now is what is kept.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the weights to host memory."""
        self._kept = {name: _to_host(tensor) for name, tensor in tensors.items()}

    @contextlib.contextmanager
    def in_place_of(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The kept weights in ``tensors``, which hold their own again afterwards, bit for bit."""
        own = {name: _to_host(tensor) for name, tensor in tensors.items()}
        try:
            _fill(tensors, self._kept)
            yield
        finally:
            _fill(tensors, own)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)


def _fill(tensors: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(source[name])


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

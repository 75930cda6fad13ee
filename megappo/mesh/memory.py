"""What a role's tensors take on this rank, told apart by what they are for.

Counts storages, each once: parameters may be views of a buffer that Megatron makes, and main
parameters of fp32 training are the parameters themselves. Activations are not counted; they
come and go. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megappo.mesh.role import Role
from megappo.records import RoleMemory


def role_memory(role: Role) -> RoleMemory:
    """Bytes of this role on this rank."""
    seen: set[int] = set()
    return RoleMemory(
        role=role.settings.name,
        parameters=_new_bytes(_parameters(role), seen),
        gradients=_new_bytes(_gradients(role), seen),
        main_parameters=_new_bytes(_main_parameters(role), seen),
        optimizer_state=_new_bytes(_optimizer_state(role), seen),
    )


def role_tensors(role: Role) -> Iterator[torch.Tensor]:
    """Every tensor that the role keeps between phases; some are views of others."""
    yield from _parameters(role)
    yield from _gradients(role)
    yield from _main_parameters(role)
    yield from _optimizer_state(role)


def _new_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not in ``seen``, which they are added to."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _parameters(role: Role) -> Iterator[torch.Tensor]:
    for module in role.modules:
        yield from module.parameters()
        yield from module.buffers()


def _gradients(role: Role) -> Iterator[torch.Tensor]:
    if role.optimizer is None:
        return
    for chunk in role.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _main_parameters(role: Role) -> Iterator[torch.Tensor]:
    for part in _optimizers(role):
        for group in part.param_groups:
            yield from group["params"]


def _optimizer_state(role: Role) -> Iterator[torch.Tensor]:
    for part in _optimizers(role):
        for state in part.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _optimizers(role: Role) -> Iterator[torch.optim.Optimizer]:
    """Torch's optimizers inside Megatron's."""
    if role.optimizer is not None:
        yield from (part.optimizer for part in role.optimizer.chained_optimizers)

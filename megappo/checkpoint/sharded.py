"""One rank's share of a checkpoint: model, optimizer, schedule and random state.

Model and optimizer go through Megatron-Core's distributed checkpointing, so that they load
at other parallel sizes and by Megatron-Core alone. This module knows neither roles nor
steps; ``store.py`` makes its folder a checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megappo.checkpoint.metadata import check_pickles

OPTIMIZER = "optimizer"
SCHEDULE = "schedule"


def save_strategy(writer: FileSystemWriter, new_planner: Callable[[], MCoreSavePlanner]) -> Any:
    """Megatron-Core's ``torch_dist`` format, written by the calling process.

    The library's own synchronous save forks writer processes and spawns a manager, which is
    unsafe next to Ray's and gloo's threads; this writes the same files with torch's writer.
    """
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    strategy.save = functools.partial(_write_shards, strategy, writer, new_planner)
    return strategy


def _write_shards(
    strategy: Any,
    writer: FileSystemWriter,
    new_planner: Callable[[], MCoreSavePlanner],
    sharded_state_dict: Any,
    checkpoint_dir: Any,
) -> None:
    """Write this rank's shards and, on rank 0, the metadata. Collective."""
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, strategy.keep_only_main_replica
    )
    save(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=new_planner())


def _planner() -> MCoreSavePlanner:
    return MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


def save_role(
    folder: Path, modules: Sequence[Any], optimizer: Any | None, scheduler: Any | None
) -> None:
    """Write a role into ``folder``, made here. Every rank of the mesh calls it.

    Args:
        folder: must not hold anything yet.
        modules: this rank's model chunks, without their data-parallel wrapper.
        optimizer: Megatron optimizer, or None to save the model alone.
        scheduler: Megatron ``OptimizerParamScheduler``, or None.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    state = sharded_state(modules, optimizer, is_loading=False)
    if scheduler is not None:
        state[SCHEDULE] = scheduler.state_dict()
    strategy = save_strategy(FileSystemWriter(str(folder), sync_files=True), _planner)
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)


def load_role(
    folder: Path, modules: Sequence[Any], optimizer: Any | None, scheduler: Any | None
) -> None:
    """Restore what ``save_role`` wrote, at this mesh's parallel sizes, whatever they were then.

    Raises:
        ValueError: the folder is missing, or lacks the optimizer state that is asked for.
    """
    check_pickles(folder)
    common = dist_checkpointing.load_common_state_dict(str(folder))
    if scheduler is not None and SCHEDULE not in common:
        raise ValueError(f"{folder} holds no optimizer state to resume from")
    state = sharded_state(modules, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(state, str(folder))
    for index, module in enumerate(modules):
        module.load_state_dict(loaded[f"model{index}"])
    if optimizer is not None:
        optimizer.load_state_dict(loaded[OPTIMIZER])
    if scheduler is not None:
        scheduler.num_steps = 0  # Megatron adds the steps that it loads to those done
        scheduler.load_state_dict(loaded[SCHEDULE])


def save_random_state(folder: Path) -> None:
    """Write this rank's random state to ``folder/rank_N.pt``; ``folder`` must exist."""
    state = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    torch.save(state, folder / f"rank_{dist.get_rank()}.pt")


def load_random_state(folder: Path) -> bool:
    """Restore this rank's random state; False when the checkpoint had another number of ranks."""
    saved = sorted(folder.glob("rank_*.pt"))
    if len(saved) != dist.get_world_size():
        return False
    state = torch.load(folder / f"rank_{dist.get_rank()}.pt", weights_only=True)
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return True


def sharded_state(
    modules: Sequence[Any], optimizer: Any | None, *, is_loading: bool
) -> dict[str, Any]:
    """Model chunks and optimizer as Megatron-Core's checkpoints want them."""
    metadata = {
        # the one sharding type of the optimizer that loads at other parallel sizes here
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        f"model{index}": module.sharded_state_dict(metadata=metadata)
        for index, module in enumerate(modules)
    }
    if optimizer is not None:
        state[OPTIMIZER] = optimizer.sharded_state_dict(
            state if len(modules) > 1 else state["model0"], is_loading=is_loading, metadata=metadata
        )
    return state


def leaves(state: Any) -> list[Any]:
    """What nested dictionaries and lists hold, in order."""
    if isinstance(state, dict):
        return [leaf for item in state.values() for leaf in leaves(item)]
    if isinstance(state, list):
        return [leaf for item in state for leaf in leaves(item)]
    return [state]

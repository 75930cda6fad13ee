"""What vLLM wants of the process it runs in, and what it must leave alone.

Importing vLLM costs about 12 s of CPU, so it happens once, in ``import_vllm``: a parent that
forks ranks calls it before it forks. Everything else here keeps an engine from disturbing the
trainer that shares its process: environment variables that vLLM sets for its own children,
and the state of the random generators. It knows no engine and no weights.
"""

from __future__ import annotations

import importlib
import os
import random
import secrets
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

_REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this very process
    "VLLM_NO_USAGE_STATS": "1",
}
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_MODULES = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.llama",  # with it, the class of another family costs nothing
)
# Set by vLLM's CPU platform for processes that it would start; Megatron and subprocesses of
# the trainer must not see them.
_VLLM_LEAKS = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")

SHARED_MEMORY = Path("/dev/shm")


def import_vllm() -> None:
    """Set the variables that vLLM reads when it is imported, and import what an engine uses."""
    os.environ.update(_REQUIRED)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Without it the first log-probabilities cost 3 to 20 s of compilation.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the explicit size
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    for module in _MODULES:
        importlib.import_module(module)


def register_architectures(names: Iterable[str]) -> None:
    """Import vLLM's classes of these architectures, those that it has, in this process.

    Otherwise vLLM starts a process that imports all of vLLM again, on every rank, to look at
    the class (the first time on a machine).
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name in names:
        if name in ModelRegistry.models:
            model_class = ModelRegistry.models[name].load_model_cls()
            ModelRegistry.register_model(name, model_class)


@contextmanager
def launched_as(rank: int, world_size: int) -> Iterator[None]:
    """The environment that vLLM's external launcher reads, for the time an engine starts."""
    local_rank = torch.cuda.current_device() if torch.cuda.is_available() else rank
    launcher = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
    before = {name: os.environ.get(name) for name in (*_VLLM_LEAKS, *launcher)}
    os.environ.update(launcher)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """Give the shared memory of a CPU engine's ranks a name of its own, for the time it starts.

    Engines under the external launcher all have the same name for it: a second run on the
    machine, or what a killed one left, would stop an engine from starting, or would be mixed
    into its sums. The name is taken away once all ranks have the memory, so that it is gone
    with them. Collective over the default process group.
    """
    if torch.cuda.is_available():
        yield
        return
    from vllm.distributed.device_communicators import cpu_communicator

    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token)
    mine = f"megappo-{token[0]}-{socket.gethostname()}"  # other hosts: vLLM does without it
    shared = cpu_communicator._CPUSHMDistributed
    name_as_it_was = shared.make_group_name
    made: set[Path] = set()

    def make_group_name(communicator: cpu_communicator.CpuCommunicator) -> str:
        name = f"{mine}{name_as_it_was(communicator).replace('/', '')}"
        made.update(SHARED_MEMORY / f"{name}_{rank}" for rank in range(communicator.world_size))
        return name

    naming = "make_group_name"
    setattr(shared, naming, staticmethod(make_group_name))
    try:
        yield
    finally:
        setattr(shared, naming, staticmethod(name_as_it_was))
        for path in made:
            path.unlink(missing_ok=True)


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Leave the process's random generators as they were: vLLM seeds and draws from them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)

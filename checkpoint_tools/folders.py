"""Says what a path is: which kind of checkpoint, and which command takes it.

Looks at names only; opens nothing but the files that name the latest checkpoint. The commands
ask here for the folder that they work on, so that a wrong one is a line that says what was
found, what was expected, and what to pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megappo.checkpoint.metadata import BACKEND, METADATA, is_distributed_checkpoint
from megappo.checkpoint.run_state import RUN_STATE
from megappo.checkpoint.store import CheckpointStore
from megappo.weights.hf_files import INDEX, SINGLE, listing

Kind = Literal[
    "hf",
    "hf_config_only",
    "hf_pickled",
    "hf_adapter",
    "hf_cache",
    "safetensors_file",
    "megatron",
    "megatron_broken",
    "megatron_parent",
    "megatron_legacy",
    "torch_dcp",
    "deepspeed",
    "step",
    "run",
    "empty",
    "missing",
    "file",
    "unknown",
]
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MEANING: dict[Kind, str] = {
    "hf": "a Hugging Face folder",
    "hf_config_only": "a Hugging Face folder without weights",
    "hf_pickled": "a Hugging Face folder with pickled weights, which megappo does not load",
    "hf_adapter": "an adapter (LoRA or the like) without the model that it belongs to",
    "hf_cache": "a model in the Hugging Face hub's cache",
    "safetensors_file": "a safetensors file",
    "megatron": "a Megatron-Core distributed checkpoint",
    "megatron_broken": "a Megatron-Core distributed checkpoint that is not whole",
    "megatron_parent": "a folder of Megatron-LM checkpoints",
    "megatron_legacy": "a Megatron-LM checkpoint of the old per-rank format",
    "torch_dcp": "a checkpoint of torch.distributed.checkpoint, not of Megatron-Core",
    "deepspeed": "a DeepSpeed checkpoint",
    "step": "a training checkpoint of megappo",
    "run": "a training run's folder of megappo",
    "empty": "an empty folder",
    "missing": "nothing: the path does not exist",
    "file": "a file of a kind that megappo does not know",
    "unknown": "a folder of a kind that megappo does not know",
}


@dataclass(frozen=True)
class Found:
    """What a path is.

    Attributes:
        path: as given.
        kind: what it is.
        inner: folders inside it that are checkpoints themselves, best first: roles of a step,
            steps of a run.
    """

    path: Path
    kind: Kind
    inner: tuple[Path, ...] = ()

    @property
    def hint(self) -> str:
        """What to do with it, as the end of a sentence; empty where there is nothing to say."""
        first = self.inner[0] if self.inner else None
        match self.kind:
            case "hf":
                return "checkpoint_tools.hf_to_megatron --hf takes it, and so does training"
            case "megatron":
                return "checkpoint_tools.megatron_to_hf --megatron takes it"
            case "safetensors_file":
                return f"pass its folder: {self.path.parent}"
            case "hf_pickled":
                return "save the model with safe_serialization=True"
            case "hf_config_only":
                return f"it lacks {SINGLE} or {INDEX}"
            case "megatron_broken":
                return f"it lacks {METADATA} or {BACKEND}: its writer did not finish"
            case "hf_adapter":
                return "merge it into its model with peft: merge_and_unload(), save_pretrained()"
            case "torch_dcp":
                return "save the model with transformers' save_pretrained() from where it came"
            case "megatron_legacy":
                return "convert it with Megatron-LM: --ckpt-convert-format torch_dist"
            case "deepspeed":
                return "export it with DeepSpeed's zero_to_fp32.py --safe_serialization"
            case "step" | "run" | "megatron_parent" | "hf_cache" | "unknown" if first is not None:
                return f"pass {' or '.join(str(p) for p in self.inner[:3])}"
            case "run":
                return "it holds no checkpoint yet"
        return f"it holds {_contents(self.path)}" if self.kind == "unknown" else ""

    def __str__(self) -> str:
        return f"{self.path} is {MEANING[self.kind]}" + (f"; {self.hint}" if self.hint else "")


def identify(path: str | Path) -> Found:
    """What a path is."""
    path = Path(path)
    if not path.exists():
        return Found(path, "missing")
    if path.is_file():
        return Found(path, "safetensors_file" if path.suffix == ".safetensors" else "file")
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return Found(path, "empty")
    if is_distributed_checkpoint(path):
        return Found(path, "megatron")
    if (path / RUN_STATE).is_file():
        return Found(path, "step", _roles(path))
    if METADATA in names and "common.pt" not in names and BACKEND not in names:
        return Found(path, "torch_dcp")
    if METADATA in names or any(name.endswith(".distcp") for name in names):
        return Found(path, "megatron_broken")
    if "config.json" in names:
        return Found(path, _hf_kind(names))
    if "adapter_config.json" in names:
        return Found(path, "hf_adapter")
    if {"refs", "snapshots"} <= names:
        return Found(path, "hf_cache", tuple(sorted((path / "snapshots").iterdir())))
    if TRACKER in names:
        return Found(path, "megatron_parent", _iterations(path))
    if "zero_to_fp32.py" in names or any(n.endswith("_model_states.pt") for n in names):
        return Found(path, "deepspeed")
    if any(name.startswith("mp_rank_") for name in names):
        return Found(path, "megatron_legacy")
    return _run_or_unknown(path, names)


def hf_folder(path: str | Path) -> Path:
    """The Hugging Face folder that a path means: itself, or of the ``model.safetensors`` in it.

    Raises:
        ValueError: it is something else.
    """
    found = identify(path)
    if found.kind == "safetensors_file" and found.path.name == SINGLE:
        found = identify(found.path.parent)
    if found.kind != "hf":
        raise ValueError(
            f"{found}; expected a Hugging Face folder with config.json and {SINGLE} or {INDEX}"
        )
    return found.path


def hf_folder_or_config(path: str | Path) -> Path:
    """A folder that has at least a ``config.json``.

    Raises:
        ValueError: it is something else.
    """
    found = identify(path)
    if found.kind not in ("hf", "hf_config_only", "hf_pickled"):
        raise ValueError(f"--hf: {found}; expected a Hugging Face folder with config.json")
    return found.path


def megatron_folder(path: str | Path, role: str | None = None) -> Path:
    """The distributed checkpoint that a path means: itself, or the role's in a training run.

    Args:
        path: of a distributed checkpoint, a training checkpoint, or a training run (its latest
            checkpoint).
        role: which model of a training checkpoint; needed where there are several.

    Raises:
        ValueError: it is something else, or the role is not there or not given.
    """
    found = identify(path)
    if found.kind in ("run", "megatron_parent") and found.inner:
        found = identify(found.inner[0])
    if found.kind == "step":
        roles = [folder for folder in found.inner if role in (None, folder.name)]
        names = ", ".join(folder.name for folder in found.inner) or "none"
        if len(roles) == 1:
            found = identify(roles[0])
        elif roles:
            raise ValueError(
                f"{found.path} is a training checkpoint with several models ({names}); expected "
                f"one: give --role {found.inner[0].name} or pass {found.inner[0]}"
            )
        else:
            raise ValueError(
                f"{found.path} is a training checkpoint without {role or 'a model'}; "
                f"its models: {names}"
            )
    elif role is not None:
        raise ValueError(f"--role {role} is for training checkpoints; {found}")
    if found.kind != "megatron":
        raise ValueError(f"{found}; expected {MEANING['megatron']} ({METADATA}, {BACKEND})")
    return found.path


def _roles(step: Path) -> tuple[Path, ...]:
    """The models of a training checkpoint, the actor first."""
    folders = [entry for entry in step.iterdir() if is_distributed_checkpoint(entry)]
    return tuple(sorted(folders))


def _iterations(parent: Path) -> tuple[Path, ...]:
    """The checkpoints in a folder of Megatron-LM, first the one that its tracker names."""
    steps = sorted((p for p in parent.glob("iter_*") if p.is_dir()), reverse=True)
    latest = (parent / TRACKER).read_text().strip()
    named = f"iter_{int(latest):07d}" if latest.isdecimal() else latest
    return tuple(sorted(steps, key=lambda step: step.name != named))


def _hf_kind(names: set[str]) -> Kind:
    if {SINGLE, INDEX} & names:
        return "hf"
    return "hf_pickled" if any(n.endswith(PICKLES) for n in names) else "hf_config_only"


def _run_or_unknown(path: Path, names: set[str]) -> Found:
    for root in (path, path / "checkpoints"):
        store = CheckpointStore(root, max_num=1)
        latest = store.latest()
        if latest is not None:
            older = [root / f"step_{n}" for n in reversed(store.steps())]
            return Found(path, "run", (latest, *(p for p in older if p != latest)))
    if {"logs", "samples"} <= names or "checkpoints" in names:
        return Found(path, "run")
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    inner = [p for p in folders if (p / "config.json").is_file() or is_distributed_checkpoint(p)]
    return Found(path, "unknown", tuple(inner))


def _contents(path: Path) -> str:
    return listing((entry.name for entry in path.iterdir()), 5)

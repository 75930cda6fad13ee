"""Settings every test needs: one thread per process, quiet vendors, no network.

megappo comes before any ``megatron`` that a test imports: it registers the import hook.
"""

from __future__ import annotations

import os

from hypothesis import settings

from megappo.device.import_hook import install_megatron_shim

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

install_megatron_shim()

# A busy machine makes any example slow once in a while; CI must not find news by chance, so
# the examples are the same in each run. HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("megappo", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "megappo"))

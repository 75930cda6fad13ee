"""PPO-RLHF for very large language models on a Megatron 3D mesh.

Importing this package imports no torch. It registers the import hook that makes
Megatron-Core run on a machine without CUDA, so that no import order is a trap: a Megatron
that was imported before is refused.
"""

from megappo.device.import_hook import install_megatron_shim

__version__ = "0.1.0"

install_megatron_shim()

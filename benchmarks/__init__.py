"""Benchmarks: one command each for the figures of docs/performance.md and docs/precision.md.

megappo comes before any ``megatron`` that a benchmark imports: it registers the import hook.
"""

from megappo.device.import_hook import install_megatron_shim

install_megatron_shim()

"""The platform: CUDA and NCCL, or CPU and gloo with the shim that lets Megatron-Core run there.

This package init imports no torch, since ``megappo/__init__`` comes through it.
"""

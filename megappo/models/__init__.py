"""Megatron models from Hugging Face shapes: configuration, layers, heads, packed forward."""

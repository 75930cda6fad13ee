"""The inference engine: its protocol, vLLM behind it, and new weights written straight into it."""

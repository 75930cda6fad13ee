"""Command-line tools that convert, inspect and verify checkpoints."""

"""The prompts: reading, order, and how their samples are packed into batches."""

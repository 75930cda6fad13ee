"""Unit tests of megappo.metrics."""

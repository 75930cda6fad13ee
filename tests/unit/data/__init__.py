"""Unit tests of megappo.data."""

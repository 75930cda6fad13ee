"""Runtimes: start the mesh ranks of a run, carry calls to them, notice when one dies."""

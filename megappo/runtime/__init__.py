"""Runtimes: start the processes of a run, carry calls to them, notice when one dies."""

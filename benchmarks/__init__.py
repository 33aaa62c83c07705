"""Benchmarks of the repository: the engine, the tuning, and other trainers in turns with ours.

They are run from the repository's root (`python -m benchmarks.engine`, `.peers`, `.tuning`) and
are no part of the installed package.
"""

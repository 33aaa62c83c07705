"""Measures this machine and writes it down as a hardware file."""

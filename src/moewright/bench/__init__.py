"""Benchmarks that the product uses: they measure a machine for its hardware file, and the search."""

"""Measurements behind the product: a machine for its hardware file, and the search's speed."""

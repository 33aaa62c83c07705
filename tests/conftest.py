"""Lies here so that pytest puts this folder on the path: tests of several floors share its sample modules."""

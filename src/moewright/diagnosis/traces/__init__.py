"""Traces of other tools and other trainers, read into one form and taken apart."""

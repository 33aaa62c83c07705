"""Traces and logs of other tools and trainers, read into one form and broken down."""

"""What pages show: records that pure functions make of plans, searches and runs, and the pages.

The studio, `--html` and notebooks show the same records. Nothing of this floor imports torch or a
web server.
"""

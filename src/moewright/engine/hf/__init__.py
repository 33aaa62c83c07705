"""Hugging Face checkpoints: reading, importing and exporting them."""

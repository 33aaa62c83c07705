"""Plans in the words of other trainers and of schedulers."""

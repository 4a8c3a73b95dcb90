"""Checkpoints: write them, read them, load a trained network."""

"""Readers of datasets, one file per format."""

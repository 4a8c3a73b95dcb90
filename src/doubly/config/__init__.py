"""What a run is: the tree of settings, its JSON form, and code named by the user."""

from doubly.config.run import SGD, Data, Run, Validation

__all__ = ["SGD", "Data", "Run", "Validation"]

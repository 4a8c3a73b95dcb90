"""Evaluation of a trained network: accuracy per class under attacks, with intervals and checks of the numbers.

One evaluation goes one way: `api` reads the arguments, `pipeline` runs the steps, `predict` and `autoattack` attack the
images, `result` holds the predictions, from which `summary` derives every number, and `io` writes the files.
"""

"""Studies: which runs, and the page made of them."""

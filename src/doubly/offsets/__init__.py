"""Class offsets of a finished network: fit them on held-out images, fold them into its head, and draw its frontier."""

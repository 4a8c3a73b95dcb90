"""Files of published datasets: which there are, fetching and unpacking them, and finding them on disk."""

"""The study of weak classes: every method at its best, as trained and with class offsets, under a strong attack."""

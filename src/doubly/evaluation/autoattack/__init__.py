"""AutoAttack, resumable and in chunks."""

"""Other people's libraries; each is imported when it is asked for."""

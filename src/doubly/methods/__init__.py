"""Methods are values, one formula and one page each. `METHODS` lists them; a difference in numbers is a recipe."""

from doubly.methods.at import AT
from doubly.methods.done import DONE
from doubly.methods.standard import Standard

METHODS: dict[str, type] = {"standard": Standard, "at": AT, "done": DONE}

__all__ = ["AT", "DONE", "METHODS", "Standard"]

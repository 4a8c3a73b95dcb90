"""Training methods, one formula and one file each. `METHODS` lists them; a difference in numbers is a recipe."""

from doubly.methods.at import AT
from doubly.methods.awp import AWP
from doubly.methods.cfol import CFOL
from doubly.methods.done import DONE
from doubly.methods.done_class import DONEClass
from doubly.methods.fast_at_ga import FastATGA
from doubly.methods.fast_bat import FastBAT
from doubly.methods.fat import FAT
from doubly.methods.frl import FRL
from doubly.methods.gairat import GAIRAT
from doubly.methods.mail import MAIL
from doubly.methods.mart import MART
from doubly.methods.method import Method
from doubly.methods.standard import Standard
from doubly.methods.trades import TRADES
from doubly.methods.wat import WAT
from doubly.methods.wmmr import WMMR

METHODS: dict[str, type[Method]] = {
    "standard": Standard,
    "at": AT,
    "done": DONE,
    "fast_at_ga": FastATGA,
    "fast_bat": FastBAT,
    "fat": FAT,
    "gairat": GAIRAT,
    "wmmr": WMMR,
    "mail": MAIL,
    "mart": MART,
    "trades": TRADES,
    "awp": AWP,
    "cfol": CFOL,
    "frl": FRL,
    "wat": WAT,
    "done_class": DONEClass,
}

__all__ = [
    "AT",
    "AWP",
    "CFOL",
    "DONE",
    "FAT",
    "FRL",
    "GAIRAT",
    "MAIL",
    "MART",
    "METHODS",
    "TRADES",
    "WAT",
    "WMMR",
    "DONEClass",
    "FastATGA",
    "FastBAT",
    "Method",
    "Standard",
]

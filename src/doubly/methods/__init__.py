"""Training methods, one formula and one file each. `METHODS` lists them; a difference in numbers is a recipe."""

from doubly.methods.at import AT
from doubly.methods.at_bsl import ATBSL
from doubly.methods.awp import AWP
from doubly.methods.cfa import CFA
from doubly.methods.cfol import CFOL
from doubly.methods.dafa import DAFA
from doubly.methods.done import DONE
from doubly.methods.done_class import DONEClass
from doubly.methods.faal import FAAL
from doubly.methods.fast_at_ga import FastATGA
from doubly.methods.fast_bat import FastBAT
from doubly.methods.fat import FAT
from doubly.methods.frl import FRL
from doubly.methods.gairat import GAIRAT
from doubly.methods.group_dro import GroupDRO
from doubly.methods.mail import MAIL
from doubly.methods.mart import MART
from doubly.methods.method import Method
from doubly.methods.robust_lt import RobustLT
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
    "at_bsl": ATBSL,
    "dafa": DAFA,
    "cfa": CFA,
    "faal": FAAL,
    "robust_lt": RobustLT,
    "group_dro": GroupDRO,
    "wat": WAT,
    "done_class": DONEClass,
}

__all__ = [
    "AT",
    "ATBSL",
    "AWP",
    "CFA",
    "CFOL",
    "DAFA",
    "DONE",
    "FAAL",
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
    "GroupDRO",
    "Method",
    "RobustLT",
    "Standard",
]

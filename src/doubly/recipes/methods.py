"""All methods with the settings for one threat, from which the recipes of a dataset are made."""

from dataclasses import replace

from doubly.attacks import FGSM, NFGSM, PGD
from doubly.bilevel import AdamStep, BarrierStep, FirstThen, GradientStep, SignStep, StepRule
from doubly.config.run import Sampling
from doubly.config.serialize import suggestion
from doubly.errors import UsageError
from doubly.methods import (
    AT,
    ATBSL,
    AWP,
    CFA,
    CFOL,
    DAFA,
    DONE,
    FAAL,
    FAT,
    FRL,
    GAIRAT,
    MAIL,
    MART,
    TRADES,
    WAT,
    WMMR,
    DONEClass,
    FastATGA,
    FastBAT,
    GroupDRO,
    Method,
    RobustLT,
    Standard,
)
from doubly.schedules import Piecewise
from doubly.threat import LinfBall, Threat

FAST = ("fast_at", "fast_at_ga", "fast_bat", "n_fgsm", "done_fast")
FAST_EPOCHS = 25  # the paper's fast setting
# Labels in tables, where capitals of the name would not give them.
LABELS = {
    "standard": "Standard",
    "fast_at": "Fast-AT",
    "fast_at_ga": "Fast-AT-GA",
    "fast_bat": "Fast-BAT",
    "robust_lt": "RobustLT",
    "group_dro": "Group-DRO",
}
SAMPLING: dict[str, Sampling] = {"at_balanced_sampling": "balanced"}
HOLDOUT = 0.1  # for methods that learn from held-out images
TABLES = dict.fromkeys(FAST, "fast")  # fewer steps and epochs than the other methods: a table of their own


def methods(
    threat: LinfBall, step: float, steps: int, done: DONE, gradient_step: float, spanning_step: float, cfol_eta: float
) -> dict[str, Method]:
    """Return all methods by name.

    Args:
        threat: What the attacker may do.
        step: Size of a step of the training attack.
        steps: Number of its steps.
        done: DONE with the settings that its variants share.
        gradient_step: Size of a gradient step of DONE-GD.
        spanning_step: Size of a gradient step that crosses the ball at once, for the fast methods.
        cfol_eta: Step size of CFOL's class weights.
    """

    def attack(rule: StepRule | None = None) -> PGD:
        return PGD(threat, steps, rule or SignStep(step))

    def with_done(rule: StepRule) -> DONE:
        return replace(done, attack=attack(rule))

    near = replace(attack(), start="gaussian")  # from noise around the image, as TRADES, MART, MAIL and FRL attack
    # A plain gradient step: most pixels lie on a face after the first step, and there a barrier step hardly moves.
    whole_epochs = Piecewise((10.0, 1.0, 0.1), (17 / 25, 21 / 25))  # 2/3 and 5/6 of 25, rounded up
    quick = FirstThen(SignStep(1.25 * threat.radius), GradientStep(spanning_step))
    return {
        "at": AT(attack()),
        "standard": Standard(),
        "at_balanced_loss": AT(attack(), balance="loss"),
        "at_balanced_sampling": AT(attack()),  # in runs with SAMPLING
        "fat": FAT(attack()),
        "gairat": GAIRAT(attack()),
        "wmmr": WMMR(attack()),
        "mail": MAIL(near, attack_on="cross_entropy"),
        "mail_trades": MAIL(near, "trades", slope=2.0, bias=0.0, attack_on="kl"),
        # Not MAIL-AT's numbers: they give the cross-entropy no weight against the KL, and all predictions become equal.
        "mail_mart": MAIL(near, "mart", slope=5.0, bias=0.05, normalize="batch", attack_on="cross_entropy"),
        "trades": TRADES(near),
        "mart": MART(near),
        "awp": AWP(AT(attack())),
        "awp_done": AWP(with_done(SignStep(step))),
        "cfol": CFOL(attack(), eta=cfol_eta),
        "cfol_reweighting": CFOL(attack(), mode="reweighting", eta=cfol_eta),
        "frl": FRL(near),
        "at_bsl": ATBSL(attack()),
        "dafa": DAFA(near),
        "cfa": CFA(near),
        "faal": FAAL(attack()),
        "robust_lt": RobustLT(AT(attack())),
        "group_dro": GroupDRO(attack()),
        "wat": WAT(near),
        "done_pgd": with_done(SignStep(step)),
        "done_gd": with_done(BarrierStep(gradient_step)),
        "done_adam": with_done(AdamStep(step)),
        "done_chi2": replace(with_done(SignStep(step)), divergence="chi2", mean_weight_limit=None),
        "done_cvar": replace(with_done(SignStep(step)), divergence="cvar", mean_weight_limit=None, cap=2.0),
        "done_class": DONEClass(attack()),
        "fast_at": AT(FGSM(threat, 1.25, "uniform")),
        "fast_at_ga": FastATGA(FGSM(threat, 1.25)),
        "fast_bat": FastBAT(PGD(threat, 1, GradientStep(spanning_step))),
        "n_fgsm": AT(NFGSM(threat)),
        "done_fast": replace(done, attack=PGD(threat, 2, quick), implicit="exact", temperature=whole_epochs),
    }


def holdout_share(method: Method) -> float:
    """Return the share of the training images that a method's recipe holds out: 0 unless it learns from them."""
    return 0.0 if method.validation_interval is None else HOLDOUT


def method_by_name(name: str, threat: Threat, images: int) -> Method:
    """Return a method with the paper's settings, scaled to a threat.

    Args:
        name: Name of the method, as in recipes, such as done_pgd; or of its class, such as done.
        threat: What the attacker may do.
        images: Number of training images.

    Raises:
        UsageError: If there is no such method, or the threat does not fit.
    """
    if not isinstance(threat, LinfBall):
        raise UsageError(
            f"methods by name are for LinfBall, got {type(threat).__name__}: write the method, such as "
            "AT(PGD(L2Ball(0.5)))"
        )
    scale = threat.radius / (8 / 255)
    table = methods(
        threat,
        threat.radius / 4,
        10,
        DONE(mean_weight_limit=10.0),
        gradient_step=1250 / 255 * scale,
        spanning_step=5000 / 255 * scale,
        cfol_eta=0.25 / images,
    )
    table["done"] = table["done_pgd"]
    if name not in table:
        raise UsageError(f"there is no method '{name}'{suggestion(name, table)}")
    return table[name]

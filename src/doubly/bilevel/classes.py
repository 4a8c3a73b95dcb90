"""Distributionally robust means over classes, and over the samples inside each class.

The adversary has two levels: one over the C classes, with temperature R, and one over the samples of a class, with
temperature r. With M_c of the M samples in class c,

    G_c = r log mean_{i in c} exp(l_i / r) ,    F = R log sum_c prior_c exp(G_c / R) .

As a composition: g_i = (M / M_{y_i}) exp(l_i / r) onehot(y_i), of width C, and f(u) = R log sum_c prior_c u_c^(r/R).
"""

from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, explained
from doubly.bilevel.composition import LogMeanExp, State, check_losses, require

BISECTIONS = 64  # halvings of a bracket, which exhaust float64


@explained
def tilted_probabilities(scores: Tensor, prior: Tensor, temperature: float, cap: float | None = None) -> Tensor:
    """Maximize sum_c p_c scores_c - temperature * KL(p || prior) over the distributions p with p_c <= cap / C.

    Without a cap p is proportional to prior * exp(scores / temperature). C counts the classes with a prior above 0.

    Args:
        scores: A score per class, (C,); the largest ones attract p.
        prior: The distribution that p is drawn back to, (C,).
        temperature: Strength of that pull, above 0; infinity gives the prior, cut at the cap.
        cap: Bound of C p_c, at least 1; None for no bound.

    Returns:
        The maximizer p, (C,), in float64.
    """
    possible = prior > 0
    count = int(possible.sum())
    tilted = scores.double()[possible] / temperature + (count * prior.double()[possible]).log()
    tilted = tilted - tilted.max()  # else a low temperature leaves no digits for the sum
    nu = LogMeanExp(cap=cap).batch_value(tilted)
    log_ratios = (tilted - nu).clamp_max(inf if cap is None else log(cap))
    return torch.zeros_like(prior, dtype=torch.float64).masked_scatter(possible, log_ratios.exp() / count)


class ClassEstimates(NamedTuple):
    """What is known of the classes, each (C,).

    Attributes:
        nu: log u_c; with bounds on the weights, what makes their mean 1; -inf for a class without samples.
        risks: G_c; -inf for a class without samples.
    """

    nu: Tensor
    risks: Tensor


@dataclass(frozen=True, eq=False)
class ClassLogMeanExp(Checked):
    """KL-DRO over classes, and over the samples inside each class: F = R log sum_c prior_c exp(G_c / R).

    A sample hands in two numbers, its loss and its class, so that `outer` is (B, 2): the g_i of the formula, with one
    entry per class, would overflow. The cotangent of the loss is the weight of the sample,

        p_c (M / M_c) exp(l_i / r) / u_c ,    p_c proportional to prior_c exp(G_c / R) ,    G_c = r log u_c ,

    and that of the class is 0. u_c is a running mean of exp(l_i / r) over the samples of the class, in log space. A
    batch counts in it by its number of samples of the class, and one without them leaves u_c as it is. A class that no
    batch has had is taken to be as bad as the others together. A change of r starts the estimates anew.

    Args:
        shares: Share M_c / M of each class in the data, (C,).
        class_temperature: R: small values give the worst classes more weight; infinity leaves the prior.
        r: Temperature inside a class; infinity gives all samples of a class the same weight.
        prior: Distribution over the classes, (C,); None makes it uniform over the classes with data.
        eta: Weight of the newest batch, 0 < eta <= 1.
        class_cap: Upper bound of C p_c, where C counts the classes with a prior above 0; None for no bound.
        cap: Upper bound of a sample's weight inside its class, where the mean weight is 1; None for no bound.
        floor: Lower bound of that weight.
        probabilities: The p_c, (C,), if something else than F chooses them: F is then sum_c p_c G_c.

    Raises:
        ValueError: If a number is out of range, or a distribution does not fit the classes.
    """

    shares: Tensor
    class_temperature: float = 1.0
    r: float = inf
    prior: Tensor | None = None
    eta: float = 0.9
    class_cap: float | None = None
    cap: float | None = None
    floor: float = 0.0
    probabilities: Tensor | None = None

    def __post_init__(self) -> None:
        require(self.class_temperature > 0, "class_temperature", self.class_temperature, "class_temperature > 0")
        require(self.r > 0, "r", self.r, "r > 0")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")
        for name, cap in (("class_cap", self.class_cap), ("cap", self.cap)):
            require(cap is None or cap >= 1, name, cap, f"{name} >= 1, or None for no bound")
        require(0 <= self.floor <= 1, "floor", self.floor, "0 <= floor <= 1")
        for name in ("shares", "prior", "probabilities"):
            values = getattr(self, name)
            if values is not None:
                _check_distribution(values, name, self.shares)

    @property
    def _prior(self) -> Tensor:
        """The prior, (C,), in float64."""
        present = (self.shares > 0).double()
        return present / present.sum() if self.prior is None else self.prior.double()

    @property
    def _uniform_inside(self) -> bool:
        """Whether all samples of a class have the same weight."""
        return self.r == inf or self.cap == 1 or self.floor == 1

    @explained
    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Refresh the estimates and return (cotangents, new state); see `Composition.update`.

        Raises:
            ValueError: If a row is not a loss and a class, or `all_previous` is given.
        """
        if all_previous is not None:
            raise ValueError("storm corrects one mean, and ClassLogMeanExp has one per class: leave storm off")
        losses, classes = self._split(values)
        all_losses, all_classes = self._split(all_values)
        estimates = self._batch_estimates(all_losses, all_classes)
        mass, r = self._counts(all_classes) / len(all_classes), torch.tensor(self.r, dtype=torch.float64)
        if state and state["inner_r"] == r:
            newest = self.eta * mass
            mass = newest + (1 - self.eta) * state["mass"].to(mass)
            old = ClassEstimates(state["nu"].to(mass), state["risks"].to(mass))
            estimates = self._average(old, estimates, (newest / mass).nan_to_num(0.0))
        p = self._class_probabilities(estimates.risks)
        weights = (p / self.shares.to(p))[classes] * self._log_inner_weights(losses, classes, estimates.nu).exp()
        new_state = {"mass": mass, "nu": estimates.nu, "risks": estimates.risks, "inner_r": r}
        return torch.stack([weights, torch.zeros_like(weights)], 1).to(values.dtype), new_state

    @explained
    def value(self, values: Tensor) -> Tensor:
        """Return F of these samples, (); over the classes among them."""
        estimates = self._batch_estimates(*self._split(values))
        seen = estimates.nu > -inf
        # Detached: the gradient of a maximum is that at its maximizer, held fixed.
        p, prior = (part[seen] for part in (self._class_probabilities(estimates.risks.detach()), self._prior))
        p, prior = p / p.sum(), prior / prior.sum()
        value = (p * estimates.risks[seen]).sum()
        if self.probabilities is None and self.class_temperature < inf:
            value = value - self.class_temperature * (torch.special.xlogy(p, p) - torch.special.xlogy(p, prior)).sum()
        return value.to(values.dtype)

    def estimate(self, state: State) -> Tensor:
        """Return G, (C,); -inf for a class that no batch has had."""
        return state["risks"]

    def class_probabilities(self, state: State) -> Tensor:
        """Return p, (C,).

        Args:
            state: What `update` returned.
        """
        return self._class_probabilities(state["risks"])

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses in float64 and the classes of the samples, each (B,)."""
        if values.dim() != 2 or values.shape[1] != 2:
            raise ValueError(
                f"outer must hold a loss and a class per sample, (B, 2), for ClassLogMeanExp, got shape "
                f"{tuple(values.shape)}: torch.stack([losses, classes.to(losses)], 1)"
            )
        check_losses(values[:, 0], "ClassLogMeanExp")
        classes = values[:, 1].detach().long()
        if not ((classes >= 0) & (classes < len(self.shares))).all() or not (self.shares[classes] > 0).all():
            raise ValueError("a sample is of a class that shares does not have: give each class its share of the data")
        return values[:, 0].double(), classes

    def _counts(self, classes: Tensor) -> Tensor:
        return torch.bincount(classes, minlength=len(self.shares)).double()

    def _class_means(self, values: Tensor, classes: Tensor) -> Tensor:
        """Return the mean of each class, (C,); 0 for a class without samples."""
        sums = values.new_zeros(len(self.shares)).index_add(0, classes, values)
        return sums / self._counts(classes).clamp_min(1)

    def _batch_estimates(self, losses: Tensor, classes: Tensor) -> ClassEstimates:
        """Return the estimates of one batch; the risks can be differentiated."""
        unseen = self._counts(classes) == 0
        nu = self._batch_nu(losses.detach(), classes).masked_fill(unseen, -inf)
        if self._uniform_inside:
            values = losses
        else:  # the weights are detached: the gradient of a maximum is that at its maximizer, held fixed
            log_weights = self._log_inner_weights(losses.detach(), classes, nu)
            values = log_weights.exp() * (losses - self.r * log_weights)
        return ClassEstimates(nu, self._class_means(values, classes).masked_fill(unseen, -inf))

    def _batch_nu(self, losses: Tensor, classes: Tensor) -> Tensor:
        """Return nu of each class, (C,): log mean exp(l / r), or what makes the mean of the bounded weights 1."""
        if self._uniform_inside:
            return torch.zeros_like(self.shares, dtype=torch.float64, device=losses.device)
        scaled = losses / self.r
        high = scaled.new_zeros(len(self.shares)).scatter_reduce(0, classes, scaled, "amax", include_self=False)
        if self.cap is None and self.floor == 0:
            return high + self._class_means((scaled - high[classes]).exp(), classes).log()
        low = scaled.new_zeros(len(self.shares)).scatter_reduce(0, classes, scaled, "amin", include_self=False)
        for _ in range(BISECTIONS):  # at low all weights are at least 1, at high at most 1
            middle = (low + high) / 2
            too_large = self._class_means(self._log_inner_weights(losses, classes, middle).exp(), classes) > 1
            low, high = torch.where(too_large, middle, low), torch.where(too_large, high, middle)
        return (low + high) / 2

    def _log_inner_weights(self, losses: Tensor, classes: Tensor, nu: Tensor) -> Tensor:
        """Return the logarithms of the weights inside the classes, (B,)."""
        if self._uniform_inside:
            return torch.zeros_like(losses)
        lower, upper = -inf if self.floor == 0 else log(self.floor), inf if self.cap is None else log(self.cap)
        return (losses / self.r - nu[classes]).clamp(lower, upper)

    def _average(self, old: ClassEstimates, new: ClassEstimates, rates: Tensor) -> ClassEstimates:
        """Return (1 - rate) old + rate new of each class: of u_c, and of G_c where it does not follow from u_c."""
        nu = torch.logaddexp(old.nu + (-rates).log1p(), new.nu + rates.log())
        if not self._uniform_inside and self.cap is None and self.floor == 0:
            return ClassEstimates(nu, self.r * nu)
        old_part = torch.where(rates < 1, (1 - rates) * old.risks, 0.0)  # where a class is new, -inf would remain
        return ClassEstimates(nu, old_part + torch.where(rates > 0, rates * new.risks, 0.0))

    def _class_probabilities(self, risks: Tensor) -> Tensor:
        """Return p, (C,)."""
        if self.probabilities is not None:
            return self.probabilities.to(risks)
        prior, temperature = self._prior.to(risks), self.class_temperature
        joint = torch.zeros((), dtype=risks.dtype, device=risks.device)  # the F of the classes seen so far
        seen = (risks > -inf) & (prior > 0)
        if temperature < inf and seen.any():
            log_prior = (prior[seen] / prior[seen].sum()).log()
            joint = temperature * (risks[seen] / temperature + log_prior).logsumexp(0)
        return tilted_probabilities(torch.where(risks > -inf, risks, joint), prior, temperature, self.class_cap)


def _check_distribution(values: Tensor, name: str, shares: Tensor) -> None:
    if values.is_meta or shares.is_meta:
        raise ValueError(f"{name} must hold numbers, got a tensor without values on the device meta")
    if values.shape != shares.shape or values.dim() != 1 or not (values >= 0).all():
        raise ValueError(
            f"{name} must hold a number from 0 on for each of the {shares.numel()} classes, got {values.tolist()}"
        )
    if abs(float(values.double().sum()) - 1) > 1e-6:
        raise ValueError(f"{name} must sum to 1, got {float(values.double().sum()):g}: divide it by its sum")
    if ((values > 0) & (shares == 0)).any():
        raise ValueError(f"{name} must be 0 for a class without data: nothing is known of its loss")

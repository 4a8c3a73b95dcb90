"""A classifier with the interface of scikit-learn: fit, predict, predict_proba, score, and its robustness."""

from collections.abc import Callable
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor, nn

from doubly.attacks import PGD
from doubly.config import Adam, Validation
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.result import EvalResult
from doubly.methods import Method
from doubly.seeding import global_generators
from doubly.threat import LinfBall
from doubly.training.api import train

CHUNK = 1000  # samples that are predicted at once

Network = Callable[[tuple[int, ...], int], nn.Module]
"""Builds a network from the shape of a sample, (C, H, W), and the number of classes."""


class RobustClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Trains a network by any method of doubly, on rows of features or on images (N, C, H, W).

    Features are scaled to [0, 1] by the smallest and largest value of each in training, and `epsilon` is a share of
    that range; images that are in [0, 1] already are taken as they are with `rescale=False`.

    Attributes:
        classes_: The labels.
        n_features_in_: Number of features of a sample.
        model_: The trained network, from scaled samples (N, C, H, W) to logits.
    """

    def __init__(
        self,
        method: Method | str = "at",
        network: Network | None = None,
        epsilon: float = 8 / 255,
        epochs: int = 60,
        batch_size: int = 128,
        lr: float = 0.01,
        rescale: bool = True,
        random_state: Any = 0,
    ) -> None:
        """Keep the settings; `fit` checks them.

        Args:
            method: How to train: a name, such as "at" or "done_pgd", or a method with its own attack.
            network: Builds a network from the shape of a sample and the number of classes; by default one with a hidden
                layer of 64.
            epsilon: Largest change of each scaled feature, for a method given by name.
            epochs: Passes over the samples.
            batch_size: Samples per step.
            lr: Highest learning rate of Adam.
            rescale: Whether to scale each feature to [0, 1].
            random_state: Seed, or a numpy RandomState.
        """
        self.method = method
        self.network = network
        self.epsilon = epsilon
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.rescale = rescale
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Train on samples (N, features) or (N, C, H, W) and their labels, numbers or texts.

        Args:
            X: The samples.
            y: One label per sample.

        Returns:
            The classifier itself.

        Raises:
            UsageError: If a setting does not fit, or there is a single class.
            ValueError: If the samples or labels are not valid; the message is scikit-learn's.
        """
        X, y = validate_data(self, X, y, allow_nd=True, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        epochs: Any = self.epochs
        if isinstance(epochs, bool) or not isinstance(epochs, Integral) or int(epochs) < 1:
            raise UsageError(f"epochs is a whole number from 1 on, got {epochs!r:.40}: write epochs=60")
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise UsageError("there is one class in y, and a classifier needs two: give samples of another class")
        scales: tuple[Any, Any] = _scales(X) if self.rescale else (0.0, 1.0)
        self.low_, self.range_ = scales
        x = self._pixels(X)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        build, threat = self.network or _default_network, LinfBall(self.epsilon)
        with global_generators(seed):
            network = build(tuple(x.shape[1:]), len(self.classes_))
        data = x, torch.from_numpy(labels.astype(np.int64))
        validation = Validation(every=int(epochs), size=min(len(x), 64), attack=PGD(threat, 1))
        settings: dict[str, Any] = {"threat": threat} if isinstance(self.method, str) else {}
        trained = train(
            network,
            data,
            self.method,
            epochs=self.epochs,
            batch_size=min(self.batch_size, len(x)),
            lr=self.lr,
            optimizer=Adam(),
            test=data,  # nothing is chosen by it
            validation=validation,
            seed=seed,
            channels_last="no",
            verbose=False,
            **settings,
        )
        self.model_ = trained.model.eval()
        return self

    def decision_function(self, X: Any) -> Any:
        """Return the logits, (N, classes); of two classes the difference, (N,), as scikit-learn has it."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class, (N, classes), in the order of `classes_`."""
        return torch.from_numpy(self._logits(X)).softmax(1).numpy()

    def predict(self, X: Any) -> Any:
        """Return the most probable label of each sample."""
        logits = self._logits(X)
        return self.classes_[logits.argmax(1)]

    def evaluate(self, X: Any, y: Any, **settings: Any) -> EvalResult:
        """Attack the classifier within `epsilon`.

        Args:
            X: Samples.
            y: Their labels, of those in training.
            **settings: Further arguments of `doubly.evaluate`, such as threat or attacks.

        Returns:
            Clean and robust accuracy, on average and of every class.

        Raises:
            UsageError: If a label was not in training, or a setting does not fit.
        """
        x, y = self._checked(X), np.asarray(y)
        if not np.isin(y, self.classes_).all():
            raise UsageError("y has a label that was not in training: leave those samples out")
        labels = torch.from_numpy(np.searchsorted(self.classes_, y))
        settings = {"threat": LinfBall(self.epsilon), "trust": False, **settings}
        return evaluate(self.model_, (x, labels), **settings)

    def _logits(self, X: Any) -> Any:
        x = self._checked(X)
        with torch.no_grad():
            return torch.cat([self.model_(part) for part in torch.split(x, CHUNK)]).double().numpy()

    def _checked(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._pixels(validate_data(self, X, allow_nd=True, dtype=np.float64, reset=False))

    def _pixels(self, X: Any) -> Tensor:
        """Return samples as images in [0, 1]; a row of features is an image of one row."""
        if X.ndim not in (2, 4):
            raise UsageError(f"samples are (N, features) or (N, C, H, W), got {X.ndim} dimensions: reshape them")
        if not self.rescale and (X.min() < 0 or X.max() > 1):
            raise UsageError("with rescale=False samples are in [0, 1]: divide them, or leave rescale out")
        scaled = np.clip((X - self.low_) / self.range_, 0, 1)
        x = torch.from_numpy(scaled).float()
        return x[:, None, None] if x.ndim == 2 else x


def _scales(X: Any) -> tuple[Any, Any]:
    """Return the smallest value and the range of each feature; a constant one has the range 1."""
    low, high = X.min(0), X.max(0)
    return low, np.where(high > low, high - low, 1.0)


def _default_network(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 64), nn.ReLU(), nn.Linear(64, classes))

"""Methods in other people's loops: the same weights as in a loop of one's own, and robust networks."""

import contextlib
import copy
import io
import re
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doubly.attacks import PGD
from doubly.bridges.loops import MethodLoss, position, split_batch
from doubly.bridges.sklearn import RobustClassifier
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.methods import AT, CFOL, DONE
from doubly.models.adapt import AdaptedModel
from doubly.threat import LinfBall
from doubly.types import Batch

X, Y = load_digits(return_X_y=True)
IMAGES, LABELS = torch.tensor(X / 16).float().reshape(-1, 1, 8, 8), torch.tensor(Y)
THREAT = LinfBall(0.1)
METHOD = DONE(PGD(THREAT, steps=2), cap=5.0)


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def own_loop(model, optimizer, batches, epochs):
    """Train with the method alone, as examples/your_loop.py does."""
    state, step = METHOD.init(), 0
    for _ in range(epochs):
        for x, y in batches:
            objective = METHOD.objective(model, Batch(x, y), state, position(step, epochs * len(batches)))
            state, step = objective.state, step + 1
            optimizer.zero_grad()
            objective.loss.backward()
            optimizer.step()
    return model


def quiet_fit(trainer, *arguments, **settings):
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of the library: few workers, short logging intervals
        trainer(*arguments, **settings)


def test_lightning_trains_the_same_weights_measures_and_resumes(tmp_path):
    pytest.importorskip("lightning", reason="pip install 'doubly[lightning]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl

        from doubly.bridges.lightning import RobustAccuracy, RobustModule

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=5e-3)

    loader = DataLoader(TensorDataset(IMAGES[:1200], LABELS[:1200]), batch_size=200)
    module = RobustModule(network(), METHOD, adam)
    measured = RobustAccuracy((IMAGES[1200:], LABELS[1200:]), THREAT, every=8)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=8, callbacks=[measured], enable_checkpointing=False, **options)
    quiet_fit(trainer.fit, module, loader)
    plain = network()
    own_loop(plain, adam(plain.parameters()), list(loader), 8)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, module.model.state_dict()[name]), name
    assert measured.result.ra_pgd > 0.5 and measured.result.sa > 0.8
    assert float(trainer.logged_metrics["ra_pgd"]) == pytest.approx(measured.result.ra_pgd)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = RobustModule(network(1), METHOD, adam)
    again.on_load_checkpoint(torch.load(tmp_path / "x.ckpt", weights_only=True))
    assert all(torch.equal(value, again.loss.state[name]) for name, value in module.loss.state.items())
    with pytest.raises(UsageError, match="every is a number of epochs"):
        RobustAccuracy((IMAGES, LABELS), THREAT, every=0)


@pytest.fixture
def trainer(tmp_path):
    """Return a function that makes a Trainer for a small ViT."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason="pip install 'doubly[transformers]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        from doubly.bridges.hf_trainer import RobustTrainer

    def make(epochs, images=IMAGES, **settings):
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.ViTConfig(
            image_size=8, patch_size=2, num_channels=1, num_labels=10, attn_implementation="eager", **sizes
        )
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.ViTForImageClassification(config)
        rows = [{"pixel_values": x, "labels": y} for x, y in zip(images, LABELS, strict=True)]
        options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        arguments = transformers.TrainingArguments(
            str(tmp_path / "hf"),
            num_train_epochs=epochs,
            per_device_train_batch_size=200,
            max_grad_norm=0.0,
            **options,
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        parts = {"train_dataset": rows[:1200], "eval_dataset": rows[1200:], "optimizers": (optimizer, schedule)}
        return RobustTrainer(model, arguments, **parts, **settings)

    return make


def test_the_trainer_of_hugging_face_trains_the_same_weights(trainer):
    made = trainer(3, method=METHOD, mean=0.3, std=0.4)
    plain = AdaptedModel(copy.deepcopy(made.model), [0.3], [0.4])
    loader = DataLoader(made.train_dataset, batch_size=200)  # in order: the Trainer would shuffle
    made.get_train_dataloader = lambda: loader
    quiet_fit(made.train)
    batches = [(batch["pixel_values"], batch["labels"]) for batch in loader]
    own_loop(plain.train(), torch.optim.Adam(plain.parameters(), lr=5e-3), batches, 3)
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, made.model.state_dict()[name], atol=1e-5), name
    scores = made.predict(made.eval_dataset)
    clean = float((scores.predictions.argmax(1) == scores.label_ids).mean())
    held_out = IMAGES[1200:], LABELS[1200:]
    result = evaluate(made.model, held_out, THREAT, attacks=["pgd"], mean=0.3, std=0.4, trust=False)
    assert clean == pytest.approx(result.sa, abs=0.01)


def test_normalized_images_are_refused_by_the_trainer(trainer):
    with pytest.raises(UsageError, match=r"pixel_values run from .* turn off do_normalize"):
        quiet_fit(trainer(1, IMAGES * 2 - 1, method=METHOD).train)


def test_scikit_learn_accepts_the_classifier():
    """Of its checks only those are skipped that need pandas or an array API."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checks = check_estimator(RobustClassifier(epochs=10, lr=0.03), on_fail=None, on_skip=None)
    failed = {
        check["check_name"]: check["exception"] for check in checks if check["status"] not in ("passed", "skipped")
    }
    assert failed == {} and sum(check["status"] == "passed" for check in checks) > 45


def test_the_classifier_is_robust_on_digits_and_fits_into_a_pipeline():
    labels = np.array([f"digit {k}" for k in Y])
    classifier = RobustClassifier(METHOD, epsilon=0.1, epochs=15).fit(X[:1200], labels[:1200])
    result = classifier.evaluate(X[1200:], labels[1200:], attacks=["pgd"])
    assert classifier.score(X[1200:], labels[1200:]) == pytest.approx(result.sa) and result.ra_pgd > 0.55
    shares = classifier.predict_proba(X[1200:])
    assert (
        np.allclose(shares.sum(1), 1) and (classifier.classes_[shares.argmax(1)] == classifier.predict(X[1200:])).all()
    )
    images = RobustClassifier(epochs=np.int64(2), rescale=False).fit(IMAGES.numpy()[:400], Y[:400])
    assert images.model_(IMAGES[:3]).shape == (3, 10)
    scores = cross_val_score(make_pipeline(StandardScaler(), RobustClassifier(epochs=5)), X[:300], Y[:300], cv=2)
    assert scores.min() > 0.5


def test_what_does_not_fit_is_one_sentence(monkeypatch):
    cases = [
        (lambda: MethodLoss(CFOL(PGD(THREAT)), torch.ones(10)), "CFOL needs held-out images or draws classes itself"),
        (lambda: MethodLoss(3), "the method is one of doubly, such as DONE(), or a name, got int"),
        (lambda: MethodLoss("done_pdg"), "done_pdg"),
        (lambda: split_batch({"x": 1}), "a batch is (images, labels) or (images, labels, ids), got dict"),
        (lambda: RobustClassifier(rescale=False).fit(X, Y), "with rescale=False samples are in [0, 1]"),
        (lambda: RobustClassifier().fit(X, np.zeros(len(X))), "there is one class in y"),
        (lambda: RobustClassifier(epochs=0).fit(X, Y), "epochs is a whole number from 1 on, got 0"),
        (lambda: RobustClassifier("nonsense").fit(X, Y), "nonsense"),
        (lambda: RobustClassifier().fit(np.zeros((4, 2, 2)), [0, 1, 0, 1]), "got 3 dimensions: reshape them"),
        (lambda: RobustClassifier(epochs=1).fit(X[:99], Y[:99]).evaluate(X[:2], [0, 77]), "was not in training"),
    ]
    for call, sentence in cases:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            call()
    for package, module in (("lightning", "lightning"), ("transformers", "hf_trainer")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"doubly.bridges.{module}", raising=False)
        with pytest.raises(UsageError, match=rf"pip install 'doubly\[{package}\]'"):
            __import__(f"doubly.bridges.{module}")
    assert position(5, 10).progress == 0.5 and position(5, float("inf")).progress == 0.0
    assert MethodLoss(AT(PGD(THREAT, steps=1)))(network(), IMAGES[:4], LABELS[:4]).requires_grad

"""Attacks of foolbox, torchattacks and adv-lib in one evaluation of a network for digits; those that are installed."""

import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

from doubly import LinfBall, evaluate
from doubly.bridges.attacks import foreign_attack
from doubly.errors import UsageError

ATTACKS = ("foolbox:LinfPGD", "foolbox:LinfFMNAttack,steps=50", "torchattacks:APGD", "advlib:fmn,steps=50")

warnings.filterwarnings("ignore", category=DeprecationWarning)  # of the other libraries
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[:1200]), y[:1200]).backward()
    optimizer.step()

ball = LinfBall(0.1)
selected = ["pgd"]
for name in ATTACKS:
    try:
        selected.append(foreign_attack(name, ball))
    except UsageError as error:  # it is not installed
        print(f"left out: {error}")
result = evaluate(model, (x[1200:1400], y[1200:1400]), ball, selected, trust=False)
for attack in result.attacks:
    print(f"{attack}: {result.accuracy(attack):.1%} of {result.n} images stay correct at epsilon 0.1")
for attack, found in result.summary().get("minimum_norm", {}).items():
    medians = ", ".join(f"{digit}: {radius:.3f}" for digit, radius in found["per_class"].items())
    print(f"median radius under {attack}: {found['median']:.3f}; by class {medians}")
if result.curve:
    print(
        "accuracy over epsilon:", ", ".join(f"{p['accuracy']:.0%} at {p['epsilon']:g}" for p in result.curve["points"])
    )

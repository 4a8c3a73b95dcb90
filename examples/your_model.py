"""Your own network on your own tensors: trained with DONE, and evaluated under attack, in five lines."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from doubly import DONE, PGD, LinfBall, evaluate, train

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)  # any pixels in [0,1]
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))  # any nn.Module to logits
train(model, (x[:1400], y[:1400]), DONE(PGD(LinfBall(0.1)), cap=5.0), epochs=30)
result = evaluate(model, (x[1400:], y[1400:]), LinfBall(0.1))

print(f"accuracy {result.sa:.1%}, under attack {result.ra_pgd:.1%}, weakest classes {result.ra_tail_30:.1%}")

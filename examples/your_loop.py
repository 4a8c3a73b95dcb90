"""A PyTorch loop of your own. Three lines put DONE into it: the loss that it differentiates is then DONE's."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doubly import DONE, PGD, Batch, LinfBall, TrainStep, evaluate

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
train = TensorDataset(x[:1400], y[:1400], torch.arange(1400))
loader = DataLoader(train, batch_size=128, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters())
epochs = 30

method = DONE(PGD(LinfBall(0.1)), cap=5.0)  # line one: the method, a value without state
state = method.init()  # line two: its state, which every objective returns
for epoch in range(epochs):
    for step, (images, labels, ids) in enumerate(loader):
        progress = (epoch + step / len(loader)) / epochs
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - progress)
        # line three, instead of `loss = cross_entropy(model(images), labels)`:
        objective = method.objective(model, Batch(images, labels, ids), state, TrainStep(epoch, step, progress))
        loss, state = objective.loss, objective.state
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 10 == 9:
        losses, weights = objective.sample_losses, objective.weights
        print(f"epoch {epoch + 1}: loss {losses.mean():.3f}, largest weight {weights.max():.2f}")

result = evaluate(model, (x[1400:], y[1400:]), LinfBall(0.1))
print(f"accuracy {result.sa:.1%}, under attack {result.ra_pgd:.1%}, weakest classes {result.ra_tail_30:.1%}")

"""Rank two networks on one page: one measured here, and one that somebody else sent in as an entry."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from sklearn.datasets import load_digits
from torch import nn, tensor

from doubly import AT, PGD, LinfBall, evaluate, train
from doubly.methods import Standard
from doubly.report.leaderboard import group, read_entries, render
from doubly.report.leaderboard_entry import make_entry
from doubly.report.run_result import read_run

digits = load_digits()
x, y = tensor(digits.images).float()[:, None] / 16, tensor(digits.target)
threat = LinfBall(0.1)

with TemporaryDirectory() as folder:
    for name, method in (("standard", Standard()), ("robust", AT(PGD(threat, steps=3)))):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        train(model, (x[:1200], y[:1200]), method, epochs=10, verbose=False)
        result = evaluate(model, (x[1200:], y[1200:]), threat=threat, attacks=["pgd"], trust=False)
        result.save(Path(folder) / name)
    sent = Path(folder) / "entry.json"
    sent.write_text(json.dumps(make_entry(read_run(Path(folder) / "standard"), name="sent in")))
    (board,) = group(read_entries([sent, Path(folder) / "robust"]))
    print(board.title)
    for row in board.rows:
        print("  ".join(cell.text for cell in row[:1] + row[3:6]))
    print(f"the page has {len(render([board])) // 1024} kB")

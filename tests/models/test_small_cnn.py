import torch
import torch.nn.functional as F

from doubly.data import Digits
from doubly.data.loader import batches
from doubly.models import SmallCNN


def test_learns_digits_in_a_few_epochs():
    splits = Digits().load()
    torch.manual_seed(0)
    network = SmallCNN(16).build(1, 10, *splits.train.channel_statistics())
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for epoch in range(6):
        for batch in batches(splits.train, 64, seed=0, epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(network(batch.x), batch.y).backward()
            optimizer.step()
    with torch.no_grad():
        right = network(splits.test.pixels(slice(None))).argmax(1) == splits.test.y
    assert right.float().mean() > 0.95


def test_the_position_of_a_stroke_changes_the_logits():
    torch.manual_seed(0)
    network = SmallCNN().build(1, 10, (0.1,), (0.3,))
    x = torch.zeros(2, 1, 28, 28)
    x[0, 0, 4:8, 4:8] = 1
    x[1, 0, 20:24, 20:24] = 1
    left, right = network(x)
    assert not torch.allclose(left, right, atol=1e-3)

"""Every entry of OPTIMIZERS trains and resumes: a new one is tested by being listed."""

import pytest
import torch

from doubly import train
from doubly.config.optimizers import OPTIMIZERS, InMemoryOptimizer, OptimizerConfig
from doubly.config.serialize import from_json, to_json
from doubly.errors import UsageError
from doubly.rundir import read_metrics
from doubly.schedules import Constant, Cyclic

each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


CONFIGS = {
    **{name: kind(lr=Constant(0.01), clip=5.0) for name, kind in OPTIMIZERS.items()},
    "from Python": InMemoryOptimizer(adam),
    "from Python, with a schedule": InMemoryOptimizer(torch.optim.NAdam, lr=Cyclic(0.01), clip=5.0),
}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@each_optimizer
def test_is_a_frozen_value_with_defaults_that_survives_json(kind):
    config = kind()
    assert isinstance(config, OptimizerConfig) and config == kind() and config.__dataclass_params__.frozen
    for value in (config, kind(lr=Constant(0.5), clip=2.0)):
        assert from_json(to_json(value)) == value


@each_optimizer
def test_follows_its_schedule_and_refuses_numbers_that_make_no_sense(kind):
    config = kind(lr=Cyclic(0.4))
    optimizer = config.build([torch.nn.Parameter(torch.zeros(2))])
    for progress in (0.0, 0.4, 0.7):
        config.set_learning_rate(optimizer, progress)
        assert optimizer.param_groups[0]["lr"] == config.learning_rate(optimizer, progress) == Cyclic(0.4).at(progress)
    for settings, message in [
        ({"lr": Constant(-0.1)}, "learning rate"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"clip": 0.0}, "clip"),
        ({"clip": float("nan")}, "clip"),
    ]:
        with pytest.raises(UsageError, match=message):
            kind(**settings)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_trains_and_resumes_to_the_same_bits_from_the_middle_of_an_epoch(tiny, tmp_path, same_bits, config):
    run = tiny.run(optimizer=config)
    model = tiny.train(run, tmp_path / "whole")
    assert not torch.equal(weights(model), weights(tiny.model()))
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    for after in (1, 6):
        output = tmp_path / str(after)
        tiny.stopped(run, output, after)
        tiny.train(run, output, resume=True)
        assert same_bits(tiny.checkpoint(output)[0], tiny.checkpoint(tmp_path / "whole")[0])


def test_a_function_from_parameters_to_an_optimizer_trains_and_resumes(tiny, tmp_path):
    """As the documentation shows it; the rate is the optimizer's own."""
    images, test = tiny.splits.train, tiny.splits.test
    settings = {"test": test, "batch_size": 16, "channels_last": "no", "device": "cpu", "output": tmp_path / "run"}
    method = tiny.run().method
    trained = train(tiny.model(), images, method, epochs=2, optimizer=lambda p: torch.optim.Adam(p, 1e-3), **settings)
    assert [row["lr"] for row in trained.metrics] == [1e-3, 1e-3]
    by_hand = tiny.train(tiny.run(optimizer=InMemoryOptimizer(adam), epochs=2))
    assert torch.equal(weights(trained.model), weights(by_hand))
    again = train(
        tiny.model(),
        images,
        method,
        epochs=2,
        optimizer=lambda p: torch.optim.Adam(p, 1e-3),
        resume=True,
        **settings,
    )
    assert torch.equal(weights(again.model), weights(trained.model))


def test_an_optimizer_may_leave_parameters_out(tiny):
    """Their gradients are not summed up from step to step, and so do not count when gradients are clipped."""
    seen = []

    class Head(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(model[1].weight.grad.norm().item())
            return super().step(closure)

    model = tiny.model()
    before = model[1].weight.detach().clone()
    config = InMemoryOptimizer(lambda parameters: Head(parameters[1:], lr=1e-6))
    tiny.train(tiny.run(optimizer=config, epochs=5), model=model)
    assert torch.equal(model[1].weight, before) and max(seen) < 1  # a batch's is at most 0.8, the sum of 20 about 6


def test_what_is_no_optimizer_is_refused(tiny):
    for factory, message in [
        (lambda parameters: None, "must return a torch optimizer, got NoneType"),
        (None, "handed in from Python: resume it from Python"),
    ]:
        with pytest.raises(UsageError, match=message):
            tiny.train(tiny.run(optimizer=InMemoryOptimizer(factory)))
    assert from_json(to_json(InMemoryOptimizer(adam))) == InMemoryOptimizer()

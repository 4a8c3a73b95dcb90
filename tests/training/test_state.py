"""What changes from step to step: the warm-up of epsilon, the average of the weights, local statistics."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from doubly.attacks import PGD
from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.errors import UsageError
from doubly.methods import AT, AWP, Standard
from doubly.models.batch_norm import global_batch_norm
from doubly.threat import LinfBall
from doubly.training.setup import build_state


def state_of(tiny, method, **settings):
    return build_state(tiny.run(method, **settings), tiny.splits, tiny.model(), SINGLE_PROCESS)


def test_epsilon_and_step_grow_in_a_straight_line_to_their_values(tiny, adversarial):
    state, attack = state_of(tiny, adversarial, warm_up=0.2), adversarial.attack
    for progress, share in ((0.05, 0.25), (0.1, 0.5), (0.15, 0.75)):
        small = state.warmed_up_method(progress).attack
        assert small.threat.radius == pytest.approx(share * attack.threat.radius)
        assert small.rule.size == pytest.approx(share * attack.rule.size)
        assert replace(small, threat=attack.threat, rule=attack.rule) == attack
    assert state.warmed_up_method(0.0).attack.threat.radius > 0
    assert state.warmed_up_method(0.2) is state.warmed_up_method(0.9) is adversarial
    assert state_of(tiny, adversarial).warmed_up_method(0.0) is adversarial


def test_a_warm_up_reaches_wrapped_methods_and_leaves_those_without_attack_alone(tiny):
    wrapper = AWP(AT(PGD(LinfBall(0.2))))
    warmed_up = state_of(tiny, wrapper, warm_up=0.2).warmed_up_method(0.1)
    assert warmed_up.method.attack.threat.radius == pytest.approx(0.1)
    assert state_of(tiny, Standard(), warm_up=0.2).warmed_up_method(0.0) == Standard()


def test_a_run_with_a_warm_up_attacks_with_the_radius_of_each_step(tiny):
    radii = []

    class Recording(AT):
        def objective(self, model, batch, state, step, perturbation=None):
            radii.append(self.attack.threat.radius)
            return super().objective(model, batch, state, step, perturbation)

    tiny.train(tiny.run(Recording(PGD(LinfBall(0.2), 1)), warm_up=0.5, epochs=2))
    assert radii == pytest.approx([0.2 * max(0.01, step / 4) if step < 4 else 0.2 for step in range(8)])
    with pytest.raises(UsageError, match="warm_up is a share"):
        tiny.run(warm_up=1.0)


def batch_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize("buffers", ["average", "copy"])
def test_the_average_follows_the_weights_step_by_step(tiny, tmp_path, buffers):
    tiny.network = batch_norm
    run = tiny.run(ema_decay=0.75, ema_buffers=buffers)
    mean = {name: value.clone() for name, value in tiny.model().state_dict().items()}
    averaged = {name for name, value in mean.items() if value.is_floating_point()}
    if buffers == "copy":
        averaged = set(dict(tiny.model().named_parameters()))
    for update in range(5):
        early = 1 - (1 + update) / (10 + update)  # a short average at first
        tiny.stopped(run, tmp_path, after=1, resume=True)
        tensors, _ = tiny.checkpoint(tmp_path)
        for name in mean:
            value = tensors[f"model/{name}"]
            mean[name] = mean[name] + max(0.25, early) * (value - mean[name]) if name in averaged else value
            torch.testing.assert_close(tensors[f"ema/{name}"], mean[name])
    model = tiny.train(run, tmp_path, resume=True)
    tensors, _ = tiny.checkpoint(tmp_path)
    assert torch.equal(model[4].weight, tensors["ema/4.weight"])
    assert not torch.equal(tensors["ema/4.weight"], tensors["model/4.weight"])


class Two(Communicator):
    world_size = 2


def test_statistics_are_averaged_where_a_process_has_computed_them_for_itself(tiny):
    class OwnNorm(nn.BatchNorm2d):
        """A layer of the user's own class, which cannot be made global."""

    tiny.network = batch_norm
    state = state_of(tiny, Standard())
    assert state.local_statistics == []
    state.communicator = Two()
    state.model.insert(1, OwnNorm(4))
    with global_batch_norm(state.model, state.communicator):
        ours = [state.model[1].running_mean, state.model[1].running_var]
        assert [t.data_ptr() for t in state.local_statistics] == [t.data_ptr() for t in ours]
    state.run = tiny.run(batch_norm="local")
    assert len(state.local_statistics) == 4  # of both layers

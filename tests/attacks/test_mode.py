"""The context managers for a network under attack restore what they change."""

import pytest
import torch
from torch import nn

from doubly.attacks import (
    attack_context,
    clean_logits,
    eval_mode,
    frozen_parameters,
    frozen_statistics,
    model_device,
    replay_rng,
    rng_state,
)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(4))
    model(torch.rand(2, 1, 5, 5))
    model.train()
    model[2].eval()  # a mixture, as in fine-tuning
    model[0].bias.requires_grad_(False)
    return model


def modes(model):
    return [m.training for m in model.modules()]


def buffers(model):
    return [b.clone() for b in model.buffers()]


def are_equal(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_frozen_statistics_are_not_updated_but_those_of_the_batch_are_used():
    model, x = network(), torch.rand(6, 1, 5, 5)
    before = buffers(model)
    with frozen_statistics(model):
        frozen = model(x)
    assert torch.equal(clean_logits(model, x), frozen)
    assert are_equal(before, buffers(model))
    assert torch.allclose(frozen, model(x))
    assert not are_equal(before, buffers(model)) and model[1].num_batches_tracked == before[-1] + 1
    expected = model.eval()(x)
    with frozen_statistics(model):  # in evaluation mode those are the running ones
        assert torch.equal(model(x), expected)
    untracked = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    with frozen_statistics(untracked):
        pass
    assert not untracked[0].track_running_stats


def test_modes_parameters_and_tracking_are_restored_also_after_an_error():
    model = network()

    def state():
        return modes(model), [p.requires_grad for p in model.parameters()], model[1].track_running_stats

    before = state()
    effects = {
        eval_mode: lambda: not any(modes(model)),
        frozen_statistics: lambda: not model[1].track_running_stats,
        frozen_parameters: lambda: not any(p.requires_grad for p in model.parameters()),
    }
    for manager, has_effect in effects.items():
        with pytest.raises(KeyError), manager(model):
            assert has_effect()
            raise KeyError
        assert state() == before


def test_attack_context_leaves_no_trace():
    for mode in ("eval", "train"):
        model = network()
        model[2].train()
        before = modes(model), [p.requires_grad for p in model.parameters()]
        statistics, generator = buffers(model), torch.get_rng_state()
        with attack_context(model, mode):
            assert any(modes(model)) == (mode == "train")
            assert not model(torch.ones(3, 1, 5, 5)).requires_grad
        assert (modes(model), [p.requires_grad for p in model.parameters()]) == before
        assert are_equal(statistics, buffers(model)) and torch.equal(torch.get_rng_state(), generator)


def test_replayed_draws_are_the_same_and_leave_the_generator_where_it_was():
    state = rng_state()
    draws = torch.rand(5)
    after = torch.get_rng_state()
    with replay_rng(state):
        assert torch.equal(torch.rand(5), draws)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_device_is_that_of_the_first_tensor_and_the_cpu_without_tensors():
    assert model_device(nn.Flatten()) == model_device(network()) == torch.device("cpu")
    assert model_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert model_device(nn.BatchNorm1d(2, affine=False, device="meta")) == torch.device("meta")

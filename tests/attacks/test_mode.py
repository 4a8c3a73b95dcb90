import pytest
import torch
from torch import nn

from doubly.attacks import attacked, draws, evaluating, parameters_frozen, repeating, statistics_frozen


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(4))
    model(torch.rand(2, 1, 5, 5))
    model.train()
    model[2].eval()  # a mixture, as somebody who fine-tunes has it
    model[0].bias.requires_grad_(False)
    return model


def modes(model):
    return [m.training for m in model.modules()]


def statistics(model):
    return [b.clone() for b in model.buffers()]


def same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_evaluating_restores_the_mode_of_each_submodule():
    model = network()
    before = modes(model)
    with evaluating(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_frozen_statistics_are_not_remembered_but_the_batch_s_are_used():
    model, x = network(), torch.rand(6, 1, 5, 5)
    before = statistics(model)
    with statistics_frozen(model):
        frozen = model(x)
    assert same(before, statistics(model))
    assert torch.allclose(frozen, model(x))  # the batch's statistics, as in training mode
    assert not same(before, statistics(model))
    assert model[1].num_batches_tracked == before[-1] + 1


def test_frozen_statistics_in_evaluation_mode_are_the_running_ones():
    model, x = network().eval(), torch.rand(6, 1, 5, 5)
    expected = model(x)
    with statistics_frozen(model):
        assert torch.equal(model(x), expected)


def test_layers_that_never_track_stay_so():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    with statistics_frozen(model):
        pass
    assert not model[0].track_running_stats


def test_frozen_parameters_come_back_as_they_were():
    model = network()
    before = [p.requires_grad for p in model.parameters()]
    with parameters_frozen(model):
        assert not any(p.requires_grad for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == before
    assert not model[0].bias.requires_grad


@pytest.mark.parametrize("manager", [evaluating, statistics_frozen, parameters_frozen])
def test_everything_comes_back_after_an_error(manager):
    model = network()
    before = modes(model), [p.requires_grad for p in model.parameters()], model[1].track_running_stats
    with pytest.raises(KeyError), manager(model):
        raise KeyError
    assert (modes(model), [p.requires_grad for p in model.parameters()], model[1].track_running_stats) == before


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_attacked_leaves_no_trace(mode):
    model = network()
    model[2].train()
    before = modes(model), [p.requires_grad for p in model.parameters()]
    buffers, draws = statistics(model), torch.get_rng_state()
    with attacked(model, mode):
        assert any(modes(model)) == (mode == "train")
        assert not model(torch.ones(3, 1, 5, 5)).requires_grad
    assert (modes(model), [p.requires_grad for p in model.parameters()]) == before
    assert same(buffers, statistics(model)) and torch.equal(torch.get_rng_state(), draws)


def test_repeated_draws_are_the_same_and_leave_the_generator_where_it_was():
    stand = draws()
    first = torch.rand(5)
    after = torch.get_rng_state()
    with repeating(stand):
        assert torch.equal(torch.rand(5), first)
    assert torch.equal(torch.get_rng_state(), after)

import pytest
import torch
from torch import nn

from doubly.bilevel.parameters import frozen, parameters_of, trainable, with_values

A, B = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize("theta", [[A, B], (A, B), {"a": A, "b": B}], ids=lambda theta: type(theta).__name__)
def test_the_tensors_of_a_collection_in_their_order(theta):
    found = parameters_of(theta)
    assert len(found) == 2 and found[0] is A and found[1] is B


def test_a_tensor_is_its_own_leaf():
    assert parameters_of(A)[0] is A and len(parameters_of(A)) == 1


def test_a_module_gives_the_parameters_that_it_trains():
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    (found,) = parameters_of(model)
    assert found is model.weight


TEXT = r"theta must be a module with parameters to train, a tensor, or a list or dict .*use tensor\.detach\(\)"


@pytest.mark.parametrize(
    "theta",
    [
        [],
        {},
        nn.ReLU(),
        [1.0],
        "abc",
        torch.ones(2, dtype=torch.int64),
        [A, torch.ones(2, requires_grad=True) * 2],
        5,
        None,
    ],
    ids=repr,
)
def test_what_theta_cannot_be_is_refused_with_the_remedy(theta):
    with pytest.raises(TypeError, match=TEXT):
        parameters_of(theta)


def test_a_frozen_module_is_refused():
    with pytest.raises(TypeError, match="parameters to train"):
        parameters_of(nn.Linear(2, 2).requires_grad_(False))


def test_trained_leaves_flags_and_gradients_as_found_even_after_a_failure():
    one, other = torch.ones(2), torch.ones(2, requires_grad=True)
    other.grad = kept = torch.full((2,), 7.0)
    with pytest.raises(KeyError), trainable([one, other]):
        assert one.requires_grad and other.requires_grad and other.grad is None
        (one * other).sum().backward()
        raise KeyError
    assert not one.requires_grad and one.grad is None
    assert other.requires_grad and other.grad is kept and kept.tolist() == [7, 7]


def test_frozen_needs_no_gradients_until_it_ends():
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyError), frozen([leaf]):
        assert not leaf.requires_grad
        raise KeyError
    assert leaf.requires_grad


def test_swapped_holds_other_values_and_then_the_old_ones_in_place():
    leaf = torch.ones(2, requires_grad=True)
    place, values = leaf.data_ptr(), torch.tensor([3.0, 4.0])
    with pytest.raises(KeyError), with_values([leaf], [values]):
        assert torch.equal(leaf, values)
        raise KeyError
    assert torch.equal(leaf, torch.ones(2)) and leaf.data_ptr() == place and leaf.is_leaf and leaf.requires_grad
    assert values.tolist() == [3, 4]

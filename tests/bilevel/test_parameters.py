import pytest
import torch
from torch import nn

from doubly.bilevel.parameters import frozen, parameters_of, trainable, with_values

A, B = torch.ones(2), torch.zeros(3)


def test_the_tensors_of_theta_are_listed_in_order():
    half_frozen = nn.Linear(2, 3)
    half_frozen.bias.requires_grad_(False)
    table = [([A, B], [A, B]), ((A, B), [A, B]), ({"a": A, "b": B}, [A, B]), (A, [A])]
    for theta, expected in [*table, (half_frozen, [half_frozen.weight])]:
        tensors = parameters_of(theta)
        assert len(tensors) == len(expected) and all(t is e for t, e in zip(tensors, expected, strict=True))


def test_anything_else_is_refused_with_the_remedy():
    computed = torch.ones(2, requires_grad=True) * 2
    frozen_module = nn.Linear(2, 2).requires_grad_(False)
    integers = torch.ones(2, dtype=torch.int64)
    for theta in ([], {}, nn.ReLU(), frozen_module, [1.0], "abc", integers, [A, computed], 5, None):
        with pytest.raises(TypeError, match=r"theta must be a module with parameters.*use tensor\.detach\(\)"):
            parameters_of(theta)


def test_trainable_restores_flags_and_gradients_even_after_a_failure():
    one, other = torch.ones(2), torch.ones(2, requires_grad=True)
    other.grad = gradient = torch.full((2,), 7.0)
    with pytest.raises(KeyError), trainable([one, other]):
        assert one.requires_grad and other.requires_grad and other.grad is None
        (one * other).sum().backward()
        raise KeyError
    assert not one.requires_grad and one.grad is None
    assert other.requires_grad and other.grad is gradient and gradient.tolist() == [7, 7]


def test_frozen_needs_no_gradients_until_it_ends():
    parameter = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyError), frozen([parameter]):
        assert not parameter.requires_grad
        raise KeyError
    assert parameter.requires_grad


def test_with_values_restores_the_old_values_in_place():
    parameter, values = torch.ones(2, requires_grad=True), torch.tensor([3.0, 4.0])
    address = parameter.data_ptr()
    with pytest.raises(KeyError), with_values([parameter], [values]):
        assert torch.equal(parameter, values)
        raise KeyError
    assert torch.equal(parameter, torch.ones(2)) and parameter.data_ptr() == address
    assert parameter.is_leaf and parameter.requires_grad and values.tolist() == [3, 4]

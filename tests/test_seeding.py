import itertools

import torch

from doubly.seeding import derived_seed, generator, global_generators
from doubly.types import TrainStep


def test_seeds_are_the_same_for_ever():
    """Stored runs are resumed by later versions: these numbers must never change."""
    assert derived_seed(0, 0, 0, "attack") == 675985528394892327
    assert derived_seed(7, 3, 11, "order") == 5021069166195018692


def test_every_part_of_the_key_matters_and_no_two_keys_collide():
    keys = itertools.product(range(5), range(5), range(5), ("attack", "order", "1/attack"))
    assert len({derived_seed(*key) for key in keys}) == 375


def test_a_seed_fits_torch():
    assert all(0 <= derived_seed(s, 0, 0, "x") < 2**63 for s in range(200))


def test_equal_keys_give_equal_draws_and_neighbors_unrelated_ones():
    draws = [torch.randn(2000, generator=generator(0, 0, step, "attack")) for step in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert abs(torch.corrcoef(torch.stack(draws[1:]))[0, 1]) < 0.1


def test_a_moment_hands_out_the_generator_of_its_step():
    moment = TrainStep(epoch=2, step=5, progress=0.1, seed=3)
    expected = torch.rand(4, generator=generator(3, 2, 5, "attack"))
    assert torch.equal(torch.rand(4, generator=moment.generator("attack")), expected)
    assert torch.equal(torch.rand(4, generator=moment.generator("attack")), expected)


def test_making_a_generator_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    generator(0, 0, 0, "x")
    assert torch.equal(torch.get_rng_state(), before)


def test_global_generators_are_seeded_inside_and_restored_after():
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with global_generators(5):
            draws.append(torch.rand(3))
    assert torch.equal(*draws) and torch.equal(torch.get_rng_state(), before)

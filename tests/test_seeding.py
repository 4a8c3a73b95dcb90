import itertools

import torch

from doubly.seeding import BatchGenerator, Rows, derived_seed, generator, global_generators
from doubly.types import TrainStep


def test_seeds_never_change():
    """Saved runs are resumed by later versions."""
    assert derived_seed(0, 0, 0, "attack") == 675985528394892327
    assert derived_seed(7, 3, 11, "order") == 5021069166195018692


def test_every_part_of_the_key_matters_no_two_keys_collide_and_a_seed_fits_torch():
    keys = itertools.product(range(5), range(5), range(5), ("attack", "order", "1/attack"))
    seeds = {derived_seed(*key) for key in keys}
    assert len(seeds) == 375 and all(0 <= seed < 2**63 for seed in seeds)


def test_equal_keys_give_equal_draws_and_neighbors_unrelated_ones():
    draws = [torch.randn(2000, generator=generator(0, 0, step, "attack")) for step in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert abs(torch.corrcoef(torch.stack(draws[1:]))[0, 1]) < 0.1


def test_a_sample_draws_the_same_numbers_in_any_part_of_the_global_batch():
    like = torch.zeros(6, 1, 2, 2, dtype=torch.float64)
    step = TrainStep(epoch=2, step=5, progress=0.1, seed=3)
    whole = step.generator("attack").uniform(like)
    assert torch.equal(whole, torch.rand(like.shape, generator=generator(3, 2, 5, "attack")).double())
    for start, count in ((0, 2), (2, 3), (5, 1)):
        part = step._replace(rows=Rows(start, 6)).generator("attack").uniform(like[:count])
        assert torch.equal(part, whole[start : start + count])
    source = BatchGenerator(generator(3, 2, 5, "attack"))
    assert torch.equal(source.uniform(like), whole) and not torch.equal(source.uniform(like), whole)


def test_the_global_generators_are_seeded_inside_and_restored_after():
    before = torch.get_rng_state()
    generator(0, 0, 0, "x")
    draws = []
    for _ in range(2):
        with global_generators(5):
            draws.append(torch.rand(3))
    assert torch.equal(*draws) and torch.equal(torch.get_rng_state(), before)


def test_dropout_draws_other_numbers_in_each_stream_of_a_step():
    draws = []
    for stream in (0, 0, 1, 2):
        with TrainStep(step=4, stream=stream).network_rng():
            draws.append(torch.rand(50))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2]) and not torch.equal(draws[2], draws[3])

import torch

from doubly.bilevel.rows import dot, flat, mean_row, norms, per_row

SHAPES = [(3,), (3, 4), (3, 2, 1, 5)]


def test_rows_of_any_shape_are_treated_as_vectors():
    for shape in SHAPES:
        a, b = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        vectors = [row.flatten() for row in a]
        assert torch.equal(flat(a), torch.stack(vectors)), shape
        assert torch.allclose(dot(a, b), torch.stack([v @ row.flatten() for v, row in zip(vectors, b, strict=True)]))
        assert torch.allclose(norms(a), torch.stack([v.norm() for v in vectors])), shape


def test_a_value_per_row_broadcasts_over_the_rows():
    for shape in SHAPES:
        rows = torch.ones(shape)
        scaled = per_row(torch.tensor([1.0, 2.0, 3.0]), rows) * rows
        assert scaled.shape == shape and torch.equal(flat(scaled).amin(1), torch.tensor([1.0, 2.0, 3.0]))


def test_the_mean_row_is_one_row_and_a_single_row_is_not_copied():
    rows = torch.arange(6.0).view(2, 3)
    assert torch.equal(mean_row(rows), torch.tensor([[1.5, 2.5, 3.5]]))
    assert mean_row(rows[:1]).data_ptr() == rows.data_ptr()

"""Operations on tensors that hold one row per sample: (B,) or (B, ...), whatever the shape of a row."""

from torch import Tensor


def flat(rows: Tensor) -> Tensor:
    """Return each row as a vector.

    Args:
        rows: One row per sample, (B, ...); a row may be a single number.

    Returns:
        The same numbers, (B, d).
    """
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per row so that it broadcasts over the rows of another tensor.

    Args:
        values: One value per row, (B,).
        like: The tensor to combine them with, (B, ...).

    Returns:
        The values, (B, 1, ..., 1).
    """
    return values.view(-1, *[1] * (like.dim() - 1))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each row of `a` with the same row of `b`, (B,)."""
    return flat(a * b).sum(1)


def norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, (B,)."""
    return flat(rows).norm(dim=1)  # type: ignore[no-any-return]


def mean_row(rows: Tensor) -> Tensor:
    """Return the mean of the rows as a single row; a single row is returned as it is, without a copy."""
    return rows if len(rows) == 1 else rows.mean(0, keepdim=True)

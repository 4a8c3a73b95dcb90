"""The dumb twin of `cid`: one sample at a time, every Jacobian and Hessian written out, and the Hessian inverted."""

import torch
from torch.autograd.functional import hessian, jacobian


def dense_cid(g, h, theta, deltas, f, u=None, eta=1.0, curvature=None):
    """Algorithm 1, lines 8-12, literally: the direction, a vector as long as theta.

    g(theta, delta_i, i) is a number or a vector, h(theta, delta_i, i) a number, f the outer function of the mean.
    `u` is the running mean before this batch; `curvature(delta_i, i)` replaces the Hessian of h.
    """
    values, jacobians = [], []
    for i, delta in enumerate(deltas):
        H = hessian(lambda d: h(theta, d, i), delta) if curvature is None else curvature(delta, i)  # noqa: B023

        def slope(t, i=i, delta=delta):
            return jacobian(lambda d: h(t, d, i), delta, create_graph=True)

        mixed = jacobian(slope, theta)  # (d, p)
        by_theta = torch.atleast_2d(jacobian(lambda t: g(t, delta, i), theta))  # noqa: B023 (m, p)
        by_delta = torch.atleast_2d(jacobian(lambda d: g(theta, d, i), delta))  # noqa: B023 (m, d)
        values.append(torch.atleast_1d(g(theta, delta, i).detach()))
        jacobians.append(by_theta - by_delta @ torch.linalg.inv(H) @ mixed)
    mean = torch.stack(values).mean(0)
    u = mean if u is None else (1 - eta) * u + eta * mean
    outer = jacobian(lambda m: f(m if m.numel() > 1 else m.squeeze()), u)
    return outer @ torch.stack(jacobians).mean(0)

"""The dense twin of `cid`: one sample at a time, with every Jacobian and Hessian as a matrix."""

import torch
from torch.autograd.functional import hessian, jacobian


def dense_response(h, theta, delta, active=None, curvature=None):
    """Return the derivative by theta, (p, d), of the minimizer delta of h(theta, .) with its active constraints.

    `active(delta)` is the vector of the constraint functions that are 0 at delta. With multipliers l the minimizer
    solves grad h + J' l = 0 and active = 0; both are differentiated, with the Hessian of h + l . active.
    """
    H = hessian(lambda d: h(theta, d), delta) if curvature is None else curvature
    mixed = jacobian(lambda t: jacobian(lambda d: h(t, d), delta, create_graph=True), theta)  # (p, d)
    if active is None or not len(active(delta)):
        return -torch.linalg.inv(H) @ mixed
    assert active(delta).abs().max() < 1e-8, "these constraints are not active"
    J = jacobian(active, delta)  # (k, p)
    slope = jacobian(lambda d: h(theta, d), delta)
    multipliers = torch.linalg.lstsq(J.T, -slope[:, None]).solution[:, 0]
    assert (slope + J.T @ multipliers).abs().max() < 1e-8, "delta is not a minimizer on these constraints"
    assert multipliers.abs().min() > 1e-3, "a constraint has no multiplier: F has a kink at this face"
    curved = H + hessian(lambda d: multipliers @ active(d), delta)
    system = torch.cat([torch.cat([curved, J.T], 1), torch.cat([J, J.new_zeros(len(J), len(J))], 1)])
    return -torch.linalg.inv(system)[: len(delta), : len(delta)] @ mixed


def dense_cid(g, h, theta, deltas, f=None, u=None, eta=1.0, curvature=None, *, risk=None, active=None, samples=None):
    """Return the direction of Algorithm 1, lines 8-12, computed literally; a vector as long as theta.

    g(theta, delta_i, i) is a number or a vector, h(theta, delta_i, i) a number, f the outer function of the mean.
    `u` is the running mean before this batch; `curvature(delta_i, i)` replaces the Hessian of h. `risk`, in place of f,
    is a function of all g_i at once. `active(delta_i, i)` names the constraints that bind. With `samples` their number,
    deltas is the one delta that they share, the minimizer of the mean of the h_i.
    """
    if samples is None:
        responses = [
            dense_response(
                lambda t, d, i=i: h(t, d, i),
                theta,
                delta,
                None if active is None else lambda d, i=i: active(d, i),
                None if curvature is None else curvature(delta, i),
            )
            for i, delta in enumerate(deltas)
        ]
    else:

        def mean(t, d):
            return torch.stack([h(t, d, i) for i in range(samples)]).mean()

        shared = dense_response(mean, theta, deltas, None if active is None else lambda d: active(d, 0))
        responses, deltas = [shared] * samples, [deltas] * samples
    values, jacobians = [], []
    for i, (delta, response) in enumerate(zip(deltas, responses, strict=True)):
        by_theta = torch.atleast_2d(jacobian(lambda t: g(t, delta, i), theta))  # noqa: B023 (m, d)
        by_delta = torch.atleast_2d(jacobian(lambda d: g(theta, d, i), delta))  # noqa: B023 (m, p)
        values.append(torch.atleast_1d(g(theta, delta, i).detach()))
        jacobians.append(by_theta + by_delta @ response)
    if risk is not None:
        outer = jacobian(lambda all_values: risk(all_values.squeeze(1)), torch.stack(values))  # (M, m)
        return torch.einsum("im,imp->p", outer, torch.stack(jacobians))
    mean_value = torch.stack(values).mean(0)
    u = mean_value if u is None else (1 - eta) * u + eta * mean_value
    outer = jacobian(lambda m: f(m if m.numel() > 1 else m.squeeze()), u)
    return outer @ torch.stack(jacobians).mean(0)

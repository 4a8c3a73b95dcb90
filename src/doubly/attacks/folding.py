"""A faster form of a network while it is attacked: batch norm folded into the layer before it, and few rows at a time.

In evaluation mode batch norm is an affine map per channel, y = s * x + t. Where its input is the output of a
convolution or linear layer, the layer with weights s * W and bias s * b + t returns the same. `FoldedForward` computes
this way, whatever the network's blocks are called: which batch norm follows which layer is found by following the
tensors of one forward pass.

An attack uses the folded network; accuracy is always that of the network itself.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from doubly.seeding import forked

LINEAR_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # subclasses may compute something else
NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CHECK_ROWS = 16  # images on which a folded network is compared with the network itself
TOLERANCE = 1e-3  # relative difference of logits and input gradients above which it is not used
OUTLIER_FACTOR = 50.0  # by which the difference over all samples together may be larger than that of the median sample
PIXELS = 65_536  # at a time on a CPU, where the activations of more images do not fit the cache
MIN_ROWS = 16  # below, torch convolves in a slower way

Pair = tuple[nn.Module, nn.Module]  # a layer and the batch norm of its output
Replacement = tuple[nn.Module, Callable[[Tensor], Tensor]]  # a module and the forward function that it gets


class _Plan(NamedTuple):
    """The pairs of a network, and what it consisted of when they were found."""

    parts: tuple[Any, ...]
    pairs: list[Pair]


_plans: "WeakKeyDictionary[nn.Module, _Plan]" = WeakKeyDictionary()


class FoldedForward:
    """Calls a network with batch norm folded into the layers before it, a few images at a time.

    A network that cannot be folded is called as it is. Which batch norm follows which layer is found when a network is
    seen for the first time or its modules have changed; then the folded network is compared with the network itself.
    Each pass checks that every batch norm still takes the output of its layer.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        """Fold the weights as they are now.

        Args:
            model: The network, in evaluation mode with frozen parameters.
            x: Images that it can be tried on.
        """
        self.model = model
        self.pairs = [_FoldedPair(layer, norm) for layer, norm in _pairs_of(model, x)]
        self.forwards = _forwards(self.pairs)

    def __call__(self, x: Tensor) -> Tensor:
        with _patched(self.forwards):
            logits = in_pieces(self.model, x)
        if not any(pair.is_broken for pair in self.pairs):
            return logits
        # The network took another way than when it was traced: it has a switch, or looks at the images.
        _plans.pop(self.model, None)
        self.pairs, self.forwards = [], []
        return in_pieces(self.model, x)


def rows_at_a_time(x: Tensor) -> int:
    """Return how many images of this size a network should take at a time in evaluation mode."""
    if x.device.type != "cpu":
        return max(1, len(x))
    return max(MIN_ROWS, PIXELS // max(1, x[0].numel() // x.shape[1])) if len(x) else 1


def in_pieces(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the logits of images that pass a few at a time, where samples do not influence each other."""
    rows = rows_at_a_time(x)
    return forward(x) if len(x) < rows + MIN_ROWS else torch.cat([forward(part) for part in torch.split(x, rows)])


def _pairs_of(model: nn.Module, x: Tensor) -> list[Pair]:
    """Return the pairs to fold, none if that is impossible or the folded network differs."""
    if torch.is_autocast_enabled(x.device.type) or len(x) == 0:
        return []
    parts = tuple((id(module), _is_opaque(module, model)) for module in model.modules())
    plan = _plans.get(model)
    if plan is None or plan.parts != parts:
        opaque = any(is_opaque for _, is_opaque in parts)
        plan = _plans[model] = _Plan(parts, [] if opaque else _checked_pairs(model, x[:CHECK_ROWS].detach()))
    return [(layer, norm) for layer, norm in plan.pairs if not norm.training]


def _checked_pairs(model: nn.Module, x: Tensor) -> list[Pair]:
    if not any(map(_is_norm, model.modules())):
        return []
    pairs: list[Pair] = []
    try:
        with forked():
            pairs = find_pairs(model, x)
            difference = folding_difference(model, pairs, x) if pairs else 0.0
        reason = f"logits or gradients differ by {difference:.2g}"
    except Exception as error:  # whatever a network of the user raises; the attack itself will say it better
        difference, reason = float("inf"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"
    if difference <= TOLERANCE:
        return pairs
    if pairs:
        warnings.warn(f"batch norm is not folded for attacks, which makes them slower: {reason}", stacklevel=2)
    return []


def folding_difference(model: nn.Module, pairs: Iterable[Pair], x: Tensor) -> float:
    """Return the relative difference of logits and input gradients with these pairs folded.

    Args:
        model: The network, in evaluation mode with frozen parameters.
        pairs: What `find_pairs` returned.
        x: Images.
    """
    forwards = _forwards([_FoldedPair(layer, norm) for layer, norm in pairs])

    def folded(x: Tensor) -> Any:
        with _patched(forwards):  # the backward pass is outside, as in an attack
            return model.forward(x)

    return max(_difference(a, b) for a, b in zip(_outputs(folded, x), _outputs(model.forward, x), strict=True))


def find_pairs(model: nn.Module, x: Tensor) -> list[Pair]:
    """Return each batch norm that can be folded, with the layer before it.

    Both must be called exactly once in a pass, and nothing but the batch norm may use the layer's output.

    Args:
        model: The network, in evaluation mode.
        x: Images for one forward pass.
    """
    trace = _Trace()
    handles = [
        handle
        for module in model.modules()
        if type(module) in LINEAR_LAYERS or _is_norm(module)
        for handle in (
            module.register_forward_pre_hook(trace.enter),
            module.register_forward_hook(trace.leave),
        )
    ]
    try:
        with torch.no_grad(), trace:
            trace.used(model.forward(x))  # past hooks of the whole network, which count passes
    finally:
        for handle in handles:
            handle.remove()
    return trace.pairs()


class _Trace(TorchFunctionMode):
    """Follows tensors through a forward pass: which layer returned them, and who used them."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0  # layers that are running; what they do with their input is their own affair
        self.outputs: dict[int, tuple[nn.Module, Tensor]] = {}  # with the tensor, so that its id is not used again
        self.users: dict[int, list[nn.Module | None]] = {}
        self.calls: dict[nn.Module, int] = {}

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.used(inputs, module)
        self.depth += 1

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.depth -= 1
        self.calls[module] = self.calls.get(module, 0) + 1
        if isinstance(output, Tensor):
            self.outputs[id(output)] = (module, output)
            self.users[id(output)] = []  # of a tensor that had this id before

    def used(self, values: Any, module: nn.Module | None = None) -> None:
        """Note that an operation, or a layer, takes these values."""
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                self.users.setdefault(id(value), []).append(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth == 0:
            self.used((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def pairs(self) -> list[Pair]:
        """Return the layers with the batch norm of their output."""
        found = []
        for key, (layer, output) in self.outputs.items():
            users = self.users.get(key, [])
            norm = users[0] if len(users) == 1 else None
            if norm is not None and self.calls[layer] == self.calls[norm] == 1 and _fits(layer, norm, output):
                found.append((layer, norm))
        return found


def _is_norm(module: nn.Module) -> bool:
    """Return whether this is a batch norm that is an affine map in evaluation mode; other classes say so themselves."""
    return type(module) in NORM_LAYERS or getattr(type(module), "affine_in_eval", False)


def _fits(layer: nn.Module, norm: nn.Module, output: Tensor) -> bool:
    return (
        type(layer) in LINEAR_LAYERS
        and _is_norm(norm)
        and getattr(norm, "running_mean", None) is not None
        and not norm.training
        and (output.dim() == 2 or not isinstance(layer, nn.Linear))  # of more dimensions, the channels are not the last
        and not _has_hooks(layer, own=2)
        and not _has_hooks(norm, own=2)
    )


def _has_hooks(module: nn.Module, own: int = 0) -> bool:
    """Return whether there are more than `own` hooks."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for kind in kinds) > own


def _is_opaque(module: nn.Module, model: nn.Module) -> bool:
    """Return whether changed layers would be noticed: by hooks, a compiler, or a forward function that was replaced."""
    compiled = isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules
    replaced = "forward" in vars(module)  # such as one that computes again in the backward pass
    return (
        compiled or replaced or module._compiled_call_impl is not None or (module is not model and _has_hooks(module))
    )


class _FoldedPair:
    """A layer that returns what its batch norm would, and a batch norm that passes it on.

    It notices when the batch norm gets anything but the layer's output, or does not get it.
    """

    def __init__(self, layer: Any, norm: Any) -> None:
        self.layer, self.norm = layer, norm
        self.pending: Tensor | None = None  # the layer's output, until the batch norm takes it
        self.misled = False
        with torch.no_grad():
            scale = torch.rsqrt(norm.running_var + norm.eps)
            if norm.weight is not None:
                scale = scale * norm.weight
            shift = -norm.running_mean * scale
            if norm.bias is not None:
                shift = shift + norm.bias
            # A product of a channels-last weight keeps that layout.
            self.weight = layer.weight * scale.view(-1, *[1] * (layer.weight.dim() - 1))
            self.bias = shift if layer.bias is None else shift + layer.bias * scale

    @property
    def is_broken(self) -> bool:
        """Whether a pass gave another result than the network itself."""
        return self.misled or self.pending is not None

    def forward_layer(self, x: Tensor) -> Tensor:
        self.misled |= self.pending is not None
        is_linear = isinstance(self.layer, nn.Linear)
        output: Tensor = (F.linear if is_linear else self.layer._conv_forward)(x, self.weight, self.bias)
        self.pending = output
        return output

    def forward_norm(self, x: Tensor) -> Tensor:
        self.misled |= x is not self.pending
        self.pending = None
        return x


def _forwards(pairs: Iterable[_FoldedPair]) -> list[Replacement]:
    replaced: list[Replacement] = []
    for pair in pairs:
        replaced += [(pair.layer, pair.forward_layer), (pair.norm, pair.forward_norm)]
    return replaced


@contextmanager
def _patched(forwards: Iterable[Replacement]) -> Iterator[None]:
    """Let modules call other functions inside."""
    for module, forward in forwards:
        vars(module)["forward"] = forward  # nn.Module's setattr is slow
    try:
        yield
    finally:
        for module, _ in forwards:
            del vars(module)["forward"]


def _outputs(forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return logits and input gradient."""
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        logits = forward(point)
        # Every logit gets another factor: the gradient of a plain sum hardly depends on a normalized layer.
        factors = torch.arange(logits.numel(), device=x.device).cos().view_as(logits)
        total = (factors * logits).sum() + 0 * point.sum()  # a network may ignore its input
        return [logits.detach(), torch.autograd.grad(total, point)[0]]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative difference of the median sample, or of all together where that is much larger.

    A ReLU at its kink may switch with the last bit, and then the gradient of that one sample jumps.
    """
    error, size = (part.float().flatten(1).norm(dim=1) for part in (ours - theirs, theirs))
    total = error.norm() / size.norm().clamp_min(1e-12)
    return float(torch.maximum((error / size.clamp_min(1e-12)).median(), total / OUTLIER_FACTOR))

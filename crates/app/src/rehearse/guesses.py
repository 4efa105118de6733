"""Sizes that only data decides: how many elements a mask chooses. Part of `vramcast rehearse`; standard library only.

A pretended card has no data. What boolean indexing, `nonzero`, `unique` or `nms` would give is taken as a share of the most
it can be (`--mask-fraction`), and the report names every line that did so: the stand-in is told the number before the call,
and gives it where the kernel's own count is read, so torch allocates all it would for that number.
"""
import ctypes, math, os, sys

from vramcast_hook import import_beside, journal

FRACTION = float(os.environ.get("VRAMCAST_MASK_FRACTION", "1"))
BY_MASK = {"nonzero", "argwhere", "masked_select", "where"}
BY_VALUE = {"unique", "unique_consecutive", "_unique2", "_unique_impl", "_return_output", "_return_inverse", "_return_counts",
            "_unique_consecutive_impl", "nms"}
standin = ctypes.CDLL(None)
standin.vramcast_count.argtypes = (ctypes.c_int64,)
peak = import_beside("vramcast_peak")
told = {}  # line and call: the most that was told


def possible(torch, name, args):
    """How many elements there can be at most; none where a call is none of these."""
    if name in ("__getitem__", "__setitem__"):
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return max((part.numel() for part in parts if is_mask(torch, part)), default=None)
    if name == "masked_select":
        return math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    if name == "nms":
        return args[0].size(0)
    return args[0].numel() if name in BY_MASK | BY_VALUE else None


def is_mask(torch, part):
    return isinstance(part, torch.Tensor) and part.is_cuda and part.dtype is torch.bool


def axes(torch, mask, count, largest):
    """Indices in place of a mask, axis by axis; what large ones hold does not matter."""
    count = min(count, mask.numel())
    if count * mask.dim() > largest:
        return [torch.zeros(count, dtype=torch.int64, device=mask.device) for _ in range(mask.dim())]
    return [axis.to(mask.device) for axis in chosen(torch, mask.shape, count).unbind(1)]


def share(most):
    return min(most, math.ceil(FRACTION * most))


def chosen(torch, shape, count):
    """The places that are taken as chosen: the first ones."""
    return torch.stack(torch.unravel_index(torch.arange(count, device="cpu"), shape), 1) if shape else torch.zeros(count, 0, dtype=torch.int64, device="cpu")


def say(name, counted, most):
    """Names the line of source, once, and again where it gets larger."""
    frame = sys._getframe(1)
    while frame.f_back and not peak.is_the_programs(frame.f_code.co_filename):
        frame = frame.f_back
    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    if told.get((where, name), -1) < counted:
        told[where, name] = counted
        journal("guess", source=where, call="[mask]" if name.startswith("__") else name, counted=counted, of=most)

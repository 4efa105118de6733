"""Whether the batches of a program differ in shape. Part of `vramcast rehearse`; standard library only.

The peak of a few steps is the peak of their batches: where shapes vary, a later batch may be larger.
"""
from vramcast_hook import journal


class Shapes:
    """What models were called with while they learn; generation calls them with other lengths by its nature."""

    def __init__(self, torch):
        self.torch = torch
        self.known = {}  # per model: the smallest and the largest call

    def called(self, model, args, kwargs):
        if not self.torch.is_grad_enabled() or not model.training or next(model.parameters(), None) is None:
            return
        found = list(self.within((args, kwargs), 3))
        if not found:
            return
        now = max(found, key=lambda shape: shape.numel())
        least, most = self.known.setdefault(id(model), (now, now))
        if now.numel() < least.numel() or now.numel() > most.numel():
            self.known[id(model)] = least, most = min(least, now, key=lambda shape: shape.numel()), max(most, now, key=lambda shape: shape.numel())
            journal("varied", smallest="×".join(map(str, least)), largest="×".join(map(str, most)))

    def within(self, value, depth):
        """Shapes of the tensors in what a model is given."""
        if isinstance(value, self.torch.Tensor):
            yield value.shape
        elif depth and isinstance(value, (list, tuple)):
            for part in value:
                yield from self.within(part, depth - 1)
        elif depth and hasattr(value, "values") and callable(value.values):
            for part in value.values():
                yield from self.within(part, depth - 1)

"""What torch.compile must not see of us. Part of `vramcast rehearse`; standard library only.

Dynamo traces Python, and guards on what it read: functions of ours in the place of torch's own would break the graph. So torch's
are back while a compiled function is called, small values are not followed in it, and our frames around it are passed over.
"""
import contextlib, functools, threading, types

from vramcast_hook import REAL, import_beside

replaced = []  # owner, name, torch's function, ours
hooked = []  # dictionary of hooks, place, ours
codes = []  # of our functions, which may be the outermost frames of a compiled call
lock, depth = threading.RLock(), 0
skip = codes.append  # Dynamo's way to pass over a frame, once it is there


def replace(owner, name, ours):
    """Puts our function in the place of torch's, except for Dynamo."""
    replaced.append((owner, name, getattr(owner, name), ours))
    setattr(owner, name, ours)
    skip(ours.__code__)


def hook(hooks, handle):
    """A hook of ours that Dynamo must not trace."""
    hooked.append((hooks, handle.id, hooks[handle.id]))


@contextlib.contextmanager
def unseen():
    """torch as it is without us."""
    global depth
    with lock:
        depth += 1
        if depth == 1:
            for owner, name, theirs, _ in replaced:
                setattr(owner, name, theirs)
            for hooks, place, _ in hooked:
                hooks.pop(place, None)
    try:
        yield
    finally:
        with lock:
            depth -= 1
            if depth == 0:
                for owner, name, _, ours in replaced:
                    setattr(owner, name, ours)
                for hooks, place, ours in hooked:
                    hooks[place] = ours


@contextlib.contextmanager
def step(function):
    """A compiled step of an optimizer, whose hooks are not called then."""
    watch, optimizer = import_beside("vramcast_watch").Watch.only, getattr(function, "__self__", None)
    if getattr(function, "__name__", "") != "step" or not hasattr(optimizer, "param_groups"):
        yield
        return
    watch.optimizer(optimizer)
    yield
    watch.after_optimizer(optimizer)


def dynamo(module):
    """Around every compiled function."""
    global skip
    skip = module.skip_code
    for code in codes:
        skip(code)
    call = module._TorchDynamoContext.__call__

    def wrapped(self, function):
        compiled = call(self, function)
        if not isinstance(compiled, types.FunctionType):
            return compiled  # a module, whose forward comes through here as well

        @functools.wraps(compiled)
        def alone(*args, **kwargs):
            with step(function), unseen(), contextlib.nullcontext() if REAL else import_beside("vramcast_values").unfollowed():
                return compiled(*args, **kwargs)

        skip(alone.__code__)
        return alone

    module._TorchDynamoContext.__call__ = wrapped


def utilities(utils):
    """Dynamo compares with what `__call__` was when it was imported."""
    for owner, name, theirs, _ in replaced:
        if name == "__call__":
            utils.unpatched_nn_module_call = theirs


AFTER_IMPORT = {"torch._dynamo.eval_frame": dynamo, "torch._dynamo.utils": utilities}

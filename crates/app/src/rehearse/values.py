"""Small values of a program whose kernels do nothing. Part of `vramcast rehearse`; standard library only.

Lengths, masks, positions and counters decide what a program does next. Most of them come from the host, so they can be
known: wherever the inputs of an operation are known and small, the operation is done once more on the CPU, and the
stand-in is told what the kernel would have written. What depends on real data stays zero, except that
  - `all` and `isfinite` are true, every other yes-or-no is no (checks are passed, no sequence ends before its time); what is
    reckoned from such a no stays in doubt, so that `all` of it is true,
  - sizes that only data decides are a share of the largest possible (`guesses.py`),
  - `argmax` and `multinomial` pick one index that is no special token,
  - `topk` picks every index equally often (routers are balanced), all with the score 0, as is that of what `multinomial` drew
    (beams run to their full length).
Nothing here allocates on the device, so memory stays what it is.
"""
import contextlib, ctypes, os, sys, threading, weakref

from vramcast_hook import import_beside

LARGEST = 4 << 20  # elements; larger results decide nothing
FLOATS = 4096  # the same for numbers that are not whole
standin = ctypes.CDLL(None)
standin.vramcast_write.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
standin.vramcast_known.argtypes = (ctypes.c_uint64, ctypes.c_size_t)
standin.vramcast_read.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
standin.vramcast_forget.argtypes = (ctypes.c_uint64,)

FACTORIES = {"arange", "zeros", "ones", "full", "tensor", "as_tensor", "eye", "linspace", "scalar_tensor", "zeros_like", "ones_like", "full_like"}
NUMBERED = {"arange", "linspace", "eye", "zeros", "ones", "full"}  # of these, what numbers may be given as tensors
RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "normal", "uniform_",
          "normal_", "random_", "exponential_", "bernoulli_", "dropout", "empty", "empty_like", "new_empty", "empty_strided"}
SHAPED_BY_DATA = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount", "_unique2"}
CHOICES = {"argmax", "argmin", "multinomial"}
ORDINARY = 10  # tokenizers put special tokens first
EXPERTS = 1024  # no router has more choices
PASSES = {"all", "_is_all_true", "isfinite", "isclose", "isreal"}  # yes where nothing is known: checks are passed
CHECKED = {"normal"}  # torch itself reads whether its arguments make sense
OVERWRITES = {"copy_", "fill_", "zero_"}  # what was there before does not matter
READS = {"item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
MOVES = {"to", "cuda", "__get__", "__set__", "data_ptr", "detach", "__len__"} | READS


class Patience:
    """A line that reads one value again and again waits for what only a real GPU computes."""

    MOST = 50_000
    lost = 0  # reads in a row; a call of a model sets it back
    place = None

    @classmethod
    def lose(cls, frame):
        place = (frame.f_code, frame.f_lineno)
        cls.lost = cls.lost + 1 if place == cls.place else 0
        cls.place = place
        if cls.lost > cls.MOST:
            where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            sys.modules["vramcast_hook"].journal("waits", source=where)
            raise SystemExit(f"vramcast: {where} has read a value from the device {cls.MOST} times and waits for what only a real GPU computes")


here = threading.local()
following = None  # the mode that is entered for the whole program


def install(torch):
    """Follows small values through the main thread of the program."""
    global following
    standin.vramcast_blind(0)
    following = follower(torch)()
    following.__enter__()
    ask = torch.overrides.has_torch_function

    def has_torch_function(tensors):
        """torch's modules leave their fast path where someone looks on; only the program's own onlookers count."""
        if torch.compiler.is_compiling():
            return ask(tensors)
        with unfollowed():
            return ask(tensors)

    import_beside("vramcast_unseen").replace(torch.overrides, "has_torch_function", has_torch_function)


def followed(call, *args, **kwargs):
    """A call in another thread: autograd calls modules once more where activations are recomputed."""
    if getattr(here, "followed", False):
        return call(*args, **kwargs)
    here.followed = True
    standin.vramcast_blind(0)
    try:
        with following:
            return call(*args, **kwargs)
    finally:
        here.followed = False
        standin.vramcast_blind(1)


@contextlib.contextmanager
def unfollowed():
    """Takes the mode off for a while; others that lie above it stay."""
    from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

    stack = _get_current_function_mode_stack()
    if following not in stack:
        yield
        return
    at = stack.index(following)
    for _ in stack[at:]:
        _pop_mode()
    for mode in stack[at + 1:]:
        _push_mode(mode)
    standin.vramcast_blind(1)
    try:
        yield
    finally:
        for _ in stack[at + 1:]:
            _pop_mode()
        for mode in stack[at:]:
            _push_mode(mode)
        standin.vramcast_blind(0)


def follower(torch):
    from torch.overrides import TorchFunctionMode

    Tensor = torch.Tensor
    guesses = import_beside("vramcast_guesses")
    doubtful = {}  # by identity: tensors whose contents are our assumption, or were reckoned from one
    drawn = {}  # the same: what `multinomial` gave

    def remember(tensor, among):
        key = id(tensor)
        among[key] = weakref.ref(tensor, lambda _: among.pop(key, None))

    def doubt(tensor):
        remember(tensor, doubtful)

    def in_doubt(values):
        return bool(doubtful) and any(id(part) in doubtful for part in tensors(values))

    def extent(tensor):
        """Where the memory of a tensor begins, and how long it is."""
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def is_plain(tensor):
        return tensor.is_cuda and tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)

    def known(tensor):
        start, length = extent(tensor)
        return length == 0 or bool(start and standin.vramcast_known(start, length))

    class Unknown(Exception):
        pass

    def twin(value):
        """The same on the CPU; unknown contents end the attempt."""
        if isinstance(value, Tensor):
            if not value.is_cuda:
                return value
            if not is_plain(value) or value.numel() > LARGEST or not known(value):
                raise Unknown
            start, length = extent(value)
            room = torch.empty(max(length, 1), dtype=torch.uint8, device="cpu")
            standin.vramcast_read(start, room.data_ptr(), length)
            typed = torch.empty(0, dtype=value.dtype, device="cpu").set_(room.untyped_storage())
            return typed.as_strided(value.size(), value.stride(), value.storage_offset())
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(twin(part) for part in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return "cpu" if isinstance(value, str) and value.startswith("cuda") else value

    def tell(tensor, expected):
        """Tells the stand-in what a tensor holds."""
        start, length = extent(tensor)
        room = torch.zeros(max(length, 1), dtype=torch.uint8, device="cpu")
        typed = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(room.untyped_storage())
        typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(expected)
        standin.vramcast_write(start, room.data_ptr(), length)

    def worth(tensor):
        if not isinstance(tensor, Tensor) or not is_plain(tensor) or tensor.requires_grad:
            return False
        return tensor.numel() <= (FLOATS if tensor.is_floating_point() else LARGEST)

    def balanced(function, args, result):
        """Every index equally often, where nothing is known; of a vocabulary, none that is special. All score alike."""
        scores, indices, choices = result[0], result[1], args[0].size(-1)
        if indices.numel() <= LARGEST:
            first = ORDINARY if choices > EXPERTS else 0
            tell(indices, ((torch.arange(indices.numel(), device="cpu") + first) % choices).view(indices.shape))
        if worth(scores):
            tell(scores, torch.zeros((), dtype=scores.dtype, device="cpu"))
        elif is_plain(scores):
            standin.vramcast_forget(extent(scores)[0])

    def follow(function, name, args, kwargs, result):
        """Does an operation once more on the CPU, if that is possible, and tells what it gives."""
        if is_change(name) and args and isinstance(args[0], Tensor):
            return change(function, name, args, kwargs)
        results = [part for part in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(part, Tensor) and part.is_cuda]
        if not results or name in ("tensor", "as_tensor"):
            return
        given = {extent(part)[0] for part in tensors(args) if part.is_cuda}
        fresh = [part for part in results if is_plain(part) and extent(part)[0] not in given]
        if not fresh:
            return  # views of something that is known or not
        try:
            if name in RANDOM or name in CHOICES or name in PASSES and in_doubt(args) or not all(worth(part) for part in fresh):
                raise Unknown
            inputs, options = twin(tuple(args)), {key: twin(value) for key, value in kwargs.items() if key != "out"}
            if name in FACTORIES:
                options["device"] = "cpu"
            answer = function(*inputs, **options)
            answers = [part for part in (answer if isinstance(answer, (tuple, list)) else [answer]) if isinstance(part, Tensor)]
            for part, expected in zip(results, answers, strict=True):
                if part.shape != expected.shape or part.dtype != expected.dtype:
                    raise Unknown
                tell(part, expected)
        except Exception:
            for part in fresh:
                if name == "gather" and id(kwargs.get("index", args[-1] if args else None)) in drawn and worth(part):
                    tell(part, torch.zeros((), dtype=part.dtype, device="cpu"))
                else:
                    unknown(name, args, part)

    def unknown(name, args, part):
        """A result that depends on real data."""
        start, _ = extent(part)
        standin.vramcast_forget(start)  # what an earlier owner of the memory left there is nobody's
        if part.numel() > LARGEST:
            return
        if name in CHOICES:
            tell(part, torch.tensor(min(ORDINARY, args[0].size(-1) - 1), device="cpu"))
            if name == "multinomial":
                remember(part, drawn)
        elif part.dtype is torch.bool:
            tell(part, torch.tensor(name in PASSES, device="cpu"))
            if name not in PASSES:
                doubt(part)

    def is_change(name):
        return name == "__setitem__" or name.endswith("_") and not name.endswith("__") or name.startswith("__i") and name.endswith("__") and name != "__invert__"

    def change(function, name, args, kwargs):
        """An operation in place: the twin is a window on its whole storage, as the original is."""
        changed = args[0]
        if not is_plain(changed) or name == "copy_" and isinstance(args[1], Tensor) and not args[1].is_cuda:
            return
        start, length = extent(changed)
        try:
            if not worth(changed) or name in RANDOM:
                raise Unknown
            if name in OVERWRITES and changed.is_contiguous() and changed.numel() * changed.element_size() == length:
                first = torch.empty(changed.shape, dtype=changed.dtype, device="cpu")
            else:
                first = twin(changed)
            function(first, *twin(tuple(args[1:])), **{key: twin(value) for key, value in kwargs.items()})
            standin.vramcast_write(start, first.untyped_storage().data_ptr(), length)
            if in_doubt(args[1:]):
                doubt(changed)
            elif name in OVERWRITES:
                doubtful.pop(id(changed), None)
        except Exception:
            standin.vramcast_forget(start)

    def tensors(values):
        for value in values:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from tensors(value)

    def by_value(index):
        """Masks with known contents as the indices they stand for, and the ends of slices as numbers: torch would read them unseen."""
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, slice) or isinstance(part, Tensor) and part.is_cuda and part.dtype is torch.bool for part in parts):
            return None
        replaced = []
        for part in parts:
            if isinstance(part, slice):
                ends = (part.start, part.stop, part.step)
                if any(isinstance(end, Tensor) and end.is_cuda for end in ends):
                    part = slice(*(int(twin(end)) if isinstance(end, Tensor) else end for end in ends))
            if isinstance(part, Tensor) and part.is_cuda and part.dtype is torch.bool:
                if in_doubt([part]):
                    raise Unknown
                replaced += [axis.to(part.device) for axis in twin(part).nonzero().unbind(1)]
            else:
                replaced.append(part)
        return tuple(replaced)

    def as_numbers(value):
        """Lengths and limits that were reckoned on the device, as numbers: torch would read them unseen."""
        if isinstance(value, Tensor) and value.is_cuda and value.dim() == 0:
            return twin(value).item()
        return type(value)(map(as_numbers, value)) if type(value) in (list, tuple) else value

    def largest_possible(name, args):
        """Of a call whose size only data decides; none where the data is known, for such a call does not come this far."""
        try:
            shaped = name in ("__getitem__", "__setitem__", "nms") or name == "where" and len(args) == 1 or name in guesses.BY_VALUE or name in SHAPED_BY_DATA
            if not shaped or not args or not isinstance(args[0], Tensor) or not args[0].is_cuda:
                return None
            return guesses.possible(torch, name, args)
        except Exception:
            return None

    def exact(name, args):
        """What a known mask chooses from something that learns, whose values are not followed."""
        try:
            if name == "masked_select" and not in_doubt(args[1:]):
                return int(twin(args[1]).expand(torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
        except Unknown:
            return None

    def placed(name, args, most):
        """Unknown masks as indices; backward would count once more, in a thread that is not followed."""
        index, counted = args[1], guesses.share(most)
        if name == "__setitem__":
            value = args[2]
            if not (isinstance(value, Tensor) and value.dim() and value.size(0) != 1 and isinstance(index, Tensor)):
                return args  # one value needs no places
            counted = min(value.size(0), most)  # as many places as there are values
        guesses.say(name, counted, most)
        replaced = []
        for part in index if isinstance(index, tuple) else (index,):
            replaced += guesses.axes(torch, part, counted, LARGEST) if guesses.is_mask(torch, part) else [part]
        return (args[0], tuple(replaced), *args[2:])

    def choose(name, args, result, counted, most):
        """The indices that were taken as chosen."""
        guesses.say(name, counted, most)
        if name in ("nonzero", "argwhere", "where") and counted * max(args[0].dim(), 1) <= LARGEST:
            places = guesses.chosen(torch, args[0].shape, counted)
            if isinstance(result, Tensor):
                tell(result, places)
            else:
                for part, axis in zip(result, places.unbind(1)):
                    tell(part, axis)

    class Follow(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs, name = kwargs or {}, getattr(function, "__name__", "")
            if name == "__get__" or name == "detach":
                result = function(*args, **kwargs)
                if doubtful and isinstance(result, Tensor) and in_doubt(args):
                    doubt(result)
                return result
            try:
                if name in ("__getitem__", "__setitem__") and len(args) > 1:
                    index = by_value(args[1])
                    if index is not None:
                        args = (args[0], index, *args[2:])
                elif name in NUMBERED:
                    args = as_numbers(tuple(args))
                elif name in READS and isinstance(args[0], Tensor) and args[0].is_cuda:
                    Patience.lose(sys._getframe(1))
                    return function(*twin(tuple(args)), **kwargs)
                elif (name in SHAPED_BY_DATA or name == "where" and len(args) == 1) and isinstance(args[0], Tensor) and args[0].is_cuda and not args[0].requires_grad:
                    if in_doubt(args):
                        raise Unknown
                    return move(function(*twin(tuple(args)), **{key: twin(value) for key, value in kwargs.items()}), args[0].device)
            except Unknown:
                if name in ("equal", "allclose"):
                    return args[0].shape == args[1].shape
            except Exception:
                pass
            if name in MOVES and not (name == "to" and args[0].is_cuda):
                return function(*args, **kwargs)  # the stand-in sees the copy
            most = largest_possible(name, args)
            counted = exact(name, args) if most is not None else None
            guessed = most is not None and counted is None
            counted = guesses.share(most) if guessed else 1 if name in CHECKED else counted
            if guessed and name in ("__getitem__", "__setitem__"):
                args, counted, guessed = placed(name, args, most), None, False
            standin.vramcast_blind(1)  # what kernels count for themselves is not to be taken from older values
            if counted is not None:
                standin.vramcast_count(counted)
            try:
                result = function(*args, **kwargs)
            finally:
                standin.vramcast_blind(0)
                if counted is not None:
                    standin.vramcast_count(-1)
            try:
                if name == "topk" and isinstance(args[0], Tensor) and is_plain(args[0]) and not known(args[0]):
                    balanced(function, args, result)
                elif guessed:
                    choose(name, args, result, counted, most)
                else:
                    follow(function, name, args, kwargs, result)
            except Exception:
                pass  # a value stays unknown; the program must not notice
            if in_doubt(args) and name not in PASSES and name not in CHOICES and name != "topk":  # a choice is ours, whatever it is from
                for part in tensors(result if isinstance(result, (tuple, list)) else [result]):
                    doubt(part)
            return result

    def move(value, device):
        if isinstance(value, Tensor):
            return value.to(device)
        return type(value)(move(part, device) for part in value) if isinstance(value, (tuple, list)) else value

    return Follow

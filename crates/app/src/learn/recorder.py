"""What a forward pass does, in order: the functions that a model's code calls, and when Python lets go of each tensor."""

import os
import sys
import traceback
import weakref

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPE = torch.bfloat16
NAMES = {
    torch.float32: "f32", torch.bfloat16: "model", torch.float16: "f16", torch.int64: "i64", torch.int32: "i32",
    torch.bool: "bool", torch.float64: "f64", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16",
    torch.complex64: "c64",
}


class Refused(Exception):
    pass


def place():
    """The line of the model's own code that runs."""
    for frame, line in reversed(list(traceback.walk_stack(sys._getframe(1)))[::-1]):
        name = frame.f_code.co_filename
        if "torch/" not in name.replace("\\", "/").split("site-packages/")[-1][:6] and os.path.dirname(name) != HERE:
            return f"{name}:{line}"
    return "(unknown)"


# What only asks.
QUIET = {"size", "dim", "numel", "shape", "stride", "is_contiguous", "dtype", "device", "requires_grad", "is_floating_point", "element_size",
         "ndim", "is_cuda", "data_ptr", "storage_offset", "nelement", "__len__", "requires_grad_", "is_complex", "layout", "is_sparse", "grad_fn",
         "is_leaf", "__hash__", "__repr__", "__format__", "grad", "is_nested", "get_device", "is_meta", "names", "itemsize", "is_quantized", "result_type",
         "can_cast", "promote_types", "broadcast_shapes", "__get__", "is_tensor", "is_inference", "_version", "__bool_shape__", "untyped_storage"}

# What functions do, by their names (rules.py).
RULES = {}


class Recorder:
    """What a forward pass does, in order."""

    def __init__(self, model):
        self.model = model
        self.steps, self.lines = [], []
        self.values = {}
        self.shapes = []
        self.count = 0
        self.numbers = []
        self.modules = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
        self.order = {}
        self.stack = [""]
        names = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        self.parameters = names
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self.held = {}
        self.ids = {}
        self.trained = {id(parameter) for parameter in model.parameters() if id(parameter) in TRAINED}
        # Values that a gradient passes through.
        self.needs = set()

    # -- values --

    def write(self, *step):
        self.steps.append(list(step))
        self.lines.append(place())

    def number(self, n):
        """A size: the points are compared later."""
        self.numbers.append(int(n))
        return ["#", len(self.numbers) - 1]

    def new(self, tensor, hold=False):
        value, self.count = self.count, self.count + 1
        sizes = [self.number(n) for n in tensor.shape]
        self.bind(tensor, value, hold)
        return [sizes, NAMES.get(tensor.dtype, str(tensor.dtype))]

    def bind(self, tensor, value, hold=False):
        key = id(tensor)
        if hold:
            self.held[key] = tensor
        self.ids[key] = value
        if not hold:
            self.values[key] = weakref.ref(tensor, lambda _, key=key, value=value: self.gone(key, value))

    def gone(self, key, value):
        self.values.pop(key, None)
        if self.ids.get(key) == value:
            del self.ids[key]
        if not self.done:
            self.steps.append(["free", value])
            self.lines.append("")

    done = False

    def of(self, tensor):
        """The value that a tensor is."""
        key = id(tensor)
        if key in self.ids:
            return self.ids[key]
        if key in self.parameters:
            out = self.new(tensor, hold=True)
            self.write("parameter", self.here(), [], [out], self.parameters[key])
            if key in self.trained:
                self.needs.add(self.ids[key])
            return self.ids[key]
        if key in self.buffers:
            out = self.new(tensor, hold=True)
            self.write("buffer", self.here(), [], [out], NAMES.get(tensor.dtype, "f32"))
            return self.ids[key]
        # A tensor that nobody saw being made: constants of a module, or made without torch's functions.
        out = self.new(tensor)
        self.write("fill", self.here(), [], [out], NAMES.get(tensor.dtype, "f32"))
        return self.ids[key]

    def here(self):
        return self.stack[-1]

    def needed(self, tensors):
        """Whether a gradient passes through any of them."""
        return any(self.of(x) in self.needs for x in tensors if isinstance(x, torch.Tensor))

    def record(self, name, inputs, result, *attributes, module=None, weights=()):
        """A step; `weights` are parameters that it names instead of reading them."""
        if any(result is x for x in inputs if isinstance(x, torch.Tensor)):
            return result
        ins = [self.of(x) for x in inputs]
        needed = any(value in self.needs for value in ins) or any(id(w) in self.trained for w in weights)
        cut = []
        if needed and not torch.is_grad_enabled():
            # No gradient passes: the step reads what it reads without its history.
            for at, value in enumerate(ins):
                if value in self.needs:
                    cut.append(self.count)
                    sizes = [self.number(n) for n in inputs[at].shape]
                    self.write("detach", self.here(), [value], [[sizes, NAMES.get(inputs[at].dtype, "f32")]])
                    ins[at], self.count = self.count, self.count + 1
            needed = False
        results = result if isinstance(result, (tuple, list)) else [result]
        outs = [self.new(t) for t in results]
        if needed and name not in ("compare", "fill", "detach"):
            self.needs |= {self.ids[id(t)] for t in results if t.is_floating_point() or t.is_complex()}
        self.write(name, self.here() if module is None else module, ins, outs, *attributes)
        for value in cut:
            self.steps.append(["free", value])
            self.lines.append("")
        return result

    def owner(self, parameter):
        """The module that a parameter belongs to."""
        name = self.parameters.get(id(parameter))
        return None if name is None else name.rpartition(".")[0]

    # -- functions --

    def call(self, func, args, kwargs):
        name = getattr(func, "__name__", str(func)).strip("_")
        rule = RULES.get(name)
        if rule is not None:
            found = rule(self, func, args, kwargs)
            if found is not NotImplemented:
                return found
        if getattr(func, "__module__", "") == "torch.nn.functional" and hasattr(func, "__code__"):
            # Written in Python: what it calls is what runs.
            before = {name: getattr(F, name) for name in ASKS}
            try:
                for asks in before:
                    setattr(F, asks, lambda *_: False)
                with Above(self):
                    return func(*args, **kwargs)
            finally:
                for asks, known in before.items():
                    setattr(F, asks, known)
        with Below(self):
            return func(*args, **kwargs)


# How functions of torch.nn.functional ask whether somebody looks on.
ASKS = [name for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic") if hasattr(F, name)]
# Parameters that are trained, while a pass is recorded: then none of them wants a gradient itself, so that Python alone holds tensors.
TRAINED = set()


def tensors_in(tree, found=None):
    found = [] if found is None else found
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            tensors_in(value, found)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            tensors_in(value, found)
    return found


class Above(TorchFunctionMode):
    """Functions as the model's code calls them."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in QUIET or name == "get":
            return func(*args, **kwargs)
        return self.recorder.call(func, args, kwargs)


class Below(TorchDispatchMode):
    """What a function without a rule of its own does."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.recorder.aten(func, args, kwargs, result)
        return result

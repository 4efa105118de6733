"""Records the forward pass of a model as torch runs it, on tensors without data, and writes it down as a program.

    python learn.py JOB.json OUT.json

A job names the model (`module`: FILE.py:NAME; `config`: a config.json of transformers; `timm`; `diffusers`), its inputs and its
loss. The pass runs on torch's meta device at several sizes; every size in it becomes an expression of the batch and the
other dimensions, found from some of the points and checked at the others. What comes again layer by layer is written once.

What cannot be learned is said with the line of code that it is: values that decide what runs, operations without a rule.
"""

import gc
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import traceback
import warnings
import weakref
from math import gcd

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
warnings.filterwarnings("ignore")

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from expressions import fit

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
        if "torch/" not in name.replace("\\", "/").split("site-packages/")[-1][:6] and not name.endswith("learn.py"):
            return f"{name}:{line}"
    return "(unknown)"


# ---- operations -----------------------------------------------------------------------------------------------------

# What torch keeps for each, and what its backward pass makes, is the core's: a name stands here only where that is true of it.
UNARY = {
    "neg": "neg", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt", "cos": "cos", "sin": "sin", "abs": "abs",
    "square": "square", "reciprocal": "reciprocal", "tanh": "tanh", "sigmoid": "sigmoid", "softplus": "softplus",
    "silu": "silu", "relu": "relu", "logsigmoid": "log_sigmoid", "log_sigmoid": "log_sigmoid", "clamp": "clamp", "clip": "clamp",
    "clamp_min": "clamp", "clamp_max": "clamp", "round": "round", "floor": "round", "ceil": "round", "sign": "round",
    "logical_not": "not", "bitwise_not": "not", "clone": "clone",
    # They keep their input, and one kernel makes the gradient.
    "elu": "silu", "leaky_relu": "silu", "gelu": "silu", "hardswish": "silu", "hardsigmoid": "silu", "mish": "silu",
    "hardtanh": "silu", "relu6": "silu",
}
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "pow": "pow", "maximum": "max", "minimum": "min", "max": "max",
    "min": "min", "true_divide": "div", "multiply": "mul", "divide": "div", "subtract": "sub", "rsub": "sub",
}
# What may run where no gradient passes: an output of its size is all that is left of it.
PLAIN = {
    "expm1", "log1p", "log2", "log10", "erf", "atan2", "addcmul", "floor_divide", "remainder", "fmod", "bitwise_and", "logical_and", "bitwise_or",
    "logical_or", "bitwise_xor", "logical_xor", "cumprod", "flip", "bucketize", "index_select", "take_along_dim", "masked_scatter", "exp2",
    "bitwise_left_shift", "bitwise_right_shift", "outer", "prod", "std", "scatter", "index_put", "index_add", "scatter_add", "diff", "isin",
}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "greater", "less"}
FILL = {
    "zeros", "ones", "empty", "full", "arange", "tensor", "scalar_tensor", "linspace", "rand", "randn", "randint", "eye",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_tensor", "tril_indices", "triu_indices", "randperm", "as_tensor", "lift_fresh", "bernoulli", "hann_window", "argmax", "argmin",
    "any", "all",
}
REDUCE = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "max", "var": "variance", "norm": "norm",
          "logsumexp": "log_sum_exp", "vector_norm": "norm", "linalg_vector_norm": "norm"}
RESHAPES = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as", "_unsafe_view", "ravel", "_reshape_alias",
            "view_as_real", "view_as_complex", "alias"}
QUIET = {"size", "dim", "numel", "shape", "stride", "is_contiguous", "dtype", "device", "requires_grad", "is_floating_point", "element_size",
         "ndim", "is_cuda", "data_ptr", "storage_offset", "nelement", "__len__", "requires_grad_", "is_complex", "layout", "is_sparse", "grad_fn",
         "is_leaf", "__hash__", "__repr__", "__format__", "grad", "is_nested", "get_device", "is_meta", "names", "itemsize", "is_quantized", "result_type",
         "can_cast", "promote_types", "broadcast_shapes", "__get__", "is_tensor", "is_inference", "_version", "__bool_shape__", "untyped_storage"}


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
        if needed and not torch.is_grad_enabled():
            raise Refused(f"{place()}: no_grad around what a gradient passes through")
        results = result if isinstance(result, (tuple, list)) else [result]
        outs = [self.new(t) for t in results]
        if needed and name not in ("compare", "fill"):
            self.needs |= {self.ids[id(t)] for t in results if t.is_floating_point() or t.is_complex()}
        self.write(name, self.here() if module is None else module, ins, outs, *attributes)
        return result

    def owner(self, parameter):
        """The module that a parameter belongs to."""
        name = self.parameters.get(id(parameter))
        return None if name is None else name.rpartition(".")[0]

    # -- functions --

    def call(self, func, args, kwargs):
        name = getattr(func, "__name__", str(func)).strip("_")
        full = resolve_name(func) or name
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


def aten(self, func, args, kwargs, result):
    """One of torch's own operations, by its name."""
    name = func._schema.name.split("::")[-1]
    inputs = tensors_in([args, kwargs])
    if isinstance(result, torch.Tensor) and any(result is x for x in inputs):
        plain = name.rstrip("_")
        if not name.endswith("_") or not self.needed(inputs):
            return
        if plain in ("add", "sub", "mul") and len(inputs) == 2 and inputs[0].shape == result.shape:
            self.in_place(BINARY[plain], inputs[0], inputs[1])
        elif plain in ("add", "sub") and len(inputs) == 1:
            pass
        elif plain in ("mul", "div") and len(inputs) == 1:
            self.in_place("scaled", inputs[0])
        elif plain == "relu":
            self.in_place("relu", inputs[0])
        else:
            raise Refused(f"{place()}: no rule for torch's {name} where a gradient passes")
        return
    if not tensors_in(result):
        return
    plain = name.rstrip("_")
    if plain == "detach":
        if self.needed(inputs):
            raise Refused(f"{place()}: detach of what a gradient passes through")
        self.record("reshape", inputs[:1], result)
    elif plain in ("native_dropout", "dropout"):
        self.record("dropout", inputs[:1], result[0])
    elif plain in ("_to_copy", "to", "type_as"):
        cast(self, inputs[0], result)
    elif plain in RESHAPES:
        self.record("reshape", inputs[:1], result)
    elif plain in ("expand", "broadcast_to"):
        self.record("expand", inputs[:1], result)
    elif plain in ("transpose", "t"):
        a, b = (args[1], args[2]) if plain == "transpose" else (0, 1)
        self.record("transpose", inputs[:1], result, a % max(result.dim(), 1), b % max(result.dim(), 1))
    elif plain == "permute":
        self.record("permute", inputs[:1], result, [d % result.dim() for d in args[1]])
    elif plain in ("slice", "select", "narrow", "unfold", "diagonal", "as_strided"):
        self.sliced(inputs[0], result, args[1] if len(args) > 1 and isinstance(args[1], int) else 0, 1)
    elif plain in ("split", "split_with_sizes", "chunk", "unbind"):
        parts(self, inputs[0], result, args[2] if len(args) > 2 else (args[1] if plain == "unbind" and len(args) > 1 else 0), plain == "unbind")
    elif plain in ("cat", "concatenate", "concat"):
        self.record("cat", inputs, result, (args[1] if len(args) > 1 else 0) % result.dim())
    elif plain == "stack":
        self.record("stack", inputs, result, (args[1] if len(args) > 1 else 0) % result.dim())
    elif plain in ("mm", "bmm", "matmul", "dot", "mv"):
        self.record("matmul", inputs[:2], result)
    elif plain in ("addmm", "baddbmm"):
        self.record("add_matmul", inputs[:3], result)
    elif plain in ("convolution", "conv2d", "conv1d", "conv3d", "_convolution"):
        convolution(self, inputs, result)
    elif plain == "native_layer_norm":
        norm(self, "layer", inputs[0], inputs[1:], result[0])
    elif plain == "native_group_norm":
        norm(self, f"group:{args[6]}", inputs[0], inputs[1:], result[0])
    elif plain in ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"):
        norm(self, "batch", inputs[0], inputs[1:3], result[0])
    elif plain in ("_softmax", "softmax", "_safe_softmax"):
        self.record("softmax", inputs[:1], result, args[1] % max(result.dim(), 1), None)
    elif plain in ("_log_softmax",):
        self.record("softmax", inputs[:1], result, args[1] % max(result.dim(), 1), None)
    elif plain in ("embedding",):
        embedding(self, inputs[1], inputs[0], result)
    elif plain == "constant_pad_nd":
        self.record("pad", inputs[:1], result)
    elif plain in ("topk", "sort"):
        self.record(plain, inputs[:1], list(result))
    elif plain in ("gather",):
        self.record("gather", inputs[:2], result, args[1] % max(result.dim(), 1))
    elif plain == "index":
        self.record("index", inputs[:2], result)
    elif plain in ("where",):
        self.record("where", inputs[:3] if len(inputs) >= 3 else inputs[:1] + inputs[1:] * 2, result)
    elif plain == "masked_fill":
        self.record(plain, inputs[:2], result)
    elif plain == "cumsum":
        self.record("cumulative_sum", inputs[:1], result, 0)
    elif plain in ("repeat", "tile", "repeat_interleave"):
        self.record("repeated", inputs[:1], result)
    elif plain in ("roll",):
        self.record("roll", inputs[:1], result, 0)
    elif plain in ("tril", "triu"):
        self.record("triangle", inputs[:1], result)
    elif plain in ("max_pool2d_with_indices", "max_pool3d_with_indices"):
        self.record("max_pool", inputs[:1], list(result))
    elif plain in ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"):
        self.record("average_pool", inputs[:1], result)
    elif plain in ("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"):
        self.record("interpolate", inputs[:1], result)
    elif plain in ("_fft_r2c", "_fft_c2c", "_fft_c2r"):
        self.record("fourier", inputs[:1], result)
    elif plain in REDUCE or (plain in ("max", "min") and len(inputs) == 1):
        reduce(self, inputs[0], result, REDUCE.get(plain, "max"), args[1] if len(args) > 1 else kwargs.get("dim"))
    elif plain in COMPARE:
        self.record("compare", inputs[:1], result)
    elif plain in FILL or not inputs:
        self.record("fill", [], result, NAMES.get(result.dtype, "f32"))
    elif plain in ("gelu", "mish"):
        self.record("activation", inputs[:1], result, plain)
    elif plain in UNARY and len(inputs) == 1:
        self.record("unary", inputs[:1], result, UNARY[plain])
    elif plain in BINARY and len(inputs) >= 2:
        self.record("binary", inputs[:2], result, BINARY[plain])
    elif plain in BINARY:
        self.record("scalar", inputs[:1], result, BINARY[plain])
    elif plain in ("contiguous", "clone"):
        self.record("contiguous", inputs[:1], result)
    elif plain in PLAIN and not self.needed(inputs) and isinstance(result, torch.Tensor):
        self.record("fill", [], result, NAMES.get(result.dtype, "f32"))
    else:
        raise Refused(f"{place()}: no rule for torch's {name}")


Recorder.aten = aten


def in_place(self, kind, x, *others):
    """`x op= y`: `x` gets a new value with the old storage."""
    values = [self.of(y) for y in (x, *others)]
    needed = any(value in self.needs for value in values)
    self.values.pop(id(x), None)
    out = self.new(x, hold=id(x) in self.held)
    if needed:
        self.needs.add(self.ids[id(x)])
    self.write("in_place", self.here(), values, [out], kind)
    self.steps.append(["free", values[0]])
    self.lines.append("")


def sliced(self, x, result, dim, step):
    if result is x:
        return result
    dim = dim % max(x.dim(), 1)
    if result.dim() == x.dim():
        return self.record("slice", [x], result, dim, step)
    # An index: a slice of one, then the dimension goes.
    return self.record("select", [x], result, dim)


Recorder.in_place, Recorder.sliced = in_place, sliced


def parts(self, x, result, dim, unbound=False):
    result = list(result)
    if unbound:
        for one in result:
            self.record("select", [x], one, dim % max(x.dim(), 1))
        return result
    if len(result) == 1:
        return self.record("reshape", [x], result[0])
    return self.record("split", [x], result, dim % max(x.dim(), 1))


def cast(self, x, result):
    if result is x:
        return result
    return self.record("cast", [x], result, NAMES.get(result.dtype, "f32"))


def reduce(self, x, result, kind, dims):
    if isinstance(result, (tuple, list)):
        result = result[0]
    if isinstance(dims, int):
        dims = [dims]
    dims = sorted(d % max(x.dim(), 1) for d in dims) if dims else list(range(x.dim()))
    if len(dims) == x.dim():
        return self.record("reduce", [x], result, kind, None, False)
    if len(dims) == 1:
        return self.record("reduce", [x], result, kind, dims[0], result.dim() == x.dim())
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise Refused(f"{place()}: a {kind} over dimensions that do not lie together")
    # Together they are one.
    joined = x.flatten(dims[0], dims[-1])
    self.record("reshape", [x], joined)
    if result.dim() < x.dim():
        return self.record("reduce", [joined], result, kind, dims[0], False)
    summed = result.flatten(dims[0], dims[-1])
    self.record("reduce", [joined], summed, kind, dims[0], True)
    return self.record("reshape", [summed], result)


def embedding(self, ids, weight, result):
    owner = self.owner(weight)
    if owner is None:
        return self.record("index", [weight, ids], result)
    return self.record("embedding", [ids], result, self.parameters[id(weight)], module=owner, weights=[weight])


def norm(self, kind, x, weights, result):
    names = [self.parameters.get(id(w)) for w in weights if isinstance(w, torch.Tensor)]
    owner = names[0].rpartition(".")[0] if names and names[0] else None
    if any(isinstance(w, torch.Tensor) and id(w) not in self.parameters for w in weights):
        raise Refused(f"{place()}: a norm whose weight is computed")
    given = [w for w in weights if isinstance(w, torch.Tensor)]
    return self.record("norm", [x], result, kind, *(names + [None, None])[:2], module=owner, weights=given)


def convolution(self, inputs, result):
    x, weight = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    name = self.parameters.get(id(weight))
    if name is None:
        raise Refused(f"{place()}: a convolution whose kernel is computed")
    return self.record("convolution", [x], result, name, self.parameters.get(id(bias)) if bias is not None else None,
                       module=name.rpartition(".")[0], weights=[w for w in (weight, bias) if w is not None])


# ---- rules by name of function ---------------------------------------------------------------------------------------

RULES = {}


def rule(*names):
    def put(function):
        for name in names:
            RULES[name] = function
        return function

    return put


@rule("linear")
def _linear(self, func, args, kwargs):
    bound = dict(zip(("input", "weight", "bias"), args)) | kwargs
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    result = func(*args, **kwargs)
    name = self.parameters.get(id(weight))
    if name is None:
        turned = weight.t()
        self.record("transpose", [weight], turned, 0, 1)
        product = torch.empty(result.shape, dtype=result.dtype, device="meta") if bias is not None else result
        self.record("matmul", [x, turned], product)
        return self.record("binary", [product, bias], result, "add") if bias is not None else result
    weights = [w for w in (weight, bias) if w is not None]
    bias = None if bias is None else self.parameters.get(id(bias))
    return self.record("linear", [x], result, name, bias, module=name.rpartition(".")[0], weights=weights)


@rule("embedding")
def _embedding(self, func, args, kwargs):
    bound = dict(zip(("input", "weight"), args)) | kwargs
    return embedding(self, bound["input"], bound["weight"], func(*args, **kwargs))


@rule("layer_norm", "rms_norm")
def _layer_norm(self, func, args, kwargs):
    bound = dict(zip(("input", "normalized_shape", "weight", "bias"), args)) | kwargs
    kind = "layer" if func.__name__ == "layer_norm" else "rms_fused"
    return norm(self, kind, bound["input"], [bound.get("weight"), bound.get("bias") if kind == "layer" else None], func(*args, **kwargs))


@rule("group_norm")
def _group_norm(self, func, args, kwargs):
    bound = dict(zip(("input", "num_groups", "weight", "bias"), args)) | kwargs
    return norm(self, f"group:{bound['num_groups']}", bound["input"], [bound.get("weight"), bound.get("bias")], func(*args, **kwargs))


@rule("batch_norm")
def _batch_norm(self, func, args, kwargs):
    bound = dict(zip(("input", "running_mean", "running_var", "weight", "bias"), args)) | kwargs
    return norm(self, "batch", bound["input"], [bound.get("weight"), bound.get("bias")], func(*args, **kwargs))


@rule("dropout")
def _dropout(self, func, args, kwargs):
    x = args[0] if args else kwargs["input"]
    result = func(*args, **kwargs)
    if kwargs.get("inplace") or (len(args) > 3 and args[3]):
        if self.needed([x]) and self.model.training:
            raise Refused(f"{place()}: dropout in place")
        return result
    return self.record("dropout", [x], result)


@rule("feature_dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
def _whole_dropout(self, func, args, kwargs):
    result = func(*args, **kwargs)
    if self.model.training and result is not (args[0] if args else kwargs["input"]):
        raise Refused(f"{place()}: no rule for {func.__name__}")
    return result


@rule("scaled_dot_product_attention")
def _attention(self, func, args, kwargs):
    bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
    inputs = [bound["query"], bound["key"], bound["value"]]
    if bound.get("attn_mask") is not None:
        inputs.append(bound["attn_mask"])
    result = func(*args, **kwargs)
    flags = [bool(bound.get("is_causal")), bound.get("dropout_p", 0.0) > 0, bool(bound.get("enable_gqa"))]
    return self.record("attention", inputs, result, *flags)


@rule("silu", "gelu", "relu", "mish")
def _activation(self, func, args, kwargs):
    x = args[0] if args else kwargs["input"]
    result = func(*args, **kwargs)
    if result is x and self.needed([x]):
        if func.__name__.rstrip("_") != "relu":
            raise Refused(f"{place()}: {func.__name__} in place")
        self.in_place("relu", x)
        return x
    return self.record("activation", [x], result, func.__name__.rstrip("_"))


@rule("softmax")
def _softmax(self, func, args, kwargs):
    x = args[0] if args else kwargs["input"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
    dtype = kwargs.get("dtype")
    return self.record("softmax", [x], func(*args, **kwargs), dim % max(x.dim(), 1), NAMES.get(dtype) if dtype else None)


@rule("matmul", "bmm", "mm")
def _matmul(self, func, args, kwargs):
    result = func(*args, **kwargs)
    return self.record("matmul", tensors_in([args, kwargs])[:2], result)


@rule("float", "to", "type", "type_as", "bfloat16", "half", "double", "int", "long", "bool")
def _cast(self, func, args, kwargs):
    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor):
        return result
    return cast(self, args[0], result)


@rule("contiguous")
def _contiguous(self, func, args, kwargs):
    return self.record("contiguous", args[:1], func(*args, **kwargs))


@rule("cross_entropy")
def _cross_entropy(self, func, args, kwargs):
    bound = dict(zip(("input", "target"), args)) | kwargs
    each = bound.get("reduction") == "none"
    if bound.get("weight") is not None or bound.get("label_smoothing") or bound["input"].shape == bound["target"].shape:
        raise Refused(f"{place()}: a cross entropy with weights, smoothing or soft labels")
    return self.record("loss", [bound["input"], bound["target"]], func(*args, **kwargs), "each" if each else "cross_entropy")


@rule("mse_loss", "binary_cross_entropy_with_logits")
def _mean_squared(self, func, args, kwargs):
    bound = dict(zip(("input", "target"), args)) | kwargs
    if bound.get("weight") is not None or bound.get("pos_weight") is not None or bound.get("reduction", "mean") != "mean":
        raise Refused(f"{place()}: {func.__name__} with weights or without its mean")
    kind = "mean_squared" if func.__name__ == "mse_loss" else "binary"
    return self.record("loss", [bound["input"], bound["target"]], func(*args, **kwargs), kind)


@rule("item", "tolist", "bool", "int", "float", "index", "nonzero", "unique", "masked_select", "numpy", "unique_consecutive")
def _values(self, func, args, kwargs):
    name = func.__name__
    if name in ("float", "bool", "int") and not name.startswith("__"):
        return _cast(self, func, args, kwargs)
    if name in ("item", "tolist", "nonzero", "unique", "masked_select", "numpy", "unique_consecutive", "__bool__", "__int__", "__float__", "__index__"):
        raise Refused(f"{place()}: what runs depends on values ({name.strip('_')})")
    return NotImplemented


# ---- modules ---------------------------------------------------------------------------------------------------------

SINGLE = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._BatchNorm,
          torch.nn.modules.conv._ConvNd, torch.nn.Dropout, torch.nn.Identity)


def kind_of(path, module, layers):
    if isinstance(module, torch.nn.Linear):
        return ["linear", module.in_features, module.out_features]
    if isinstance(module, torch.nn.Embedding):
        return ["embedding", module.num_embeddings, module.embedding_dim]
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return ["convolution"]
    if "norm" in type(module).__name__.lower():
        return ["norm"]
    return ["layer"] if path in layers else ["container"]


def layers_of(model):
    """Modules that are one of several alike in a list: outermost lists of children of one class."""
    found = set()
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer

        marked = {path for path, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
        if marked:
            return marked
    except ImportError:
        pass
    for path, module in model.named_modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1:
            children = list(module.named_children())
            alike = len({type(child) for _, child in children}) == 1 and not isinstance(children[0][1], SINGLE)
            if alike and not any(path.startswith(known + ".") for known in found):
                found |= {f"{path}.{name}" if path else name for name, _ in children}
    return found


def watch(recorder, model):
    """Says when modules begin and end."""
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, SINGLE) or (not list(module.children()) and "norm" not in type(module).__name__.lower() and not path):
            continue

        def before(module, args, path=path):
            recorder.write("in", path)
            recorder.stack.append(path)

        def after(module, args, output, path=path):
            recorder.stack.pop()
            recorder.write("out", path)

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return handles


# ---- one pass --------------------------------------------------------------------------------------------------------


def run(model, inputs, training, loss):
    """The steps of one forward pass."""
    TRAINED.update(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    recorder = Recorder(model)
    handles = watch(recorder, model)
    model.train(training)
    model.requires_grad_(False)
    try:
        with torch.enable_grad(), Above(recorder):
            kwargs = {}
            for name, (shape, dtype, kind) in inputs.items():
                tensor = torch.empty(shape, dtype=dtype, device="meta")
                recorder.steps.clear()
                kwargs[name] = tensor
            recorder.steps, recorder.lines, recorder.numbers, recorder.count = [], [], [], 0
            recorder.values, recorder.ids = {}, {}
            for name, (shape, dtype, kind) in inputs.items():
                out = recorder.new(kwargs[name], hold=True)
                recorder.write("input", "", [], [out], kind, NAMES.get(dtype, "i64"))
            output = model(**kwargs)
            returned = tensors_in(dict(output) if hasattr(output, "keys") else output)
            if training and loss and not (returned and returned[0].dim() == 0):
                returned = [loss_of(recorder, returned[0], loss)] + returned
            recorder.write("return", "", [recorder.of(t) for t in returned], [])
            recorder.done = True
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in TRAINED)
        for handle in handles:
            handle.remove()
    return recorder


def loss_of(recorder, output, loss):
    shape = output.shape if loss == "mse" else output.shape[:-1]
    labels = torch.empty(shape, dtype=output.dtype if loss == "mse" else torch.int64, device="meta")
    recorder.ids.pop(id(labels), None)
    recorder.steps = [s for s in recorder.steps]
    # It came with the batch.
    if recorder.steps and recorder.steps[-1][0] == "fill":
        recorder.steps.pop(), recorder.lines.pop()
        recorder.count -= 1
        del recorder.numbers[-len(shape):]
    out = recorder.new(labels, hold=True)
    recorder.write("input", "", [], [out], "labels", NAMES[labels.dtype])
    if loss == "mse":
        return F.mse_loss(output, labels)
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))


# ---- several passes --------------------------------------------------------------------------------------------------


def written(recorders, points, names):
    """Steps whose sizes are expressions: the passes must have done the same."""
    first = recorders[0]
    for other, point in zip(recorders[1:], points[1:]):
        for place, (a, b) in enumerate(zip(first.steps, other.steps)):
            if a != b:
                where = first.lines[place] or first.lines[max(place - 1, 0)]
                raise Refused(f"{where}: what runs depends on the sizes: {a[:2]} at {points[0]}, {b[:2]} at {point}")
        if len(first.steps) != len(other.steps):
            raise Refused(f"the pass has {len(first.steps)} steps at {points[0]} and {len(other.steps)} at {point}")
    from fractions import Fraction

    envs = [{name: Fraction(point[name]) for name in names} for point in points]
    known, texts = {}, []
    for place in range(len(first.numbers)):
        values = tuple(r.numbers[place] for r in recorders)
        if values not in known:
            known[values] = fit(values, envs, names)
            if known[values] is None:
                step = next(k for k, s in enumerate(first.steps) if str(["#", place]) in str(s))
                raise Refused(f"{first.lines[step]}: the size {values} at {points} follows no expression")
        texts.append(known[values])
    shapes, index = [], {}

    def shape(sizes):
        text = ",".join(texts[number] for _, number in sizes)
        if text not in index:
            index[text] = len(shapes)
            shapes.append(text)
        return index[text]

    steps = []
    for step in first.steps:
        if step[0] in ("in", "out", "free"):
            steps.append(step)
        else:
            name, module, inputs, outs, *rest = step
            steps.append([name, module, inputs, [shape(sizes) for sizes, _ in outs], *rest])
    return shapes, steps


def main():
    job = json.load(open(sys.argv[1]))
    try:
        document = learn(job)
    except Refused as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__)]
        own = [f for f in frames if "/torch/" not in f.filename and not f.filename.endswith("learn.py")]
        where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        print(json.dumps({"refused": f"{where}{type(error).__name__}: {str(error)[:300]}"}), flush=True)
        return
    with open(sys.argv[2], "w") as file:
        json.dump(document, file, separators=(",", ":"))
    print(json.dumps({"learned": {"parameters": len(document["parameters"]), "steps": len(document["forward"]["steps"])}}), flush=True)


ODD = {"seq": (37, 55), "height": (75, 103), "width": (75, 103), "frames": (5, 7)}


def learn(job):
    model, inputs_at, names, title = subject(job)
    model = model.to(DTYPE)
    layers = layers_of(model)
    base = {"batch": 2, "seq": 24, "height": 64, "width": 64, "frames": 4, **job.get("at", {})}
    steps = {"batch": (3, 5, 7), "seq": (40, 56, 72), "height": (96, 128, 160), "width": (96, 128, 160), "frames": (6, 8, 10)}
    for name, values in job.get("values", {}).items():
        base[name], steps[name] = values[0], tuple(values[1:])
    points = [base]
    for name in names:
        points += [{**base, name: other} for other in steps[name][:2]]
    points.append({name: steps[name][1] if name in names else base[name] for name in base})
    points.append({name: steps[name][2] if name in names else base[name] for name in base})
    if not names:
        points = points[:1]
    record = lambda point, training: run(model, inputs_at(point, training), training, job.get("loss"))
    recorders = {training: [record(point, training) for point in points] for training in (False, True)}
    # Sizes that nothing divides: where the pass does the same there, any size will do, else those like the others.
    multiples = {}
    for name in names:
        for odd in ODD.get(name, ()):
            point = {**base, name: odd}
            try:
                more = {training: record(point, training) for training in (False, True)}
                if any(more[training].steps != recorders[training][0].steps for training in more):
                    raise Refused("other steps")
            except Exception:
                multiples[name] = gcd(*(point[name] for point in points))
                break
            points.append(point)
            for training in more:
                recorders[training].append(more[training])
    passes = {}
    for what, training in (("forward", False), ("training", True)):
        shapes, steps_of = written(recorders[training], points, names)
        passes[what] = {"shapes": shapes, "steps": fold(steps_of, layers)}
    parameters, tied, seen = [], [], {}
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if id(tensor) in seen:
                tied.append([full, seen[id(tensor)]])
                continue
            seen[id(tensor)] = full
            parameters.append([full, list(tensor.shape), "frozen" if not tensor.requires_grad else ""])
    buffers = [[name, list(b.shape), NAMES.get(b.dtype, "f32")] for name, b in model.named_buffers()]
    modules = [[path, *kind_of(path, module, layers)] for path, module in model.named_modules()]
    versions = {}
    for package in ("torch", "transformers", "diffusers", "timm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {"model_type": "learned_program", "name": title, "learned_from": versions, "dimensions": names, "multiples": multiples,
            "points": [{name: point[name] for name in names} for point in points], "modules": modules,
            "parameters": parameters, "tied": tied, "buffers": buffers, **passes}


def fold(steps, layers):
    """What comes again layer by layer, once: names with `{}` for the layer's number, values counted from the layer's start;
    a value from before the first layer is a string."""
    starts, counts, count = {}, [], 0
    for place, step in enumerate(steps):
        counts.append(count)
        if step[0] == "in" and step[1] in layers:
            starts.setdefault(step[1].rpartition(".")[0], []).append(place)
        if step[0] not in ("in", "out", "free"):
            count += len(step[3])
    result, at = [], 0
    for path, places in sorted(starts.items(), key=lambda item: item[1][0]):
        if len(places) < 4 or places[0] < at:
            continue
        first = counts[places[0]]
        blocks = [normal(steps[a:b], counts[a], first, path, steps[a][1]) for a, b in zip(places, places[1:])]
        k = 0
        result += steps[at : places[0]]
        while k < len(blocks):
            n = k
            while n < len(blocks) and blocks[n] == blocks[k]:
                n += 1
            if n - k > 1 and blocks[k] is not None:
                result.append(["repeat", n - k, int(steps[places[k]][1].rpartition(".")[2]), path, blocks[k]])
            else:
                result += steps[places[k] : places[n]]
            k = n
        at = places[-1]
    return result + steps[at:]


def normal(steps, start, first, path, name):
    """A layer's steps without what is its own."""
    index = name.rpartition(".")[2]
    if not index.isdigit():
        return None

    def rename(text):
        return f"{path}.{{}}{text[len(name):]}" if isinstance(text, str) and (text == name or text.startswith(name + ".")) else text

    def value(v):
        return str(v) if v < first else v - start

    result = []
    for step in steps:
        if step[0] == "free":
            result.append(["free", value(step[1])])
        elif step[0] in ("in", "out"):
            result.append([step[0], rename(step[1])])
        else:
            kind, module, inputs, outs, *rest = step
            result.append([kind, rename(module), [value(v) for v in inputs], outs, *map(rename, rest)])
    return result


# ---- what is learned -------------------------------------------------------------------------------------------------


def sizes(text, point):
    """`batch,3,height,width` at a point."""
    result = []
    for part in text.split(","):
        result.append(int(part) if part.strip().isdigit() else int(eval(part, {"__builtins__": {}}, dict(point))))
    return result


def subject(job):
    if "module" in job:
        path, _, name = job["module"].partition(":")
        spec = importlib.util.spec_from_file_location("learned", path)
        code = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        spec.loader.exec_module(code)
        with torch.device("meta"):
            model = getattr(code, name)()
        title = f"{os.path.basename(path)}:{name}"
        given = job["inputs"]
    elif "timm" in job:
        import timm

        with torch.device("meta"):
            model = timm.create_model(job["timm"], pretrained=False)
        title = f"timm/{job['timm']}"
        given = job.get("inputs") or [["x", "float", f"batch,{','.join(map(str, model.default_cfg['input_size']))}"]]
    elif "diffusers" in job:
        import diffusers

        config = json.load(open(job["config"]))
        with torch.device("meta"):
            model = getattr(diffusers, job["diffusers"]).from_config(config)
        title, given = f"diffusers/{job['diffusers']}", job["inputs"]
    else:
        return transformers_subject(job)
    types = {"float": DTYPE, "int64": torch.int64, "bool": torch.bool, "int32": torch.int32, "float32": torch.float32}
    used = [n for n in ("batch", "seq", "height", "width", "frames") if any(n in shape for _, _, shape in given)]

    def inputs_at(point, training):
        kinds = lambda dtype, name: "tokens" if dtype == "int64" else "pixels" if dtype == "float" else "other"
        return {name: (sizes(shape, point), types[dtype], kinds(dtype, name)) for name, dtype, shape in given}

    return model, inputs_at, used, title


def transformers_subject(job):
    import transformers

    config = json.load(open(job["config"]))
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    auto = job.get("auto_class") or "AutoModelForCausalLM"
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    signature = inspect.signature(model.forward).parameters
    text = "input_ids" in signature
    given = {}

    def inputs_at(point, training):
        result = {}
        batch, seq = point["batch"], point["seq"]
        if "pixel_values" in signature and not text:
            size = getattr(config, "image_size", 224) or 224
            height, width = (size, size) if isinstance(size, int) else size
            result["pixel_values"] = ((batch, getattr(config, "num_channels", 3), height, width), DTYPE, "pixels")
        if text:
            result["input_ids"] = ((batch, seq), torch.int64, "tokens")
            if config.is_encoder_decoder:
                result["decoder_input_ids"] = ((batch, seq), torch.int64, "decoder_tokens")
        if training and "labels" in signature:
            one = auto in ("AutoModelForImageClassification", "AutoModelForSequenceClassification", "AutoModelForAudioClassification")
            result["labels"] = ((batch,) if one else (batch, seq), torch.int64, "labels")
        return result

    names = ["batch", "seq"] if text else ["batch"]
    return model, inputs_at, names, f"{config.model_type} ({type(model).__name__})"


if __name__ == "__main__":
    main()

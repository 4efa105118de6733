"""What torch's functions are in a program: a rule where the core knows what each keeps and what its backward pass makes, else a refusal."""

import linecache

import torch

from recorder import NAMES, RULES, Recorder, Refused, place, tensors_in

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
    "bitwise_left_shift", "bitwise_right_shift", "outer", "prod", "std", "scatter", "index_put", "index_add", "scatter_add", "diff", "isin", "polar", "histc",
    "bincount", "searchsorted", "minimum", "maximum", "special_erf", "index_copy", "cummax", "nan_to_num", "special_expm1", "tan", "atan", "fft_fftfreq",
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


def aten(self, func, args, kwargs, result):
    """One of torch's own operations, by its name."""
    name = func._schema.name.split("::")[-1]
    inputs = tensors_in([args, kwargs])
    if isinstance(result, torch.Tensor) and any(result is x for x in inputs):
        plain = name.rstrip("_")
        if not name.endswith("_") or not self.needed(inputs):
            return
        if plain in ("add", "sub", "mul", "div") and len(inputs) == 2 and inputs[0].shape == result.shape:
            self.in_place(BINARY[plain], inputs[0], inputs[1])
        elif plain in ("add", "sub") and len(inputs) == 1:
            pass
        elif plain in ("mul", "div") and len(inputs) == 1:
            self.in_place("scaled", inputs[0])
        elif plain == "relu":
            self.in_place("relu", inputs[0])
        elif plain == "as_strided" and len(inputs) == 1:
            # Strides alone, of dimensions of one element.
            pass
        else:
            raise Refused(f"{place()}: no rule for torch's {name} where a gradient passes")
        return
    if not tensors_in(result):
        return
    plain = name.rstrip("_")
    if plain == "detach":
        self.record("detach", inputs[:1], result)
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
        # What has no elements and one dimension is passed over, as torch does.
        self.record("cat", [x for x in inputs if x.shape != (0,)] or inputs, result, (args[1] if len(args) > 1 else 0) % result.dim())
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
    elif plain in ("index", "index_select"):
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
        at = 2 if plain.endswith("norm") else 1
        reduce(self, inputs[0], result, REDUCE.get(plain, "max"), args[at] if len(args) > at else kwargs.get("dim"))
    elif plain in COMPARE:
        self.record("compare", inputs[:1], result)
    elif plain in FILL or not inputs:
        self.record("fill", [], result, NAMES.get(result.dtype, "f32"))
    elif plain == "log_sigmoid_forward":
        self.record("unary", inputs[:1], result[0], "log_sigmoid")
    elif plain in ("clamp", "clamp_min", "clamp_max") and len(inputs) > 1:
        self.record("binary", inputs[:2], result, "max")
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
    own = [x]
    if name is None:
        # A parameter seen in other sizes (`weight.unsqueeze(1)`): it lends its name, and the kernel is read.
        name, own = self.parameters.get(id(weight._base)), [x, weight]
    if name is None or (len(own) > 1 and weight.numel() != weight._base.numel()):
        raise Refused(f"{place()}: a convolution whose kernel is computed")
    return self.record("convolution", own, result, name, self.parameters.get(id(bias)) if bias is not None else None,
                       module=name.rpartition(".")[0], weights=[w for w in (weight, bias) if w is not None])


# ---- rules by name of function ---------------------------------------------------------------------------------------


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


@rule("setitem")
def _assign(self, func, args, kwargs):
    x, index, value = args
    if tensors_in([index]) or not isinstance(value, torch.Tensor) or not self.needed([x, value]):
        return NotImplemented
    func(*args, **kwargs)
    self.in_place("assign", x, value)


@rule("copy")
def _copied(self, func, args, kwargs):
    x, value = args[:2]
    if not isinstance(value, torch.Tensor) or not self.needed([x, value]):
        return NotImplemented
    func(*args, **kwargs)
    self.in_place("assign", x if x._base is None else x._base, value)
    return x


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
    if name == "__bool__" and "/transformers/masking_utils.py:" in place().replace("\\", "/"):
        # It asks whether all of a batch is there, and one sequence to a row: so it is taken to be.
        return True
    if name == "__bool__" and "layerdrop" in linecache.getline(place().rpartition(":")[0], int(place().rpartition(":")[2])):
        # No layer is left out: that is what takes the most.
        return False
    if name in ("float", "bool", "int") and not name.startswith("__"):
        return _cast(self, func, args, kwargs)
    if name in ("item", "tolist", "nonzero", "unique", "masked_select", "numpy", "unique_consecutive", "__bool__", "__int__", "__float__", "__index__"):
        raise Refused(f"{place()}: what runs depends on values ({name.strip('_')})")
    return NotImplemented

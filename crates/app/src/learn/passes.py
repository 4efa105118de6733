"""One forward pass recorded, and several written as one: sizes as expressions, layers that do the same once."""

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch.overrides import _pop_mode_temporarily

import rules  # noqa: F401 (puts them in place)
from expressions import fit
from recorder import NAMES, TRAINED, Above, Recorder, Refused, tensors_in

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


class Replaced:
    """A module's forward function, for a while another."""

    def __init__(self, module, function):
        self.module = module
        module.forward = function

    def remove(self):
        del self.module.forward


def experts(recorder, path, module):
    """Experts that run by transformers' interface: the core knows how, so they are one step."""
    act = type(module.act_fn).__name__.lower() if hasattr(module, "act_fn") else ""
    kind = next((known for known in ("silu", "gelu", "relu") if known in act), None)
    own = getattr(type(module), "_apply_gate", None)
    usual = getattr(own, "__name__", "") == "_default_apply_gate" or not module.has_gate
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if kind is None or "relu2" in act or "squared" in act or not usual or module.has_post_expert_norm or not module.is_concatenated:
        return None

    def forward(hidden_states, top_k_index, top_k_weights):
        with _pop_mode_temporarily():
            result = torch.empty_like(hidden_states)
        names = [f"{path}.{name}" for name in (first, "down_proj")]
        if module.has_bias:
            names += [f"{path}.{name}_bias" for name in (first, "down_proj")]
        weights = [dict(module.named_parameters())[name.rpartition(".")[2]] for name in names]
        top_k = int(top_k_index.shape[-1])
        return recorder.record("experts", [hidden_states, top_k_index, top_k_weights], result, top_k, module.has_gate, kind,
                               module.is_transposed, *names, weights=weights)

    return forward


def watch(recorder, model):
    """Says when modules begin and end."""
    handles = []
    for path, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate") and (known := experts(recorder, path, module)):
            handles.append(Replaced(module, known))
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
            output = model(**nested(kwargs))
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


def nested(kwargs):
    """`added_cond_kwargs.time_ids` is an entry of a dictionary."""
    result = {}
    for name, value in kwargs.items():
        *parents, last = name.split(".")
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return result


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


def fold(steps, layers):
    """What comes again layer by layer, once: names with `{}` for the layer's number, values counted from the layer's start;
    a value from before the layer and the one before it is a string."""
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
        blocks = []
        for k, (a, b) in enumerate(zip(places, places[1:])):
            near = counts[places[max(k - 1, 0)]]
            blocks.append(normal(steps[a:b], counts[a], near, path, steps[a][1]))
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


def normal(steps, start, near, path, name):
    """A layer's steps without what is its own."""
    index = name.rpartition(".")[2]
    if not index.isdigit():
        return None

    def rename(text):
        return f"{path}.{{}}{text[len(name):]}" if isinstance(text, str) and (text == name or text.startswith(name + ".")) else text

    def value(v):
        return str(v) if v < near else v - start

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

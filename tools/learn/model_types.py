"""Learns which parameters the models of a library have, as expressions of their configs.

    python tools/learn/model_types.py OUT.jsonl [TYPE…]

Every type of the installed transformers is built on torch's meta device by its class defaults, and again with each key of
its config changed: what follows a key is written as an expression of it, what is repeated as a range, what comes and goes
with a flag under a condition. Keys that could not be followed are listed as fixed: a config with another value there is not
answered from the table. Everything is checked against models built from configs in which all keys differ at once.
"""

import copy
import gc
import json
import os
import re
import sys
import time
import warnings
from collections import defaultdict

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from classes import CLASSES, needed
from expressions import fit, number

DEPTH = re.compile(r"(^|_)(layers?|depths?|blocks?|n_layer)$|num_hidden_layers|num_.*_layers|_layers$")
# Keys of every config that no module is built from.
NEVER = re.compile(
    r"(^|\.)(transformers_version|architectures|_name_or_path|torch_dtype|dtype|id2label|label2id|problem_type|output_.*"
    r"|return_dict|use_cache|.*_token_id|.*_token_index|tokenizer_class|initializer_.*|.*_dropout|.*_dropout_prob|dropout"
    r"|.*_eps|rope_theta|rope_scaling|rope_parameters.*|chunk_size_feed_forward|_attn_implementation.*|pruned_heads)$"
)
ACTIVATIONS = re.compile(r"(act|activation|act_fn|activation_function|nonlinearity)$")
WORDS = re.compile(r"[A-Za-z_][\w.]*(?:\[\d+\])?(?:\.\w+)*")
TIME = float(os.environ.get("LEARN_SECONDS", 40))


def leaves(tree, path=""):
    """Every value of a config by its dotted path; lists of numbers by element."""
    for key, value in tree.items():
        at = f"{path}{key}"
        if isinstance(value, dict) and not NEVER.search(at):
            yield from leaves(value, at + ".")
        elif isinstance(value, (list, tuple)) and 0 < len(value) <= 8 and all(number(x) is not None for x in value):
            for place, item in enumerate(value):
                yield f"{at}[{place}]", item
        elif not isinstance(value, dict):
            yield at, value


def put(tree, path, value):
    *parents, last = re.findall(r"[^.\[\]]+|\[\d+\]", path)
    for name in parents:
        tree = tree[int(name[1:-1])] if name.startswith("[") else tree[name]
    if last.startswith("["):
        tree[int(last[1:-1])] = value
    else:
        tree[last] = value


def kind_of(module, name):
    if isinstance(module, torch.nn.Linear):
        return "L"
    if isinstance(module, torch.nn.Embedding):
        return "E"
    if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        return "C"
    if type(module).__name__ == "Conv1D":
        return "T"
    return "N" if "norm" in type(module).__name__.lower() else "O"


class Reads:
    """Which keys of a config are looked at while a model is built."""

    def __init__(self):
        self.on, self.seen = False, set()
        plain = transformers.PreTrainedConfig.__getattribute__

        def look(config, name):
            if self.on and not name.startswith("__"):
                self.seen.add(name)
            return plain(config, name)

        transformers.PreTrainedConfig.__getattribute__ = look


READS = Reads()


class Point:
    """A model built from a config."""

    def __init__(self, config, tree, auto_class, labels=None):
        self.tree = tree
        built = config.to_dict()
        READS.on, READS.seen = True, set()
        try:
            with torch.device("meta"):
                # Of several classes, the first.
                config.architectures = []
                model = getattr(transformers, auto_class).from_config(config)
        finally:
            READS.on = False
        # What the class puts there itself, whatever a config says.
        after = dict(leaves(config.to_dict()))
        self.own = {path for path, value in leaves(built) if after.get(path) != value}
        self.model_class = type(model).__name__
        self.reads = READS.seen
        self.layers = {id(m): n for n, m in model.named_modules()}
        self.parameters = {}
        for path, module in model.named_modules():
            for name, tensor in module.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                self.parameters[full] = (kind_of(module, name) if name in ("weight", "bias") else "O", tuple(tensor.shape))
        unique = dict(model.named_parameters())
        self.tied = []
        first = {id(tensor): name for name, tensor in unique.items()}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            if name not in unique:
                self.tied.append((name, first[id(tensor)]))
        self.parameters = {name: self.parameters[name] for name in unique}
        self.env = dict(leaves(tree))
        self.lists = {}
        for source in (tree, built):
            self.collect(source, "")
        self.env["num_labels"] = config.num_labels

    def collect(self, tree, path):
        for key, value in tree.items():
            if isinstance(value, dict):
                self.collect(value, f"{path}{key}.")
            elif isinstance(value, (list, tuple)) and value and all(isinstance(x, (str, int)) for x in value):
                self.lists[path + key] = list(value)

    def numbers(self):
        return {name: value for name, value in ((k, number(v)) for k, v in self.env.items()) if value is not None}


def alternatives(path, value):
    """Other values worth trying for a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        if value < 0:
            return []
        if DEPTH.search(re.sub(r"\[\d+\]$", "", path)) and value <= 128:
            return [value + 1, value + 2, max(1, value - 1)]
        tries = [value * 2, value * 4] if value else [1, 2]
        return tries + ([value // 2] if value > 1 and value % 2 == 0 else []) + [value * 3, value + 1, value - 1]
    if isinstance(value, float):
        return [value * 2, value / 2, value + 1]
    if value is None:
        return [8, True, [1]]
    if isinstance(value, (list, tuple)) and value and all(isinstance(x, float) for x in value):
        return [[x * 2 + 1 for x in value]]
    if isinstance(value, (list, tuple)) and value and all(isinstance(x, str) for x in value):
        return [value[1:] + value[:1], [value[0]] * len(value)]
    if isinstance(value, str) and ACTIVATIONS.search(path):
        return ["relu", "gelu"] if value != "relu" else ["gelu", "silu"]
    return []


class Refused(Exception):
    pass


class Learner:
    def __init__(self, model_type, auto_class, shared=None):
        self.model_type, self.auto_class = model_type, auto_class
        self.config_class = CONFIG_MAPPING[model_type]
        self.deadline = time.process_time() + TIME
        self.fixed = {}
        self.default = self.config_class(**needed(model_type, auto_class)).to_dict()
        self.shared = shared

    def point(self, tree):
        if time.process_time() > self.deadline:
            raise TimeoutError
        tree = copy.deepcopy(tree)
        config = self.config_class.from_dict(copy.deepcopy(tree))
        return Point(config, tree, self.auto_class)

    def try_point(self, tree):
        try:
            return self.point(tree)
        except TimeoutError:
            raise
        except Exception:
            return None

    # ---- points ------------------------------------------------------------------------------------------------------

    def per_layer_lists(self, tree, path="", found=None):
        found = [] if found is None else found
        for key, value in tree.items():
            if isinstance(value, dict):
                self.per_layer_lists(value, f"{path}{key}.", found)
            elif isinstance(value, list) and value and (len(value) > 8 or all(isinstance(x, str) for x in value)):
                found.append(path + key)
        return found

    def changed(self, tree, changes):
        """A config with some keys changed; lists that have an entry per layer are left to the class where depths change."""
        before, tree = dict(leaves(tree)), copy.deepcopy(tree)
        for path, value in changes.items():
            put(tree, path, value)
        depths = {p: before.get(p) for p in changes if DEPTH.search(re.sub(r"\[\d+\]$", "", p))}
        for path in self.per_layer_lists(tree) if depths else ():
            *parents, last = path.split(".")
            node = tree
            for name in parents:
                node = node[name]
            if path not in changes and any(len(node[last]) == old != changes[p] for p, old in depths.items()):
                del node[last]
        return tree

    def learn(self):
        deadline, self.deadline = self.deadline, float("inf")
        self.whole = self.point(self.default)
        self.deadline = deadline
        try:
            return self.follow()
        except (TimeoutError, Refused) as error:
            return self.literal(repr(error))

    def relevant(self):
        """Keys that a module may be built from: looked at while building, or others follow them."""
        before = dict(leaves(self.config_class.from_dict(copy.deepcopy(self.default)).to_dict()))
        for path, value in leaves(self.default):
            if NEVER.search(path) or path == "model_type":
                continue
            last = re.sub(r"\[\d+\]$", "", path.split(".")[-1])
            if last in self.whole.reads or last in ATTRIBUTES.get(self.model_type, ()):
                yield path, value
                continue
            for other in alternatives(path, value)[:2]:
                try:
                    tree = copy.deepcopy(self.default)
                    put(tree, path, other)
                    after = dict(leaves(self.config_class.from_dict(tree).to_dict()))
                except Exception:
                    continue
                if any(after.get(k, v) != v for k, v in before.items() if k != path):
                    yield path, value
                    break

    def follow(self):
        relevant = dict(self.relevant())
        # A shallow model to change keys on.
        base_tree, base = self.default, self.whole
        deep = [p for p, v in relevant.items() if isinstance(v, int) and not isinstance(v, bool)
                and DEPTH.search(re.sub(r"\[\d+\]$", "", p)) and v > 6]
        parts = lambda point: {(re.sub(r"\.\d+\.", ".*.", name), *what) for name, what in point.parameters.items()}
        for depth in (4, 6, 9, 12):
            changes = {p: depth for p in deep if relevant[p] > depth}
            found = changes and self.try_point(self.changed(self.default, changes))
            # It must have a layer of every kind that the whole one has.
            if found and parts(found) == parts(self.whole):
                base_tree, base = found.tree, found
                break
        base_tree = copy.deepcopy(base_tree)
        for path in relevant:
            if isinstance(relevant[path], list) and path in base.lists:
                put(base_tree, path, base.lists[path])
                base.env[path] = base.lists[path]
        self.base = base
        self.single, self.together = {}, []
        self.free, self.sizes, self.flags = set(), set(), set()
        same = lambda a, b: a.parameters == b.parameters and a.tied == b.tied
        for path, value in relevant.items():
            if isinstance(value, str) and not ACTIVATIONS.search(path):
                self.fixed[path] = value
                continue
            value = base.env.get(path, value)
            good, seen_same = [], 0
            for other in alternatives(path, value):
                if other == value:
                    continue
                found = self.try_point(self.changed(base_tree, {path: other}))
                if not found:
                    continue
                if same(found, base):
                    seen_same += 1
                    if seen_same > 1 or isinstance(value, (bool, str)) or value is None:
                        break
                    continue
                good.append((other, found))
                if len(good) == 2 or isinstance(value, bool):
                    break
            if good and isinstance(value, bool):
                self.flags.add(path)
                self.single[path] = good
            elif good and (number(value) is not None or isinstance(value, list)):
                self.sizes.add(path)
                self.single[path] = good
            elif good:
                self.fixed[path] = value
            elif seen_same:
                self.free.add(path)
            elif value is None or isinstance(value, list):
                self.fixed[path] = value if not isinstance(value, list) else None
            else:
                self.fixed[path] = value
        self.pairs(base_tree, base, same)
        labelled = copy.deepcopy(base_tree)
        labelled["id2label"] = {str(i): f"LABEL_{i}" for i in range(7)}
        labelled["label2id"] = {f"LABEL_{i}": i for i in range(7)}
        found = self.try_point(labelled)
        self.labels = bool(found and not same(found, base))
        self.labelled = found if self.labels else None
        if self.labels:
            self.sizes.add("num_labels")
        self.joints = self.joint(base_tree)
        return self.write()

    def pairs(self, base_tree, base, same):
        """Keys that cannot change alone: heads and their width, say."""
        stuck = [p for p, v in self.fixed.items() if isinstance(base.env.get(p), int) and not isinstance(v, bool) and v]
        if len(stuck) > 6:
            return
        partners = stuck + [p for p in sorted(self.sizes) if number(base.env.get(p)) is not None]
        for path in stuck:
            if path not in self.fixed:
                continue
            for partner in partners:
                if partner == path or not isinstance(base.env.get(partner), int):
                    continue
                good = []
                for up, down in ((2, 1), (3, 1), (1, 2), (1, 4)):
                    value, other = base.env[path] * 2 // (1 if up > 1 else 1), base.env[partner]
                    value = base.env[path] * (up if up > 1 else down)
                    other = other * up if up > 1 else other // down
                    if other == 0 or (up == 1 and base.env[partner] % down):
                        continue
                    found = self.try_point(self.changed(base_tree, {path: value, partner: other}))
                    if found and not same(found, base):
                        good.append((value, other, found))
                    if len(good) == 2:
                        break
                if good:
                    for name, place in ((path, 0), (partner, 1)):
                        self.fixed.pop(name, None)
                        self.sizes.add(name)
                        self.single.setdefault(name, [])
                        self.single[name] += [(one[place], one[2]) for one in good]
                    for value, other, _ in good:
                        self.together.append({path: value, partner: other})
                    break

    def joint(self, base_tree):
        import random
        rng = random.Random(7)
        sizes = sorted(p for p in self.sizes if p != "num_labels")
        found = []
        keep = len(sizes)
        for attempt in range(24):
            if len(found) == 4:
                break
            chosen = sizes if attempt == 0 else rng.sample(sizes, max(1, min(len(sizes), keep))) if sizes else []
            if not chosen:
                break
            changes = {p: rng.choice(self.single[p])[0] for p in chosen}
            for pair in self.together[:: rng.choice((1, -1))]:
                if set(pair) <= set(changes):
                    changes.update(pair)
            point = self.try_point(self.changed(base_tree, changes))
            if point:
                point.changed = set(chosen)
                found.append(point)
                keep = max(2, len(sizes) * 2 // 3)
            else:
                keep = max(2, keep * 3 // 4)
        return found

    # ---- from points to a table --------------------------------------------------------------------------------------

    def points(self):
        seen = {id(self.base), id(self.whole)}
        yield self.base
        if self.whole is not self.base:
            yield self.whole
        for path in sorted(self.sizes):
            for _, point in self.single.get(path, ()):
                changed = [p for p in self.fixed if point.env.get(p) != self.base.env.get(p)]
                if id(point) not in seen and not changed:
                    seen.add(id(point))
                    yield point
        if self.labelled:
            yield self.labelled
        yield from self.joints

    def loops(self, points):
        """Lists of modules whose length changes between the points: their paths, outer loops as `{}`, and expressions."""
        found = {}
        for _ in range(3):
            counts = defaultdict(lambda: [None] * len(points))
            uneven = set()
            for place, point in enumerate(points):
                here = defaultdict(set)
                for name in point.parameters:
                    parts = canonical(name, found)[0].split(".")
                    literal = name.split(".")
                    for k, part in enumerate(parts):
                        if part.isdigit():
                            outer = tuple(literal[j] for j in range(k) if parts[j] == "{}")
                            here[(".".join(parts[:k]), outer)].add(int(part))
                for (path, outer), indices in here.items():
                    n = max(indices) + 1
                    if counts[path][place] not in (None, n):
                        uneven.add(path)
                    counts[path][place] = n
            new = {}
            for path, row in counts.items():
                if len(set(row)) > 1 and None not in row and path not in uneven:
                    if not any(path != other and path.startswith(other + ".") and other not in found for other in new):
                        new[path] = row
            new = {p: r for p, r in new.items() if p not in found}
            if not new:
                break
            for path, row in new.items():
                found[path] = row
        return found

    def names_behind(self, values, points):
        """Size keys that a value follows, by the points where one key alone is changed."""
        base = values[0]
        if self.base not in points:
            return set(self.sizes) if len(set(values)) > 1 else set()
        at = {id(point): value for point, value in zip(points, values)}
        names = set()
        for path in self.sizes:
            for _, point in self.single.get(path, ()):
                if id(point) in at and at[id(point)] != base:
                    names.add(path)
        if self.labelled and at.get(id(self.labelled), base) != base:
            names.add("num_labels")
        return names

    def express(self, values, points):
        key = tuple(values)
        if key not in self.known:
            names = self.names_behind(values, points)
            envs = self.envs
            self.known[key] = fit(values, envs, [name for name in names if name in envs[0]])
            if self.known[key] is None:
                self.trouble = (values, names)
                self.blamed |= names or {"?"}
        return self.known[key]

    def write(self):
        for _ in range(8):
            points = self.all_points = list(self.points())
            self.envs = [point.numbers() for point in points]
            self.known, self.blamed, self.trouble = {}, set(), None
            try:
                table = self.table(points)
            except Refused:
                table = None
            if table is not None and not self.blamed:
                break
            blamed = self.blamed & self.sizes
            if not blamed:
                raise Refused(f"nothing to blame: {self.trouble}")
            for path in blamed:
                self.sizes.discard(path)
                self.fixed[path] = self.whole.env.get(path)
            # Where a depth is fixed, the shallow model proves nothing.
            if any(self.base.env.get(p) != self.whole.env.get(p) for p in self.fixed):
                raise Refused("a depth could not be followed")
            self.joints = [p for p in self.joints if not (p.changed & set(self.fixed))]
        else:
            raise Refused("too many keys")
        return self.finish(table)

    def rules(self, points, path):
        yield "", lambda p, i, n: True
        yield "i=0", lambda p, i, n: i == 0
        yield "i>0", lambda p, i, n: i > 0
        yield "i<n-1", lambda p, i, n: i < n - 1
        yield "i=n-1", lambda p, i, n: i == n - 1
        lists = set.intersection(*(set(p.lists) for p in points))
        for name in sorted(lists):
            # An entry for every layer.
            if all(len(p.lists[name]) >= 1 for p in points):
                for value in sorted({x for p in points for x in p.lists[name]}, key=str):
                    test = lambda p, i, n, name=name, value=value: i < len(p.lists[name]) and p.lists[name][i] == value
                    yield f"{name}[i]={json.dumps(value)}", test
                    yield f"{name}[i]!{json.dumps(value)}", lambda p, i, n, t=test: not t(p, i, n)
                if all(isinstance(x, int) for p in points for x in p.lists[name]):
                    yield f"i@{name}", lambda p, i, n, name=name: i in p.lists[name]
                    yield f"i!{name}", lambda p, i, n, name=name: i not in p.lists[name]
        names = [p for p in self.base.numbers() if self.base.numbers()[p].denominator == 1 and self.base.numbers()[p] <= 64]
        for name in names:
            value = lambda p, name=name: int(p.env[name])
            if all(isinstance(p.env.get(name), int) for p in points):
                yield f"i<{name}", lambda p, i, n, v=value: i < v(p)
                yield f"i>={name}", lambda p, i, n, v=value: i >= v(p)
        for name in names:
            value = lambda p, name=name: int(p.env[name])
            if all(isinstance(p.env.get(name), int) and p.env[name] > 0 for p in points):
                for shift in (0, 1):
                    test = lambda p, i, n, v=value, s=shift: (i + s) % v(p) == 0
                    yield f"(i+{shift})%{name}=0", test
                    yield f"(i+{shift})%{name}>0", lambda p, i, n, t=test: not t(p, i, n)
        for step in range(2, 9):
            for rest in range(step):
                test = lambda p, i, n, step=step, rest=rest: i % step == rest
                yield f"i%{step}={rest}", test
                yield f"i%{step}!{rest}", lambda p, i, n, t=test: not t(p, i, n)

    def table(self, points):
        loops = self.loops(points)
        extents = {path: self.express(row, points) for path, row in loops.items()}
        if self.blamed:
            return None
        counts = {path: row for path, row in loops.items()}
        groups = {}
        order = []
        for place, point in enumerate(points):
            for name, (kind, shape) in point.parameters.items():
                pattern, indices = canonical(name, loops)
                if pattern not in groups:
                    groups[pattern] = [dict() for _ in points]
                groups[pattern][place][indices] = (kind, shape)
        # In the order of the whole model.
        for name in self.whole.parameters:
            pattern = canonical(name, loops)[0]
            if pattern not in order:
                order.append(pattern)
        rest = [p for p in groups if p not in order]
        entries = []
        self.rule_cache = {}
        for pattern in order + rest:
            entries += self.entries(pattern, groups[pattern], points, loops)
        return extents, entries, loops

    def entries(self, pattern, group, points, loops):
        depth = pattern.count("{}")
        if depth == 0:
            if any(not g for g in group):
                self.blame_presence(group, points)
                return []
            kind = group[0][()][0]
            return [(kind, pattern, self.shape([g[()][1] for g in group], points), "")]
        outer = pattern[: pattern.index(".{}")]
        signature = tuple(
            (frozenset(g), frozenset((tuple(sorted(k for k, v in g.items() if v[1] == s)) for s in {v[1] for v in g.values()})))
            for g in group
        )
        if (outer, signature) not in self.rule_cache:
            self.rule_cache[(outer, signature)] = self.choose(outer, group, points, loops, depth)
        rules = self.rule_cache[(outer, signature)]
        if rules is None:
            self.blamed |= self.names_behind(loops[outer], points)
            self.blame_presence(group, points)
            if not self.blamed:
                raise Refused(f"no rule for {pattern}")
            return []
        result = []
        for text, chosen in rules:
            kind = next(iter(group[0].values()))[0] if group[0] else next(iter(group[1].values()))[0]
            shapes, where = [], []
            for g, picked, point in zip(group, chosen, points):
                if picked:
                    shapes.append(g[picked[0]][1])
                    where.append(point)
            result.append((kind, pattern, self.shape(shapes, where), text))
        return result

    def choose(self, outer, group, points, loops, depth):
        """Rules over the outermost index that say where a parameter is, so that its shape is one for each rule."""
        counts = loops[outer]
        found = []
        left = [set(g) for g in group]
        for attempt in range(4):
            best = None
            for text, test in self.rules(points, outer):
                picked = []
                fits = any(left)
                for g, rest, point, n in zip(group, left, points, counts):
                    inside = [i for i in range(n) if test(point, i, n)]
                    want = {k for k in rest if k[0] in set(inside)}
                    # All that the rule picks must be there.
                    if {k[0] for k in want} != set(inside) or len({g[k][1] for k in want}) > 1:
                        fits = False
                        break
                    if depth > 1 and len({tuple(sorted(k[1:] for k in want if k[0] == i)) for i in inside}) > 1:
                        fits = False
                        break
                    picked.append(sorted(want))
                if fits and any(picked) and (picked[0] or picked[1]):
                    covered = sum(map(len, picked))
                    if best is None or covered > best[0]:
                        best = (covered, text, picked)
                    if covered == sum(map(len, left)):
                        break
            if best is None:
                return None
            found.append(best[1:])
            left = [rest - set(p) for rest, p in zip(left, best[2])]
            if not any(left):
                return found
        return None

    def blame_presence(self, group, points):
        for g, point in zip(group, points):
            if bool(g) != bool(group[0]):
                for path in self.sizes:
                    if any(point is other for _, other in self.single.get(path, ())):
                        self.blamed.add(path)
                if point in self.joints and not self.blamed:
                    self.blamed |= point.changed
                if point is self.whole and not self.blamed:
                    raise Refused("the shallow model has other parts")

    def shape(self, shapes, points):
        if len({len(s) for s in shapes}) != 1:
            raise Refused("ranks differ")
        dims = []
        for k in range(len(shapes[0])):
            values = [s[k] for s in shapes]
            if len(points) == len(self.envs):
                dims.append(self.express(values, points))
            else:
                names = self.names_behind(values, points)
                envs = [p.numbers() for p in points]
                text = fit(values, envs, [name for name in names if name in envs[0]])
                if text is None:
                    self.trouble = (values, names)
                    self.blamed |= names or {"?"}
                dims.append(text)
        return dims

    # ---- flags -------------------------------------------------------------------------------------------------------

    def finish(self, table):
        extents, entries, loops = table
        # Lists that rules look at: what they are where a config does not say.
        self.conditions = {}
        pool = defaultdict(list)
        extra = []
        for path in sorted(self.flags):
            value = self.base.env[path]
            toggled = self.single[path][0][1]
            more = self.flag(path, value, toggled, entries, loops)
            if more is None:
                self.fixed[path] = self.whole.env[path]
            else:
                extra += more
        return self.result(extents, entries + extra)

    def flag(self, path, value, toggled, entries, loops):
        """What a flag takes away becomes conditional; what it adds is taken from models where sizes differ too."""
        base, other = self.base.parameters, toggled.parameters
        lost = {canonical(n, loops)[0] for n in base if n not in other}
        kept = {canonical(n, loops)[0] for n in base if n in other}
        gained = {canonical(n, loops)[0] for n in other if n not in base}
        moved = {canonical(n, loops)[0] for n in base if n in other and base[n] != other[n]}
        if lost & kept or moved or gained & (kept | lost) or set(self.base.tied) - set(toggled.tied) and not gained:
            return None
        result = []
        if gained:
            points = []
            for joint in [self.base, self.whole, *self.joints]:
                tree = copy.deepcopy(joint.tree)
                put(tree, path, not value)
                point = self.try_point(tree)
                if point is None:
                    return None
                points.append(point)
            envs = [p.numbers() for p in points]
            groups = defaultdict(lambda: [dict() for _ in points])
            for place, point in enumerate(points):
                for name, (kind, shape) in point.parameters.items():
                    pattern, indices = canonical(name, loops)
                    if pattern in gained:
                        groups[pattern][place][indices] = (kind, shape)
            exprs = {}
            for place_values, text in self.known.items():
                if text:
                    exprs.setdefault(text, None)
            for pattern, group in groups.items():
                if any(not g for g in group):
                    return None
                # As wide as something that is there already, at every point.
                shapes = [{v[1] for v in g.values()} for g in group]
                if any(len(s) > 1 for s in shapes):
                    return None
                shapes = [next(iter(s)) for s in shapes]
                dims = []
                for k in range(len(shapes[0])):
                    text = match([s[k] for s in shapes], exprs, envs, len(set(map(lambda s: s[k], shapes))) == 1)
                    if text is None:
                        return None
                    dims.append(text)
                rule = ""
                if "{}" in pattern:
                    outer = pattern[: pattern.index(".{}")]
                    counts = [len({int(n[len(outer) + 1 :].split(".")[0]) for n in p.parameters if n.startswith(outer + ".")}) for p in points]
                    for text, test in self.rules(points, outer):
                        if all({k[0] for k in g} == {i for i in range(n) if test(p, i, n)} for g, p, n in zip(group, points, counts)):
                            rule = text
                            break
                    else:
                        return None
                kind = next(iter(group[0].values()))[0]
                result.append((kind, pattern, dims, rule, (path, not value)))
        for pattern in lost:
            if self.conditions.get(pattern):
                self.conditions[pattern].append((path, value))
            else:
                self.conditions[pattern] = [(path, value)]
        return result

    # ---- results -----------------------------------------------------------------------------------------------------

    def result(self, extents, entries):
        used = set()
        words = lambda text: WORDS.findall(text or "")
        rows = []
        for kind, pattern, dims, rule, *flag in entries:
            conditions = ([rule] if rule else []) + [f"{p}={json.dumps(v)}" for p, v in (self.conditions.get(pattern, []) + flag)]
            rows.append([kind, pattern, ",".join(dims), "&".join(conditions)])
            for text in dims + conditions:
                used |= set(words(text))
        for text in extents.values():
            used |= set(words(text))
        table = {"loops": extents, "parameters": rows}
        return self.describe(table, used, None)

    def literal(self, why):
        """The table of the class defaults alone."""

        # Keys that others follow are among those that are looked at, or change one that is.
        last = lambda path: re.sub(r"\[\d+\]$", "", path.split(".")[-1])
        seen = {p: v for p, v in leaves(self.default) if not NEVER.search(p) and last(p) in self.whole.reads}
        fixed = {p: v for p, v in (seen if TIME == 0 else dict(self.relevant())).items() if p != "model_type"}
        labelled = self.labelled_sizes()
        flexible = [[kind, name, labelled.get(name) or ",".join(map(str, shape)), ""] for name, (kind, shape) in self.whole.parameters.items()]
        self.fixed = fixed
        self.free = set()
        return self.describe({"loops": {}, "parameters": flexible}, set(), why)

    def labelled_sizes(self):
        """Sizes that are the number of labels, by parameter: a model of as many labels as nothing else has tells them."""
        count, usual = 1009, self.whole.env["num_labels"]
        config = self.config_class.from_dict(copy.deepcopy(self.default))
        try:
            config.num_labels = count
            other = Point(config, copy.deepcopy(self.default), self.auto_class).parameters
        except Exception:
            return {}
        result = {}
        for name, (_, shape) in self.whole.parameters.items():
            sizes = other.get(name, (None, ()))[1]
            if len(sizes) == len(shape) and sizes != shape and all(a == b or (a, b) == (usual, count) for a, b in zip(shape, sizes)):
                result[name] = ",".join(str(a) if a == b else "num_labels" for a, b in zip(shape, sizes))
        return result

    def absent(self, paths):
        """What a key is where its part of the config is there and it is not: another number, or one that follows others."""
        result = {}
        def value_of(tree, path):
            node = tree
            for name in re.findall(r"[^.\[\]]+|\[\d+\]", path):
                node = node[int(name[1:-1])] if name.startswith("[") else node[name]
            return node
        def resolved(path, changes):
            tree = copy.deepcopy(self.default)
            for key, value in changes.items():
                put(tree, key, value)
            whole = re.sub(r"\[\d+\]$", "", path)
            *parents, last = whole.split(".")
            node = tree
            for name in parents:
                node = node[name]
            node.pop(last, None)
            return value_of(self.config_class.from_dict(tree).to_dict(), path)
        sizes = [p for p in paths if isinstance(self.whole.env.get(p), int) and not isinstance(self.whole.env[p], bool)]
        for path in sorted(paths):
            if path not in self.whole.env or path == "num_labels":
                continue
            default = self.whole.env[path]
            try:
                plain = resolved(path, {})
            except Exception:
                continue
            followed, values, envs = set(), [plain], [self.whole.numbers()]
            beside = [p for p in sizes if p != path and path.rpartition(".")[0] == p.rpartition(".")[0]]
            try:
                if resolved(path, {p: self.whole.env[p] * 2 for p in beside}) == plain:
                    beside = []
            except Exception:
                pass
            for other in beside:
                for factor in (2, 3):
                    try:
                        value = resolved(path, {other: self.whole.env[other] * factor})
                    except Exception:
                        continue
                    values.append(value)
                    envs.append({**self.whole.numbers(), other: number(self.whole.env[other] * factor)})
                    if value != plain:
                        followed.add(other)
            if followed and all(number(v) is not None for v in values):
                text = fit(values, envs, followed)
                if text:
                    result[path] = text
            elif plain != default:
                result[path] = plain
        return result

    def listed(self, used):
        """Lists with an entry per layer that rules look at, as rules themselves."""
        result = {}
        points = [p for p in getattr(self, "all_points", []) if True]
        for name in sorted(used & set(self.whole.lists)):
            rows = []
            for value in sorted({x for p in points for x in p.lists.get(name, [])}, key=str):
                for text, test in self.rules(points, None):
                    if name in text:
                        continue
                    if all({i for i, x in enumerate(p.lists.get(name, [])) if x == value}
                           == {i for i in range(len(p.lists.get(name, []))) if test(p, i, len(p.lists[name]))} for p in points):
                        rows.append([value, text])
                        break
                else:
                    rows = None
                    break
            if rows:
                result[name] = rows
        return result

    def describe(self, table, used, why):
        lists = self.listed(used) if not why else {}
        for rows in lists.values():
            for _, text in rows:
                used |= set(WORDS.findall(text))
        used = {p for p in used if p in self.whole.env or p in self.whole.lists}
        table["absent"] = {} if why else self.absent(used | set(self.fixed))
        for text in table["absent"].values():
            used |= set(WORDS.findall(text)) & set(self.whole.env) if isinstance(text, str) else set()
        table["lists"] = lists
        defaults = {}
        for path in used | set(self.fixed):
            if path in self.whole.env and path != "num_labels":
                defaults[path] = self.whole.env[path]
            elif path in self.whole.lists:
                defaults[path] = self.whole.lists[path]
        table.update(
            {"class": self.whole.model_class, "fixed": sorted(p for p in self.fixed if p in self.whole.env and p not in self.whole.own),
             "defaults": defaults, "tied": sorted(self.whole.tied)}
        )
        # Configs may use the names that all models share.
        names = getattr(self.config_class, "attribute_map", {})
        table["aliases"] = {own: shared for shared, own in names.items() if own in defaults}
        if why:
            table["literal"] = why
        return table


def match(values, exprs, envs, constant):
    if constant:
        return str(values[0])
    for text in exprs:
        try:
            if all(evaluate(text, env) == value for env, value in zip(envs, values)):
                return text
        except (KeyError, ZeroDivisionError):
            continue
    return None


def evaluate(text, env):
    """What an expression is worth; division is Python's `//` at the end of a product."""
    place = 0
    tokens = re.findall(r"\d+|[A-Za-z_][\w.]*(?:\[\d+\])?(?:\.\w+)*|[-+*/^()]", text)

    def atom():
        nonlocal place
        token = tokens[place]
        place += 1
        if token == "(":
            value = total()
            place += 1
        else:
            value = int(token) if token.isdigit() else env[token]
        if place < len(tokens) and tokens[place] == "^":
            value = int(value) ** int(tokens[place + 1])
            place += 2
        return value

    def term():
        nonlocal place
        up, down = atom(), 1
        while place < len(tokens) and tokens[place] in "*/":
            operator = tokens[place]
            place += 1
            if operator == "*":
                up *= atom()
            else:
                down *= atom()
        return up // down

    def total():
        nonlocal place
        value = term()
        while place < len(tokens) and tokens[place] in "+-":
            operator = tokens[place]
            place += 1
            value = value + term() if operator == "+" else value - term()
        return value

    return total()


def canonical(name, loops):
    """A name with the indices of loops taken out."""
    if not loops:
        return name, ()
    parts, out, indices = name.split("."), [], []
    for part in parts:
        if part.isdigit() and ".".join(out) in loops:
            indices.append(int(part))
            out.append("{}")
        else:
            out.append(part)
    return ".".join(out), tuple(indices)


ATTRIBUTES = {}


def classes_of(model_type):
    for auto_class, mapping in CLASSES.items():
        names = getattr(modeling_auto, mapping)
        if model_type in names:
            yield auto_class


def main():
    out, wanted = sys.argv[1], sys.argv[2:]
    for name in wanted:
        model_type, _, only = name.partition(":")
        found = {}
        for auto_class in classes_of(model_type):
            if only and auto_class != only:
                continue
            start = time.time()
            try:
                config_class = CONFIG_MAPPING[model_type]
                ATTRIBUTES[model_type] = set(getattr(config_class, "attribute_map", {}).values())
                table = Learner(model_type, auto_class).learn()
            except Exception as error:
                print(model_type, auto_class, "FAILED", repr(error)[:200], flush=True)
                continue
            found[auto_class] = table
            print(model_type, auto_class, len(table["parameters"]), "fixed", table["fixed"], table.get("literal", ""),
                  f"{time.time() - start:.1f}s", flush=True)
            gc.collect()
        if found:
            with open(out, "a") as file:
                file.write(json.dumps({"type": model_type, "transformers": transformers.__version__, "classes": found}) + "\n")


if __name__ == "__main__":
    main()

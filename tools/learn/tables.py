"""The text of `learned.jsonl.zz` and `heads.jsonl.zz`: tables of parameters with every module written once.

Layers are alike, classes of a type too, and types are copied from each other. So a module is a line of its parts, each behind a
tab: `name number` is the module of that line (from 0), `name kind sizes condition` a parameter. A module stands before all that hold
it. The types follow as JSON (`{"`; a module may begin with `{}`, the place in a list), where `parameters` is the number of a module.
"""

import json


def packed(rows):
    """Rows as text; what is not a list of parameters stays as it is."""
    known = {}

    def number(parts):
        line = "\t".join(f"{name} {what if isinstance(what, str) else number(what)}" for name, what in parts)
        return known.setdefault(line, len(known))

    def table(parameters):
        # Parts in the order of the rows: a module that is left and entered again is there twice.
        tree = []
        for kind, name, sizes, condition in parameters:
            node = tree
            *parents, last = name.split(".")
            for part in parents:
                if not node or node[-1][0] != part or isinstance(node[-1][1], str):
                    node.append((part, []))
                node = node[-1][1]
            node.append((last, f"{kind} {sizes} {condition}"))
        return number(tree)

    types = []
    for row in rows:
        classes = {name: {**one, "parameters": table(one["parameters"])} for name, one in row["classes"].items()}
        types.append(json.dumps({**row, "classes": classes}, separators=(",", ":")))
    return "".join(line + "\n" for line in [*known, *types])


def unpacked(text):
    """The rows of a text."""
    lines = text.splitlines()
    modules = [line for line in lines if not line.startswith('{"')]

    def parameters(number, path):
        for part in modules[number].split("\t"):
            name, what, *more = part.split(" ")
            if more:
                yield [what, path + name, *more]
            else:
                yield from parameters(int(what), f"{path}{name}.")

    rows = [json.loads(line) for line in lines if line.startswith('{"')]
    for row in rows:
        for table in row["classes"].values():
            table["parameters"] = list(parameters(table["parameters"], ""))
    return rows

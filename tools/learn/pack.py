"""Packs what was learned for `crates/core/data`; of several tables of a class, the one that follows most keys is kept.

    python tools/learn/pack.py LEARNED.jsonl… crates/core/data/learned.jsonl.zz

What was packed before may be among the files, so that a few types can be learned anew.
"""

import json
import sys
import zlib


def folded(rows):
    """Lists of modules that are all alike, as loops of a fixed length."""
    tree = {}
    for kind, name, sizes, condition in rows:
        node = tree
        *parents, last = name.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = [kind, sizes]
    loops = {}

    def walk(node, path):
        if isinstance(node, list):
            return [[node[0], path, node[1], ""]]
        keys = list(node)
        numbered = len(keys) > 1 and keys == [str(i) for i in range(len(keys))]
        if numbered and all(isinstance(node[k], dict) and json.dumps(node[k]) == json.dumps(node["0"]) for k in keys):
            loops[path] = str(len(keys))
            return walk(node["0"], path + ".{}")
        return [row for key in keys for row in walk(node[key], f"{path}.{key}" if path else key)]

    return walk(tree, ""), loops


def endless(value):
    """Whether JSON cannot say it: no shape follows an infinite number."""
    return any(map(endless, value)) if isinstance(value, list) else value in (float("inf"), float("-inf"))


def lines(path):
    data = open(path, "rb").read()
    return (zlib.decompress(data) if path.endswith(".zz") else data).decode().splitlines()


def follows(table):
    """Whether sizes or numbers of layers are expressions of keys."""
    texts = [*table.get("loops", {}).values(), *(row[2] for row in table["parameters"])]
    return any(c.isalpha() for text in texts for c in text)


types = {}
for path in sys.argv[1:-1]:
    for row in map(json.loads, lines(path)):
        source = row.get("from") or f"transformers {row['transformers']}"
        known = types.setdefault(row["type"], {"type": row["type"], "from": source, "classes": {}})
        for name, table in row["classes"].items():
            before = known["classes"].get(name)
            worth = lambda table: (not follows(table), len(table.get("fixed", ())))
            if before is None or worth(table) < worth(before):
                known["classes"][name] = table
followed = 0
for known in types.values():
    for table in known["classes"].values():
        followed += follows(table)
        if table.pop("literal", None):
            table["parameters"], table["loops"] = folded(table["parameters"])
        table.pop("class", None)
        table["defaults"] = {key: value for key, value in table["defaults"].items() if not endless(value)}
        table["fixed"] = [key for key in table.get("fixed", ()) if key in table["defaults"]]
        for key in ("loops", "absent", "lists", "aliases", "tied", "fixed"):
            if not table.get(key):
                table.pop(key, None)
text = "".join(json.dumps(types[name], separators=(",", ":")) + "\n" for name in sorted(types))
packed = zlib.compress(text.encode(), 9)
open(sys.argv[-1], "wb").write(packed)
classes = sum(len(t["classes"]) for t in types.values())
print(f"{len(types)} types, {classes} classes of which {followed} follow their configs, {len(text)} bytes, {len(packed)} packed")

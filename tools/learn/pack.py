"""Packs what was learned for `crates/core/data`; of several tables of a class, the one that follows most keys is kept.

    python tools/learn/pack.py LEARNED.jsonl… FOLDER

FOLDER/learned.jsonl.zz gets the types; FOLDER/heads.jsonl.zz heads that give labels and timm's models, which the page does without.
What was packed before may be among the files, so that a few types can be learned anew. Where zopfli is installed, it packs tighter.
"""

import json
import sys
import zlib

import tables

try:
    from zopfli.zlib import compress
except ImportError:
    compress = lambda data: zlib.compress(data, 9)

HEADS = [f"AutoModelFor{what}" for what in ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice",
                                            "AudioClassification", "VideoClassification")]


def folded(rows):
    """Lists of modules that are all alike, as loops of a fixed length."""
    tree = {}
    for kind, name, sizes, condition in rows:
        node = tree
        *parents, last = name.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = [kind, sizes, condition]
    loops = {}

    def walk(node, path):
        if isinstance(node, list):
            return [[node[0], path, *node[1:]]]
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


def read(path):
    data = open(path, "rb").read()
    return tables.unpacked(zlib.decompress(data).decode()) if path.endswith(".zz") else map(json.loads, data.decode().splitlines())


def follows(table, labels=False):
    """Whether sizes or numbers of layers are expressions of keys; with `labels`, whether any are those of labels."""
    texts = ",".join([*table.get("loops", {}).values(), *(row[2] for row in table["parameters"])])
    return "num_labels" in texts if labels else any(c.isalpha() for c in texts.replace("num_labels", "").replace("num_classes", ""))


types = {}
for path in sys.argv[1:-1]:
    for row in read(path):
        source = row.get("from") or f"transformers {row['transformers']}"
        known = types.setdefault(row["type"], {"type": row["type"], "from": source, "classes": {}})
        for name, table in row["classes"].items():
            before = known["classes"].get(name)
            worth = lambda table: (not follows(table), not follows(table, True), len(table.get("fixed", ())))
            if before is None or worth(table) < worth(before):
                known["classes"][name] = table
parts = {"learned": [], "heads": []}
followed = 0
for known in (types[name] for name in sorted(types)):
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
    for name, rows in parts.items():
        head = lambda auto_class: auto_class in HEADS or known["type"].startswith("timm/")
        classes = {key: table for key, table in known["classes"].items() if head(key) == (name == "heads")}
        if classes:
            rows.append({**known, "classes": classes})
for name, rows in parts.items():
    text = tables.packed(rows)
    packed = compress(text.encode())
    open(f"{sys.argv[-1]}/{name}.jsonl.zz", "wb").write(packed)
    print(f"{name}: {len(rows)} types, {sum(len(row['classes']) for row in rows)} classes, {len(text)} bytes, {len(packed)} packed")
print(f"{followed} classes follow their configs")

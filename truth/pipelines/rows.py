"""Rows of measure.py in the format of truth/jobs: `python rows.py out.jsonl > ../jobs/NAME.jsonl`."""
import json, sys
sys.path.insert(0, __file__.rsplit("/", 1)[0] or ".")
from configs import PIPELINES, shallow

for line in open(sys.argv[1]):
    r = json.loads(line)
    if not r["ok"]: continue
    j = {**r["job"], "kind": "pipeline"}; layers = j.pop("layers", None); name = j.pop("pipeline"); j.pop("id")
    config = {k: shallow(v, layers) if layers and isinstance(v, dict) else v for k, v in PIPELINES[name].items()}
    config = {k: {a: b for a, b in v.items() if a != "_class"} if isinstance(v, dict) else v for k, v in config.items()}
    measured = {k: r[k] for k in ("loaded", "peak_allocated", "peak_reserved", "retries", "params", "phases")}
    print(json.dumps({"id": r["id"], "model": name, "auto_class": None, "config": config, "job": j, "software": r["software"], "gpu": r["gpu"], "oom": False, "measured": measured}))

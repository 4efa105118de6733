"""rows.py LEDGER [ID,ID,…]: the ledger's runs, to be started by `vramcast rehearse`; one process forked for each.

Prints, for every row, how far the peaks are from the recorded ones, and at the end the score that must hold.
Run it through torch.sh beside this file.
"""
import json, os, statistics, sys, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../truth/ledger"))
import measure, torch

TASKS = {"train": measure.run_train, "trainer": measure.run_trainer, "infer": measure.run_infer, "deepspeed": measure.run_deepspeed}


def prepare(row):
    """measure.py gives DeepSpeed a group whose collectives leave their results empty; checks across ranks mean nothing then."""
    if row["run"].get("alloc_conf"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = row["run"]["alloc_conf"]
    if row["run"]["task"] == "deepspeed":
        import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator, deepspeed.runtime.zero.utils as utils

        for module in (coordinator, utils):
            for name in [name for name in dir(module) if name.startswith("assert_") and "same_as_other_ranks" in name]:
                setattr(module, name, lambda *args, **options: None)


def rehearse(row):
    recorder, error = measure.Recorder(), None
    try:
        prepare(row)
        torch.manual_seed(0)
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        model = {key: row[key] for key in ("config", "kind", "auto_class")}
        TASKS[row["run"]["task"]](model, {**row["run"], "id": row["id"]}, recorder, {})
    except BaseException as problem:
        error = type(problem).__name__ + ": " + str(problem)[:200]
    peaks = {key: recorder.peak(name) for key, name in (("peak_allocated", "peak"), ("peak_reserved", "peak_reserved"))} if recorder.phases else {}
    return {"id": row["id"], "error": error, **peaks}


def main():
    wanted = set(sys.argv[2].split(",")) if len(sys.argv) > 2 else None
    rows = [row for row in map(json.loads, open(sys.argv[1])) if not wanted or row["id"] in wanted]
    errors, failed = [], 0
    for row in rows:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(writer, "w") as pipe:
                pipe.write(json.dumps(rehearse(row)))
            os._exit(0)
        os.close(writer)
        started = time.time()
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        found = json.loads(text) if text else {"error": "ended without a word"}
        line = f"{row['id']} {row['model'][:32]:32} {row['run']['task']:9} {time.time() - started:5.1f} s"
        if row.get("oom"):
            good = "OutOfMemoryError" in (found["error"] or "")
            line += "  out of memory, as recorded" if good else "  should not have fitted"
            failed += not good
        elif found["error"] or "peak_allocated" not in found:
            line += f"  {found['error']}"
            failed += 1
            errors.append(100.0)
        else:
            off = {key: 100 * (found[key] / row["measured"][key] - 1) for key in ("peak_allocated", "peak_reserved")}
            errors.append(abs(off["peak_allocated"]))
            line += "".join(f"  {key} {value:+.4f} %" for key, value in off.items())
        print(line, flush=True)
    if errors:
        close = sum(error <= 0.1 for error in errors)
        median = statistics.median(errors)
        print(f"{len(errors)} rows: peak allocated off by {median:.4f} % in the median, {close} ({100 * close / len(errors):.1f} %) within 0.1 %, {failed} failed")
        sys.exit(0 if median <= 0.01 and close >= 0.92 * len(errors) else 1)
    sys.exit(1 if failed else 0)


main()

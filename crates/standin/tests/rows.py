"""rows.py LEDGER [--only ID,ID,…] [--jobs N] [--out FILE]: the ledger's runs, to be started by `vramcast rehearse`.

One process is forked for each. Prints, for every row, how far the peaks are from the recorded ones, and at the end the
score that must hold. Run it through torch.sh beside this file.
"""
import argparse, json, os, statistics, sys, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../truth/ledger"))
import measure, torch

TASKS = {"train": measure.run_train, "trainer": measure.run_trainer, "infer": measure.run_infer, "deepspeed": measure.run_deepspeed}
KINDS = (("peak_allocated", "peak"), ("peak_reserved", "peak_reserved"))
CLOSE = 0.1  # per cent


def depends_on_data(row):
    """LLM.int8 picks outlier columns by their values, and a device without data has none."""
    return row["run"].get("quant") == "int8"


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
    peaks = {key: recorder.peak(name) for key, name in KINDS} if recorder.phases else {}
    return {"id": row["id"], "error": error, "phases": recorder.phases, **peaks}


class Row:
    """One row on its way: the process, and the pipe that its answer comes through."""

    def __init__(self, row):
        self.row, self.started = row, time.time()
        self.reader, writer = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(self.reader)
            with os.fdopen(writer, "w") as pipe:
                pipe.write(json.dumps(rehearse(row)))
            os._exit(0)
        os.close(writer)

    def finish(self):
        """Waits for it; gives what it found and the line about it."""
        with os.fdopen(self.reader) as pipe:
            text = pipe.read()
        os.waitpid(self.child, 0)
        return json.loads(text) if text else {"id": self.row["id"], "error": "ended without a word"}


def judge(row, found):
    """What to say of a row, its error in per cent (none where the record is that it does not fit), whether it failed."""
    if row.get("oom"):
        good = "OutOfMemoryError" in (found["error"] or "")
        return "out of memory, as recorded" if good else "should not have fitted", None, not good
    if found["error"] or "peak_allocated" not in found:
        return found["error"], 100.0, True
    off = {key: 100 * (found[key] / row["measured"][key] - 1) for key, _ in KINDS}
    text = "  ".join(f"{key} {value:+.4f} %" for key, value in off.items())
    if abs(off["peak_allocated"]) > CLOSE:
        text += "  depends on data: LLM.int8" if depends_on_data(row) else "  OFF"
    return text, abs(off["peak_allocated"]), False


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("ledger")
    parser.add_argument("--only", help="rows by their ids, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--out", help="a file for what was found, one JSON object a line")
    options = parser.parse_args()
    wanted = set(options.only.split(",")) if options.only else None
    waiting = [row for row in map(json.loads, open(options.ledger)) if not wanted or row["id"] in wanted]
    out = open(options.out, "w") if options.out else None
    running, errors, failed = [], {}, 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(Row(waiting.pop(0)))
        first = running.pop(0)
        row, found = first.row, first.finish()
        text, error, bad = judge(row, found)
        failed += bad
        if error is not None:
            errors[row["id"]] = error
        print(f"{row['id']} {row['model'][:32]:32} {row['run']['task']:9} {time.time() - first.started:5.1f} s  {text}", flush=True)
        if out:
            print(json.dumps(found), file=out, flush=True)
    if errors:
        close, median = sum(error <= CLOSE for error in errors.values()), statistics.median(errors.values())
        print(f"{len(errors)} rows: peak allocated off by {median:.4f} % in the median, {close} ({100 * close / len(errors):.1f} %) within {CLOSE} %, {failed} failed")
        sys.exit(0 if median <= 0.01 and close >= 0.92 * len(errors) else 1)
    sys.exit(1 if failed else 0)


main()

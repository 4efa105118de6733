"""What was alive at the peak, by line of source. Part of `vramcast rehearse`; standard library only."""
import os

HERE = os.path.dirname(os.path.abspath(__file__))
LARGEST_HISTORY = 2_000_000  # allocations and frees that torch is asked to keep


def at(trace, run):
    """The largest sum of a list of allocations and frees, what was alive then by line of source, and what it was for."""
    now, most, last = 0, 0, -1
    sizes = {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            now += event["size"]
            if now > most:
                most, last = now, index
        elif event["action"] == "free_completed":
            now -= sizes.pop(event["addr"], 0)
    alive = {}
    for event in trace[:last + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    lines = {}
    for event in alive.values():
        line = lines.setdefault(source(event.get("frames", ())), [0, 0])
        line[0] += event["size"]
        line[1] += 1
    largest = sorted(lines.items(), key=lambda item: -item[1][0])
    deaths = {}
    for event in trace[last + 1:]:
        if event["action"] == "free_completed" and event["addr"] in alive:
            deaths.setdefault(event["addr"], event["time_us"])
    lives = {address: (event["size"], event["time_us"], deaths.get(address, float("inf"))) for address, event in alive.items()}
    return {"requested": most, "truncated": len(trace) >= LARGEST_HISTORY, "parts": run.parts(lives),
            "lines": [{"source": name, "bytes": size, "count": count} for name, (size, count) in largest]}


def source(frames):
    """The innermost lines outside torch, or of torch where there are no others; autograd's own threads have none."""
    shown = [frame for frame in frames if is_the_programs(frame["filename"])] or list(frames)
    lines = [f"{os.path.basename(frame['filename'])}:{frame['line']} {frame['name']}" for frame in shown[:2]]
    return " < ".join(lines) or "backward (autograd's own thread)"


def is_the_programs(path):
    return bool(path) and f"{os.sep}torch{os.sep}" not in path and os.path.dirname(path) != HERE and not path.startswith("<frozen")


def without_us(snapshot):
    """torch's snapshot, less the frames of these files: who reads it looks for the program's own."""
    events = [event for trace in snapshot["device_traces"] for event in trace]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for holder in events + blocks:
        holder["frames"] = [frame for frame in holder.get("frames", ()) if os.path.dirname(frame["filename"]) != HERE]
    return snapshot

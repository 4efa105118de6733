#!/usr/bin/env python3
"""A hundred clients at a server, with plans drawn from everything, heavy ones among them (docs/benchmarks.md).

    python3 benches/load.py target/release/vramcast --seconds 600

Two phases on one server: light plans alone, then the same with one request in ten heavy. Printed as JSON: answers by
status, the times of light requests in both phases, and the server's resident memory over time. Standard library only.
"""
import argparse, asyncio, json, random, statistics, subprocess, time, urllib.request

LIGHT_MODELS = ["gpt2", "llama3-8b", "microsoft/phi-2", "Qwen/Qwen2.5-0.5B", "google-bert/bert-base-uncased", "google-t5/t5-small",
                "openai/whisper-tiny", "google/vit-base-patch16-224", "meta-llama/Meta-Llama-3-70B", "mistralai/Mixtral-8x7B-v0.1"]
DECODERS = ["gpt2", "llama3-8b", "microsoft/phi-2", "Qwen/Qwen2.5-0.5B"]
ENGINES = ["vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "ollama"]
HEAVY = [
    ("train", {"model": "state-spaces/mamba-2.8b-hf"}),
    ("train", {"model": "state-spaces/mamba-130m-hf", "plan": {"batch": {"seq_len": 100_000}}}),
    ("train", {"model": "RWKV/rwkv-4-169m-pile"}),
    ("infer", {"model": "deepseek-ai/DeepSeek-V3", "gpus_all": True}),
    ("infer", {"model": "Qwen/Qwen3-235B-A22B", "suggestions": True}),
    ("train", {"model": "meta-llama/Llama-3.1-405B", "suggestions": True, "gpus_all": True}),
    ("train", {"model": "gpt2", "plan": {"job": {"steps": 1000, "lengths": {"lognormal": {"mean": 6.0, "deviation": 1.0}}}}}),
]


def light(draw):
    kind = draw.randrange(5)
    if kind == 0:
        return "inspect", {"model": draw.choice(LIGHT_MODELS)}
    if kind == 1:
        engine = draw.choice(ENGINES)
        return "infer", {"model": draw.choice(DECODERS[1:]), "engine": engine, "engine_options": {"context": draw.choice([512, 1024, 2048])}}
    if kind == 2:
        return "infer", {"model": draw.choice(DECODERS), "plan": {"batch": {"batch_size": draw.randrange(1, 9), "seq_len": 512}, "new_tokens": 16}}
    plan = {"batch": {"batch_size": draw.randrange(1, 17), "seq_len": draw.choice([64, 128, 256, 512])}}
    if kind == 3:
        plan["adapter"] = {"method": "lora", "r": draw.choice([8, 64])}
    return "train", {"model": draw.choice(DECODERS), "plan": plan}


async def ask(port, path, body):
    """One request on a connection of its own; its status and seconds."""
    data = json.dumps(body).encode()
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1]), time.monotonic() - began
    except (OSError, IndexError, ValueError):
        return 0, time.monotonic() - began


def resident(process):
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))


async def phase(port, process, clients, seconds, heavy_share):
    until, statuses, times, memory = time.monotonic() + seconds, {}, {"light": [], "heavy": []}, []

    async def client(number):
        draw = random.Random(number)
        while time.monotonic() < until:
            heavy = draw.random() < heavy_share
            status, took = await ask(port, *(draw.choice(HEAVY) if heavy else light(draw)))
            kind = "heavy" if heavy else "light"
            statuses.setdefault(kind, {}).setdefault(status, 0)
            statuses[kind][status] += 1
            times[kind].append(took)

    async def watch():
        while time.monotonic() < until:
            memory.append(resident(process))
            await asyncio.sleep(max(seconds / 20, 0.5))

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))

    def summary(taken):
        cuts = statistics.quantiles(taken, n=100) if len(taken) > 1 else [0] * 99
        return {"answers": len(taken), "p50_ms": round(1000 * cuts[49]), "p99_ms": round(1000 * cuts[98])}

    return {"statuses": statuses, **{kind: summary(taken) for kind, taken in times.items()}, "resident_mib": memory}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("binary")
    arguments.add_argument("--seconds", type=float, default=600)
    arguments.add_argument("--clients", type=int, default=100)
    arguments = arguments.parse_args()
    server = subprocess.Popen([arguments.binary, "serve", "--port", "0", "--rate", "0", "--log-format", "off"], stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline().rstrip("/\n").rsplit(":", 1)[1])
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/models").read()
        alone = asyncio.run(phase(port, server.pid, arguments.clients, arguments.seconds / 5, 0.0))
        mixed = asyncio.run(phase(port, server.pid, arguments.clients, arguments.seconds, 0.1))
        ratio = mixed["light"]["p99_ms"] / max(alone["light"]["p99_ms"], 1)
        print(json.dumps({"alone": alone, "mixed": mixed, "p99_of_light_times": round(ratio, 2)}, indent=1))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

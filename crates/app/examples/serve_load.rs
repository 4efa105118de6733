//! How much `vramcast serve` takes: mixed estimates over loopback, beside the same estimates in this process.
//!
//! ```text
//! cargo build --release -p vramcast
//! cargo run --release -p vramcast --example serve_load -- target/release/vramcast [SECONDS] [CLIENTS]
//! ```
//!
//! Prints the table of docs/benchmarks.md. Everything is measured in one run, so that a busy machine slows all of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::{Checkpointing, RunPlan, TrainPlan};
use vramcast_core::report;
use vramcast_core::report::verdict::judge;
use vramcast_core::source::catalogue;

/// As the server has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Fault = Box<dyn std::error::Error + Send + Sync>;

/// Model, batch, length, whether layers are checkpointed: what people try in turn.
const MIX: [(&str, u64, u64, bool); 6] = [
    ("openai-community/gpt2", 8, 1024, false),
    ("meta-llama/Meta-Llama-3-8B", 1, 2048, false),
    ("meta-llama/Meta-Llama-3-8B", 4, 4096, true),
    ("Qwen/Qwen2.5-7B", 2, 2048, false),
    ("mistralai/Mistral-7B-v0.1", 2, 8192, true),
    ("microsoft/phi-2", 4, 2048, false),
];

fn plan((_, batch_size, seq_len, checkpointed): (&str, u64, u64, bool)) -> TrainPlan {
    let mut plan = TrainPlan::default();
    (plan.batch.batch_size, plan.batch.seq_len) = (batch_size, seq_len);
    if checkpointed {
        plan.checkpointing = Checkpointing::Full;
    }
    plan
}

/// One estimate as the server makes it: from the config to the text.
fn estimate(case: (&str, u64, u64, bool)) -> Result<usize, Fault> {
    let entry = catalogue::find(case.0).ok_or("no such model")?;
    let model = Model::new(entry.config, entry.auto_class.as_deref())?;
    let plan = plan(case);
    let simulation = simulation::train(&model, &plan)?;
    let verdicts = vec![judge(&plan.gpu, simulation.process_bytes())];
    let report = report::summarize(case.0, &model, RunPlan::Train(Box::new(plan)), &simulation, verdicts);
    Ok(serde_json::to_string(&report)?.len())
}

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(program: &str, arguments: &[&str]) -> Result<Self, Fault> {
        let mut command = Command::new(program);
        command.args(["serve", "--port", "0", "--log-format", "off"]).args(arguments).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        let address = line.trim().trim_start_matches("listening on http://").trim_end_matches('/').to_owned();
        Ok(Self { child, address })
    }

    /// Resident memory in KiB.
    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection that is kept.
struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(address: &str) -> Result<Self, Fault> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Posts a body and reads the answer; returns its status and size.
    fn post(&mut self, path: &str, body: &str) -> Result<(u16, usize), Fault> {
        let head = "Host: localhost\r\nContent-Type: application/json";
        let request = format!("POST {path} HTTP/1.1\r\n{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        self.0.get_mut().write_all(request.as_bytes())?;
        let (mut status, mut length, mut line) = (0, 0, String::new());
        loop {
            line.clear();
            if self.0.read_line(&mut line)? == 0 {
                return Err("the server closed".into());
            }
            let text = line.trim_end();
            if text.is_empty() {
                break;
            }
            if let Some(rest) = text.strip_prefix("HTTP/1.1 ") {
                status = rest.split(' ').next().unwrap_or_default().parse()?;
            } else if let Some((name, value)) = text.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse()?;
            }
        }
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes)?;
        Ok((status, length))
    }
}

fn body(case: (&str, u64, u64, bool)) -> String {
    let (model, batch_size, seq_len, checkpointed) = case;
    let checkpointing = if checkpointed { "full" } else { "off" };
    let batch = serde_json::json!({"batch_size": batch_size, "seq_len": seq_len});
    serde_json::json!({"model": model, "plan": {"batch": batch, "checkpointing": checkpointing}}).to_string()
}

fn share(sorted: &[Duration], percent: usize) -> f64 {
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3
}

/// Every client asks in turn until the time is over; latencies, failures, and resident memory over time.
fn storm(server: &Server, clients: usize, seconds: u64) -> Result<(Vec<Duration>, usize, Vec<u64>), Fault> {
    let over = AtomicBool::new(false);
    let bodies = MIX.map(body);
    std::thread::scope(|scope| {
        let ask = |first: usize| {
            let (over, bodies, address) = (&over, &bodies, &server.address);
            move || -> Result<(Vec<Duration>, usize), Fault> {
                let mut client = Client::connect(address)?;
                let (mut took, mut failed) = (Vec::new(), 0);
                for at in first.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let started = Instant::now();
                    let (status, _) = client.post("/api/v1/train", &bodies[at % bodies.len()])?;
                    took.push(started.elapsed());
                    failed += usize::from(status != 200);
                }
                Ok((took, failed))
            }
        };
        let threads: Vec<_> = (0..clients).map(|client| scope.spawn(ask(client))).collect();
        let mut memory = Vec::new();
        for _ in 0..seconds {
            std::thread::sleep(Duration::from_secs(1));
            memory.push(server.resident());
        }
        over.store(true, Ordering::Relaxed);
        let (mut took, mut failed) = (Vec::new(), 0);
        for thread in threads {
            let (more, bad) = thread.join().map_err(|_| "a client failed")??;
            took.extend(more);
            failed += bad;
        }
        took.sort();
        Ok((took, failed, memory))
    })
}

/// Far more than is allowed: how the answers come out, by status.
fn over_limit(program: &str) -> Result<(Vec<(u16, usize)>, u16), Fault> {
    let server = Server::start(program, &["--rate", "1"])?;
    let mut counts: Vec<(u16, usize)> = Vec::new();
    let mut client = Client::connect(&server.address)?;
    for _ in 0..1000 {
        let (status, _) = client.post("/api/v1/train", &body(MIX[0]))?;
        match counts.iter_mut().find(|(known, _)| *known == status) {
            Some((_, count)) => *count += 1,
            None => counts.push((status, 1)),
        }
    }
    let server = Server::start(program, &["--max-body", "64KiB"])?;
    let large = format!("{{\"model\": \"{}\"}}", "x".repeat(100_000));
    let status = Client::connect(&server.address)?.post("/api/v1/train", &large)?.0;
    Ok((counts, status))
}

fn main() -> Result<(), Fault> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let program = arguments.first().ok_or("which vramcast? pass the path of the binary")?;
    let number = |at: usize, usual: u64| arguments.get(at).map_or(Ok(usual), |text| text.parse());
    let (seconds, clients) = (number(1, 60)?, number(2, 4)? as usize);
    // In this process: every case once to warm up, then twenty times, before and after the storm.
    let alone = || -> Result<f64, Fault> {
        let started = Instant::now();
        for _ in 0..20 {
            for case in MIX {
                estimate(case)?;
            }
        }
        Ok(started.elapsed().as_secs_f64() * 1e3 / (20 * MIX.len()) as f64)
    };
    alone()?;
    let server = Server::start(program, &["--rate", "0"])?;
    let before = alone()?;
    let (took, failed, memory) = storm(&server, clients, seconds)?;
    let after = alone()?;
    drop(server);
    let one = (before + after) / 2.0;
    let rate = took.len() as f64 / seconds as f64;
    let cores = std::thread::available_parallelism()?.get();
    let times = |milliseconds: f64| format!("{milliseconds:.1} ms ({:.1}×)", milliseconds / one);
    println!("| | {clients} clients, {seconds} s, {cores} cores |\n|---|---|");
    println!("| one estimate in process | {one:.2} ms |");
    println!(
        "| answers per second | {rate:.0} ({:.2} of {cores} cores computing alone) |",
        rate * one / 1e3 / cores as f64
    );
    println!(
        "| p50, p99, longest | {}, {}, {} |",
        times(share(&took, 50)),
        times(share(&took, 99)),
        times(share(&took, 100))
    );
    println!("| answers, other than 200 | {}, {failed} |", took.len());
    let at = |second: usize| memory.get(second.min(memory.len().saturating_sub(1))).copied().unwrap_or(0) / 1024;
    let most = memory.iter().max().copied().unwrap_or(0) / 1024;
    println!(
        "| resident after 5 s, half, the end; most | {}, {}, {}; {most} MiB |",
        at(4),
        at(memory.len() / 2),
        at(memory.len())
    );
    let (counts, large) = over_limit(program)?;
    let counts: Vec<String> = counts.iter().map(|(status, count)| format!("{count} × {status}")).collect();
    println!("| 1000 requests in a row at --rate 1 | {} |", counts.join(", "));
    println!("| a body over --max-body | {large} |");
    Ok(())
}

//! The Python process that runs a job.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// The program that measures.
const PROGRAM: &str = include_str!("probe.py");

/// Who runs it.
#[derive(Debug, Clone)]
pub struct Interpreter {
    /// The user's Python.
    pub python: PathBuf,
    /// Processes by torchrun, one per GPU; one process of its own when 1.
    pub processes: u32,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// No such interpreter.
    #[error("{python}: {source}")]
    Start {
        /// What was started.
        python: String,
        /// Why it did not.
        source: std::io::Error,
    },
    /// Python says it lacks a package.
    #[error("{python} has no module named {module}")]
    Missing {
        /// The interpreter.
        python: String,
        /// The package.
        module: String,
    },
    /// The process ended before it wrote its row.
    #[error("the measuring process ended early ({status}):\n{stderr}")]
    Died {
        /// How.
        status: String,
        /// What it said last.
        stderr: String,
    },
    /// Temporary files.
    #[error("temporary folder: {0}")]
    Files(#[from] std::io::Error),
}

impl ProbeError {
    /// How to mend it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Start { .. } => Some("name the interpreter that has torch with --python".into()),
            Self::Missing { module, .. } => {
                Some(format!("install {module} there, or name another interpreter with --python"))
            }
            _ => None,
        }
    }
}

/// Runs a job and returns its row, of several ranks that of the fullest; `progress` hears every phase.
pub fn measure(job: &Value, interpreter: &Interpreter, mut progress: impl FnMut(&str)) -> Result<Value, ProbeError> {
    let folder = tempfile::Builder::new().prefix("vramcast-probe-").tempdir()?;
    let [program, file, rows] = ["probe.py", "job.json", "rows.jsonl"].map(|name| folder.path().join(name));
    std::fs::write(&program, PROGRAM)?;
    std::fs::write(&file, job.to_string())?;
    let mut command = Command::new(&interpreter.python);
    if interpreter.processes > 1 {
        command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]);
        command.arg(interpreter.processes.to_string());
    }
    command.arg(&program).arg(&file).arg(&rows);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let python = interpreter.python.display().to_string();
    let mut child = command.spawn().map_err(|source| ProbeError::Start { python: python.clone(), source })?;
    let stderr = read_aside(&mut child);
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let Ok(event) = serde_json::from_str::<Value>(&line) else { continue };
            if event["event"] == "phase" {
                progress(event["phase"].as_str().unwrap_or_default());
            }
        }
    }
    let status = child.wait()?;
    let stderr = stderr.and_then(|reader| reader.join().ok()).unwrap_or_default();
    if let Some(module) =
        stderr.lines().rev().find_map(|line| line.strip_prefix("ModuleNotFoundError: No module named "))
    {
        return Err(ProbeError::Missing { python, module: module.trim_matches('\'').to_owned() });
    }
    let text = std::fs::read_to_string(&rows).unwrap_or_default();
    let all: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    fullest(all, interpreter.processes)
        .ok_or_else(|| ProbeError::Died { status: status.to_string(), stderr: tail(&stderr) })
}

/// The row of the rank that took most, with a line for every rank that wrote one.
fn fullest(mut rows: Vec<Value>, processes: u32) -> Option<Value> {
    if processes <= 1 {
        return rows.into_iter().next();
    }
    let most = |row: &Value| {
        let of = |key: &str| row["measured"][key].as_u64().unwrap_or(0);
        // A rank that failed says more than one that was waiting for it.
        (row["oom"] == true, of("nvml_used_end"), of("peak_reserved"), of("peak_allocated"))
    };
    rows.sort_by_key(|row| row["rank"].as_u64());
    let ranks: Vec<Value> = rows
        .iter()
        .map(|row| {
            let levels = ["peak_allocated", "peak_reserved", "nvml_used_end"];
            let mut line = serde_json::json!({"rank": row["rank"], "oom": row["oom"], "error": row["error"]});
            levels.iter().for_each(|key| line[*key] = row["measured"][*key].clone());
            line
        })
        .collect();
    let mut worst = rows.into_iter().max_by_key(most)?;
    worst["ranks"] = Value::Array(ranks);
    Some(worst)
}

/// Standard error is read beside standard output, or a full pipe would stop the child.
fn read_aside(child: &mut Child) -> Option<std::thread::JoinHandle<String>> {
    let mut stderr = child.stderr.take()?;
    Some(std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stderr.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }))
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_fullest_rank_is_the_answer() {
        let row = |rank: u64, used: u64, oom: bool| json!({"rank": rank, "oom": oom, "measured": {"nvml_used_end": used, "peak_allocated": 1}});
        let worst = fullest(vec![row(1, 9, false), row(0, 5, false)], 2).unwrap();
        assert_eq!((worst["rank"].as_u64(), worst["ranks"][0]["rank"].as_u64()), (Some(1), Some(0)));
        let worst = fullest(vec![row(0, 9, false), row(1, 5, true)], 2).unwrap();
        assert_eq!(worst["rank"], 1);
        assert!(fullest(Vec::new(), 2).is_none());
    }
}

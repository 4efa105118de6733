//! Starts the program on the stand-in and watches it to its end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::journal::{Journals, Line, fault, unknown_calls};
use super::libraries::lay_out;
use super::processes::stop;
use super::python::Torch;
use super::report::{Facts, Rehearsal};
use super::{Card, RehearseError};

/// What runs inside the program (see the files).
const HOOK: &[(&str, &str)] = &[
    ("sitecustomize.py", include_str!("hook.py")),
    ("vramcast_watch.py", include_str!("watch.py")),
    ("vramcast_peak.py", include_str!("peak.py")),
    ("vramcast_alone.py", include_str!("alone.py")),
    ("vramcast_values.py", include_str!("values.py")),
    ("vramcast_kernels.py", include_str!("kernels.py")),
    ("vramcast_recognise.py", include_str!("recognise.py")),
    ("vramcast_shards.py", include_str!("shards.py")),
    ("vramcast_guesses.py", include_str!("guesses.py")),
    ("vramcast_shapes.py", include_str!("shapes.py")),
    ("vramcast_unseen.py", include_str!("unseen.py")),
    ("vramcast_skips.py", include_str!("skips.py")),
    (NOTEBOOK, include_str!("notebook.py")),
];
/// Runs a notebook's cells.
const NOTEBOOK: &str = "notebook.py";
/// There where NVIDIA's driver is.
const REAL_CARD: &str = "/dev/nvidia0";
/// How often the journals are looked at.
const GLANCE: Duration = Duration::from_millis(50);
/// How long an interrupted program has for ending by itself.
const GRACE: Duration = Duration::from_secs(5);
/// Set when we are asked to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// One process of a larger world, alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// How many ranks it pretends there are.
    pub size: u32,
    /// Which of them it is.
    pub rank: u32,
}

/// What shall be rehearsed.
#[derive(Debug, Clone)]
pub struct Request {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Its interpreter, where it cannot be told from the command.
    pub python: Option<PathBuf>,
    /// The card.
    pub card: Card,
    /// How many of it a process sees.
    pub gpus: u32,
    /// One rank of many.
    pub world: Option<World>,
    /// Stop after so many optimizer steps.
    pub steps: Option<u64>,
    /// End the program when it has run so long.
    pub time_limit: Option<Duration>,
    /// The share that masks with unknown contents choose.
    pub mask_fraction: f64,
    /// Record which line of source holds what.
    pub sources: bool,
    /// Where torch's own snapshot goes.
    pub snapshot: Option<PathBuf>,
    /// Whether stdout is kept for the answer.
    pub stdout_is_ours: bool,
    /// Write no checkpoints.
    pub skip_saving: bool,
    /// Send nothing to trackers of experiments.
    pub skip_logging: bool,
    /// Run on the card that is really there, watched only.
    pub real: bool,
}

/// Holds the rehearsal; `show` is told every new line.
pub fn run(request: &Request, mut show: impl FnMut(u32, &Line)) -> Result<Rehearsal, RehearseError> {
    if request.real && !Path::new(REAL_CARD).exists() {
        return Err(RehearseError::NoRealCard(REAL_CARD.into()));
    }
    let torch = Torch::of(&request.command, request.python.as_deref())?;
    let folder = tempfile::Builder::new().prefix("vramcast-rehearsal-").tempdir();
    let folder = folder.map_err(|error| RehearseError::Folder { path: std::env::temp_dir(), error })?;
    let preload = if request.real { Vec::new() } else { lay_out(&torch, folder.path())?.preload };
    let mut command = prepare(request, &torch, folder.path(), &preload)?;
    let started = Instant::now();
    let mut child = command.spawn().map_err(|error| RehearseError::Start {
        program: request.command.first().cloned().unwrap_or_default(),
        error,
    })?;
    let mut journals = Journals::default();
    let (mut cut, mut interrupted, mut stopped) = (false, None::<Instant>, false);
    let status = loop {
        journals.read(folder.path()).iter().for_each(|(process, line)| show(*process, line));
        if let Ok(Some(status)) = child.try_wait() {
            break Some(status);
        }
        if !cut && request.time_limit.is_some_and(|limit| started.elapsed() > limit) {
            (cut, stopped) = (true, true);
            stop(&mut child, folder.path());
        }
        // Whoever pressed Ctrl-C has told the program as well; whoever ended only us has not.
        match interrupted {
            None if INTERRUPTED.swap(false, Ordering::Relaxed) => interrupted = Some(Instant::now()),
            Some(since) if !stopped && since.elapsed() > GRACE => {
                stopped = true;
                stop(&mut child, folder.path());
            }
            _ => {}
        }
        std::thread::sleep(GLANCE);
    };
    let interrupted = interrupted.is_some() || INTERRUPTED.swap(false, Ordering::Relaxed);
    if interrupted && !stopped {
        // The program heard Ctrl-C and ended; what it started may not have.
        stop(&mut child, folder.path());
    }
    journals.read(folder.path()).iter().for_each(|(process, line)| show(*process, line));
    let facts = Facts {
        card: request.card.clone(),
        torch: torch.version,
        exit_code: status.as_ref().and_then(ExitStatus::code),
        cut,
        interrupted,
        signal: status.as_ref().and_then(signal_of),
        fault: fault(folder.path()),
        mask_fraction: request.mask_fraction,
        seconds: started.elapsed().as_secs_f64(),
        unknown: unknown_calls(folder.path()),
        real: request.real,
    };
    Ok(Rehearsal::new(facts, journals.processes()))
}

/// The signal that ended a program.
#[cfg(unix)]
fn signal_of(status: &ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(status)
}

/// Elsewhere there are none, nor rehearsals.
#[cfg(not(unix))]
fn signal_of(_status: &ExitStatus) -> Option<i32> {
    None
}

/// The program with its environment; ours is not touched.
fn prepare(request: &Request, torch: &Torch, folder: &Path, preload: &[PathBuf]) -> Result<Command, RehearseError> {
    let hook = folder.join("hook");
    let write = || {
        std::fs::create_dir(&hook)?;
        HOOK.iter().try_for_each(|(name, text)| std::fs::write(hook.join(name), text))
    };
    write().map_err(|error| RehearseError::Folder { path: hook.clone(), error })?;
    let mut command = if is_notebook(&request.command) {
        let mut command = Command::new(&torch.python);
        command.arg(hook.join(NOTEBOOK)).args(&request.command);
        command
    } else {
        let mut command = Command::new(request.command.first().cloned().unwrap_or_default());
        command.args(request.command.iter().skip(1));
        command
    };
    if request.real {
        command.env("VRAMCAST_REAL", "1");
    } else {
        pretend(&mut command, request, torch, folder, preload);
    }
    command.env("PYTHONPATH", crate::env::with_first("PYTHONPATH", &hook.display().to_string()));
    command.env("VRAMCAST_REHEARSAL", folder);
    command.env("VRAMCAST_STEPS", request.steps.unwrap_or(0).to_string());
    command.env("VRAMCAST_MASK_FRACTION", request.mask_fraction.to_string());
    command.env("VRAMCAST_SOURCES", if request.sources { "1" } else { "0" });
    if let Some(path) = &request.snapshot {
        command.env("VRAMCAST_SNAPSHOT", std::path::absolute(path).unwrap_or_else(|_| path.clone()));
    }
    for (name, wanted) in
        [("VRAMCAST_SKIP_SAVING", request.skip_saving), ("VRAMCAST_SKIP_LOGGING", request.skip_logging)]
    {
        command.env(name, if wanted { "1" } else { "0" });
    }
    if let Some(world) = request.world {
        command.env("VRAMCAST_WORLD", world.size.to_string());
        command.env("RANK", world.rank.to_string()).env("WORLD_SIZE", world.size.to_string());
        let local = (world.rank % request.gpus.max(1)).to_string();
        command.env("LOCAL_RANK", local).env("LOCAL_WORLD_SIZE", request.gpus.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "29511");
    }
    if request.stdout_is_ours {
        command.stdout(Stdio::from(std::io::stderr()));
    }
    survive_interrupts();
    Ok(command)
}

/// What makes the program see the pretended card.
fn pretend(command: &mut Command, request: &Request, torch: &Torch, folder: &Path, preload: &[PathBuf]) {
    let preload: Vec<String> = preload.iter().map(|path| path.display().to_string()).collect();
    command.env("LD_PRELOAD", crate::env::with_first("LD_PRELOAD", &preload.join(":")));
    command.env("LD_LIBRARY_PATH", crate::env::with_first("LD_LIBRARY_PATH", &folder.display().to_string()));
    command.env("VRAMCAST_CARD", request.card.describe(request.gpus, torch));
    if !torch.files.is_empty() {
        command.env("VRAMCAST_NATIVE", "1");
    }
    // A list made for the real cards of this machine says nothing about the pretended ones.
    command.env_remove("CUDA_VISIBLE_DEVICES");
    // Where no accelerator is found by its usual means, DeepSpeed would take the processor.
    command.env("DS_ACCELERATOR", "cuda");
}

/// Whether the command is the name of a notebook.
fn is_notebook(command: &[OsString]) -> bool {
    command.first().is_some_and(|first| Path::new(first).extension().is_some_and(|ending| ending == "ipynb"))
}

/// Ctrl-C reaches the program as well: it ends, and the report of what it did until then is still made.
fn survive_interrupts() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::Relaxed) {
        let _ = ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed));
    }
}

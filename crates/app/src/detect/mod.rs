//! The GPUs of this machine, through NVML.

mod remembered;

use std::path::Path;
use std::sync::OnceLock;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::Serialize;
use vramcast_core::plan::{Gpu, Gpus, Machine};

use self::remembered::{Key, Seen};
use crate::render::gib;

/// What there is.
#[derive(Debug, Clone, Serialize)]
pub struct Detected {
    /// The driver's version.
    pub driver: String,
    /// The newest CUDA it runs, such as 13.0.
    pub cuda: Option<String>,
    /// The GPUs that a program may use.
    pub gpus: Vec<DetectedGpu>,
    /// How many more there are that `CUDA_VISIBLE_DEVICES` leaves out.
    pub hidden: usize,
}

/// One GPU.
#[derive(Debug, Clone, Serialize)]
pub struct DetectedGpu {
    /// Its number, in the order of the bus.
    pub index: u32,
    /// As the driver calls it.
    pub name: String,
    /// The card of our table; absent where there is none of that name and memory.
    pub card: Option<String>,
    /// The driver's name for this very one.
    pub uuid: Option<String>,
    /// Memory in all, in bytes.
    pub memory_total: u64,
    /// What is in use.
    pub memory_used: u64,
    /// What is free now.
    pub memory_free: u64,
    /// Who uses it; absent where the driver does not say.
    pub processes: Option<Vec<GpuProcess>>,
    /// What a plan needs to know of it.
    #[serde(skip)]
    pub gpu: Gpu,
}

/// A process that uses a GPU.
#[derive(Debug, Clone, Serialize)]
pub struct GpuProcess {
    /// Its number.
    pub pid: u32,
    /// What it holds; absent where the driver does not say.
    pub memory: Option<u64>,
}

/// Why there is nothing to see.
#[derive(Debug, thiserror::Error)]
pub enum DetectError {
    /// No driver.
    #[error("no NVIDIA driver here: {0}")]
    NoDriver(String),
    /// A driver that does not answer.
    #[error("the NVIDIA driver does not answer: {0}")]
    Driver(#[from] NvmlError),
    /// A device that is asked for and not there.
    #[error("CUDA_VISIBLE_DEVICES: {0} names no GPU of this machine")]
    NoSuchDevice(String),
}

/// Asks the driver; `library` is where it is, when not in its usual place, and `visible` is `CUDA_VISIBLE_DEVICES`.
pub fn look(cards: &Gpus, library: Option<&Path>, visible: Option<&str>) -> Result<Detected, DetectError> {
    // The name without a number comes with the driver's development files only.
    let usual = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };
    let path = library.unwrap_or_else(|| Path::new(usual));
    let nvml = Nvml::builder().lib_path(path.as_os_str()).init().map_err(|error| match error {
        NvmlError::LibloadingError(why) => DetectError::NoDriver(why.to_string()),
        NvmlError::DriverNotLoaded | NvmlError::LibraryNotFound => DetectError::NoDriver(error.to_string()),
        other => DetectError::Driver(other),
    })?;
    let count = nvml.device_count()?;
    let all: Vec<DetectedGpu> =
        (0..count).map(|index| one(&nvml.device_by_index(index)?, index, cards)).collect::<Result<_, NvmlError>>()?;
    let gpus = match visible {
        Some(list) => seen(&all, list)?,
        None => all.clone(),
    };
    let cuda = nvml.sys_cuda_driver_version().ok();
    Ok(Detected {
        driver: nvml.sys_driver_version()?,
        cuda: cuda.map(|version| format!("{}.{}", version / 1000, version % 1000 / 10)),
        hidden: all.len().saturating_sub(gpus.len()),
        gpus,
    })
}

fn one(device: &Device<'_>, index: u32, cards: &Gpus) -> Result<DetectedGpu, NvmlError> {
    let (name, memory) = (device.name()?, device.memory_info()?);
    let known = cards.called(&name, Some(memory.total));
    let card = known.as_ref().map(|card| card.name.clone());
    let gpu = card_of(known, &name, memory.total, capability(device));
    let processes = device.running_compute_processes().ok().map(|list| {
        let held = |used: UsedGpuMemory| if let UsedGpuMemory::Used(bytes) = used { Some(bytes) } else { None };
        list.into_iter().map(|it| GpuProcess { pid: it.pid, memory: held(it.used_gpu_memory) }).collect()
    });
    Ok(DetectedGpu {
        index,
        uuid: device.uuid().ok(),
        card,
        memory_total: memory.total,
        memory_used: memory.used,
        memory_free: memory.free,
        processes,
        gpu,
        name,
    })
}

fn capability(device: &Device<'_>) -> Option<u32> {
    let it = device.cuda_compute_capability().ok()?;
    Some(u32::try_from(it.major).ok()? * 10 + u32::try_from(it.minor).ok()?)
}

/// What a plan needs to know of a card: the table's, or as much as the driver says, with the memory that is really there.
fn card_of(known: Option<Gpu>, name: &str, total: u64, capability: Option<u32>) -> Gpu {
    let memory = Gpu::usable_of(total);
    let known = known.unwrap_or_else(|| Gpu {
        name: name.to_owned(),
        vendor: "NVIDIA".into(),
        memory,
        capability,
        multiprocessors: None,
        threads_per_multiprocessor: None,
        many_channels: false,
        hosted: false,
        machine: Machine::default(),
    });
    Gpu { memory, ..known }
}

/// `CUDA_VISIBLE_DEVICES`: numbers and beginnings of UUIDs, up to the first that is neither (as CUDA reads it, -1 ends
/// the list).
fn seen(all: &[DetectedGpu], list: &str) -> Result<Vec<DetectedGpu>, DetectError> {
    let mut gpus = Vec::new();
    for word in list.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        if word.starts_with('-') {
            break;
        }
        let named = |gpu: &&DetectedGpu| match word.parse::<u32>() {
            Ok(index) => gpu.index == index,
            Err(_) => word.len() > 4 && gpu.uuid.as_deref().is_some_and(|uuid| uuid.starts_with(word)),
        };
        gpus.push(all.iter().find(named).cloned().ok_or_else(|| DetectError::NoSuchDevice(word.to_owned()))?);
    }
    Ok(gpus)
}

/// The GPU that a plan is for when nobody names one.
#[derive(Debug, Clone)]
pub struct FirstGpu {
    /// What a plan needs to know of it.
    pub gpu: Gpu,
    used: u64,
    free: u64,
}

static FIRST: OnceLock<Option<FirstGpu>> = OnceLock::new();

/// The first GPU that a program may use, if there is one and looking is not switched off. Asked once a process, and of the
/// driver at most once a minute: who answers many questions does not wait for the driver at each.
pub fn first(cards: impl Fn() -> Gpus) -> Option<&'static FirstGpu> {
    let find = || {
        let (visible, wanted, library) = crate::env::detection();
        // Reading the table takes longer than finding that there is no driver.
        let present = library.is_some() || Path::new("/dev/nvidiactl").exists() || !cfg!(target_os = "linux");
        if !wanted || !(present || Path::new("/dev/dxg").exists()) {
            return None;
        }
        let cards = cards();
        let ask = || {
            let found = look(&cards, library.as_deref(), visible.as_deref()).ok()?.gpus.into_iter().next()?;
            let (capability, total) = (found.gpu.capability, found.memory_total);
            Some(Seen { name: found.name, capability, total, used: found.memory_used, free: found.memory_free })
        };
        let cache = crate::env::Environment::read().cache.map(|folder| folder.join("gpu.json"));
        // A library that somebody names may be of another driver than the system's.
        let seen = match (cache, Key::read(visible.as_deref())) {
            (Some(file), Some(key)) if library.is_none() => remembered::or_ask(&file, key, remembered::now(), ask),
            _ => ask(),
        }?;
        let gpu = card_of(cards.called(&seen.name, Some(seen.total)), &seen.name, seen.total, seen.capability);
        Some(FirstGpu { gpu, used: seen.used, free: seen.free })
    };
    FIRST.get_or_init(find).as_ref()
}

/// What to say when a run fits the card of this machine, but not beside what others hold on it now.
pub fn beside_others(gpu: &Gpu, needed: u64) -> Option<String> {
    let found = FIRST.get()?.as_ref().filter(|found| found.gpu.name == gpu.name)?;
    (needed <= gpu.memory && needed > found.free).then(|| {
        let (free, used) = (gib(found.free), gib(found.used));
        format!("{} has {free} GiB free now: {used} GiB are in use, and this does not fit beside them", gpu.name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32) -> DetectedGpu {
        DetectedGpu {
            index,
            name: "NVIDIA H200".into(),
            card: None,
            uuid: Some(format!("GPU-{index}aaaa")),
            memory_total: 0,
            memory_used: 0,
            memory_free: 0,
            processes: None,
            gpu: Gpu::h200(),
        }
    }

    #[test]
    fn visible_devices_are_read_as_cuda_reads_them() {
        let all: Vec<DetectedGpu> = (0..4).map(gpu).collect();
        let seen = |list: &str| seen(&all, list).map(|gpus| gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>()).ok();
        assert_eq!(seen("2,0"), Some(vec![2, 0]));
        assert_eq!(seen("GPU-3aa, 1"), Some(vec![3, 1]));
        assert_eq!(seen(""), Some(vec![]));
        assert_eq!(seen("1,-1,2"), Some(vec![1]));
        assert_eq!(seen("7"), None);
    }
}

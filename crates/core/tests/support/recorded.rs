//! All recorded truth, scored once; and what is written down about it.

use std::path::PathBuf;

use vramcast_core::plan::RunPlan;
use vramcast_core::report::coverage::Coverage;
use vramcast_core::verify::external::{simumax, vllm};
use vramcast_core::verify::kinds::{self, Outcome, Set, Truth};
use vramcast_core::verify::{engine, jobs, ledger, summary};

/// A path from the root of the repository.
pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(name)
}

/// The truth, and how predictions compare.
pub(crate) struct Recorded {
    /// One for every file; models are one together.
    pub(crate) sets: Vec<Set>,
    rows: Vec<(&'static str, serde_json::Value)>,
}

impl Recorded {
    /// Reads and scores everything.
    pub(crate) fn score() -> Self {
        let mut truths = Vec::new();
        for name in ["truth/models", "truth/ledger", "truth/jobs", "truth/engines", "truth/external"] {
            let entries = std::fs::read_dir(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            let mut files: Vec<String> = entries
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .filter(|file| file.ends_with(".json") || file.ends_with(".jsonl"))
                .map(|file| format!("{name}/{file}"))
                .collect();
            files.sort();
            truths.extend(files);
        }
        truths.insert(0, "truth/lora.json".into());
        let read = |name: &String| {
            let text = std::fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            Truth::read(name, &text).unwrap_or_else(|error| panic!("{error}"))
        };
        let truths: Vec<Truth> = truths.iter().map(read).collect();
        let rows =
            truths.iter().flat_map(|truth| truth.rows.iter().map(|row| (truth.kind.name, row.clone()))).collect();
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        Self { sets: kinds::score(truths, threads), rows }
    }

    /// Families and features that runs vouch for, whose prediction is close.
    pub(crate) fn coverage(&self) -> Coverage {
        const RUNS: [&str; 3] = ["ledger", "jobs", "engine"];
        let scores = self.sets.iter().filter(|set| RUNS.contains(&set.kind)).flat_map(|set| &set.rows);
        let runs = self.rows.iter().filter(|(kind, _)| RUNS.contains(kind));
        let recorded = scores.zip(runs).filter_map(|(score, (kind, row))| {
            assert_eq!(row["id"].as_str(), Some(score.id.as_str()));
            let of_type = |plan| (jobs::family(row).to_owned(), plan);
            let plan = match *kind {
                "engine" => engine::run_plan(row).map(|(family, plan)| (family, RunPlan::Serve(Box::new(plan)))),
                "jobs" => jobs::plan(row).map(|plan| of_type(RunPlan::Train(Box::new(plan)))),
                _ => ledger::run_plan(row).map(of_type),
            };
            let (Outcome::Good, Ok((family, plan))) = (&score.outcome, plan) else { return None };
            Some((family, plan, [score.levels[0].error(), score.levels[1].error()]))
        });
        // Megatron's published runs: exact counters of every rank.
        let ranks = self.rows.iter().filter(|(_, row)| row["measured_by_rank"].is_object());
        let ranks = ranks.filter(|(_, row)| !row["memory_reused_from_case"].is_string()).filter_map(|(_, row)| {
            let (model, plan) = simumax::plan(row, "B200").ok()?;
            let model_type = model.config()["model_type"].as_str().unwrap_or_default().to_owned();
            Some((model_type, RunPlan::Train(Box::new(plan)), [None, None]))
        });
        // Pools that published logs of vLLM name, most of them beside CUDA graphs.
        let is_log = |row: &&serde_json::Value| row["vllm_version"].is_string();
        let logs: Vec<_> = self.rows.iter().map(|(_, row)| row).filter(is_log).collect();
        let pools = self.sets.iter().flat_map(|set| &set.rows).filter(|score| score.group == "cache pool");
        let pools = pools.filter_map(|score| {
            let index: usize = score.id.split(' ').nth(1)?.parse().ok()?;
            let (family, plan) = vllm::run_plan(logs.get(index)?)?;
            Some((family, RunPlan::Serve(Box::new(plan)), [score.levels[0].error(), None]))
        });
        let all: Vec<_> = recorded.chain(ranks).chain(pools).collect();
        Coverage::of_runs(all.iter().map(|(model_type, plan, errors)| (model_type.as_str(), plan.clone(), *errors)))
    }

    /// The page with its tables as they are now; what people wrote stays.
    pub(crate) fn page(&self, page: &str) -> String {
        const MARKS: [&str; 2] = ["<!-- tables of `vramcast verify --markdown` -->\n", "<!-- end of the tables -->"];
        let [before, after] = [page.split(MARKS[0]).next(), page.split(MARKS[1]).nth(1)].map(Option::unwrap_or_default);
        let tables: Vec<String> = self.sets.iter().map(summary::markdown).collect();
        format!("{before}{}\n{}\n{}{after}", MARKS[0], tables.join("\n"), MARKS[1])
    }
}

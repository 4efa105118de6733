//! Any text as the files that only the program reads: plans in YAML and TOML, Python programs, notebooks, scripts and their
//! launch lines, Ollama's Modelfiles, jobs, lengths, journals of a rehearsal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast::foreign;

fuzz_target!(|text: &str| {
    for name in ["a.json", "a.yaml", "a.toml", "a.py", "a.sh", "a.ipynb", "Modelfile"] {
        let _ = foreign::plan(text, name).map_err(|said| assert!(said.starts_with(name)));
    }
    let (is_job, problems) = foreign::job(text);
    assert_eq!(is_job, problems == 0);
    let _ = foreign::lengths(text);
    let _ = foreign::journal(text);
});

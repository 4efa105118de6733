//! schemathesis, which makes requests from the API's description and looks for faults.

use std::path::PathBuf;
use std::process::Command;

use super::Server;

#[test]
#[ignore = "second ring: schemathesis"]
fn schemathesis_finds_nothing() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("schemathesis");
    let environment = folder.join("environment");
    let program = environment.join("bin/schemathesis");
    if !program.exists() {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let done = |what: &str, command: &mut Command| {
            assert!(command.status().is_ok_and(|status| status.success()), "{what} failed");
        };
        done("python3 with venv", Command::new("python3").args(["-m", "venv"]).arg(&environment));
        let packages = ["schemathesis==4.32.5", "hypothesis==6.170.15"];
        let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        done("pip install", Command::new(environment.join("bin/python")).args(install).args(packages));
    }
    let server = Server::start(&["--rate", "0", "--timeout", "110"]);
    // Whether a plan can run is more than a schema says, so a good body may be refused: `positive_data_acceptance` is out.
    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,\
                  negative_data_rejection,unsupported_method";
    // Comparisons and placements take the bodies of trainings: every limit of every field is tried once.
    const TWICE: &str = "/(compare|placement)$";
    for (phases, paths) in [
        ("examples,coverage,fuzzing", ["--exclude-path-regex", TWICE]),
        ("examples,fuzzing", ["--include-path-regex", TWICE]),
    ] {
        let mut run = Command::new(&program);
        run.arg("run")
            .arg(format!("http://{}/api/v1/openapi.json", server.address))
            .args(["--checks", checks, "--max-examples", "15", "--phases", phases])
            .args(paths)
            .args(["--seed", "7", "--generation-deterministic", "--workers", "1", "--request-timeout", "120"])
            // Hypothesis draws by the order of sets, and is not made for threads: one of both, so that a run can be repeated.
            .env("PYTHONHASHSEED", "0")
            .arg("--no-color")
            .current_dir(&folder);
        let output = run.output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        // What went wrong stands at the end of each section, below long traces.
        let lines: Vec<&str> =
            text.lines().filter(|line| !line.trim_start_matches([' ', '|']).starts_with("File ")).collect();
        assert!(output.status.success(), "{}", lines[lines.len().saturating_sub(200)..].join("\n"));
    }
}

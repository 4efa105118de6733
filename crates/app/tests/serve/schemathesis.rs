//! schemathesis, which makes requests from the API's description and looks for faults.

use std::path::PathBuf;
use std::process::Command;

use super::Server;

#[test]
fn schemathesis_finds_nothing() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("schemathesis");
    let environment = folder.join("environment");
    let program = environment.join("bin/schemathesis");
    if !program.exists() {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let made = Command::new("python3").args(["-m", "venv"]).arg(&environment).output();
        let mut install = Command::new(environment.join("bin/python"));
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "schemathesis>=4,<5"]);
        let ready = made.is_ok_and(|made| made.status.success()) && install.status().is_ok_and(|done| done.success());
        if !ready {
            eprintln!("SKIPPED: no python3 with venv, or no package registry");
            return;
        }
    }
    let server = Server::start(&["--rate", "0", "--timeout", "60"]);
    // Whether a plan can run is more than a schema says, so a good body may be refused: `positive_data_acceptance` is out.
    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,\
                  negative_data_rejection,unsupported_method";
    let mut run = Command::new(program);
    run.arg("run")
        .arg(format!("http://{}/api/v1/openapi.json", server.address))
        .args(["--checks", checks, "--max-examples", "15", "--phases", "examples,coverage,fuzzing"])
        .args(["--seed", "7", "--generation-deterministic", "--workers", "2", "--request-timeout", "30", "--no-color"])
        .current_dir(&folder);
    let output = run.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{text}");
    println!("{text}");
}

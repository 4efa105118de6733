//! The command line as documented sessions: help, tables at 80 and 120 columns without colour, errors.
//! `TRYCMD=overwrite cargo test -p vramcast --test cmd` writes what is printed now.

#[test]
fn sessions() {
    for columns in ["80", "120"] {
        let cases = trycmd::TestCases::new();
        cases
            .env("COLUMNS", columns)
            .env("HF_HUB_OFFLINE", "1")
            .env("NO_COLOR", "1")
            .env("XDG_CONFIG_HOME", "/nonexistent")
            .case(format!("tests/cmd/{columns}/*.md"));
    }
}

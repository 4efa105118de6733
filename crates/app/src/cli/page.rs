//! `vramcast page`: the page as a static site, with the core inside it instead of a server.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::context::Context;
use super::{Answer, Failure};
use crate::disk;
use crate::exit::Exit;
use crate::serve::assets;

/// Where to, and of what.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The folder to write, which any web server or static host can serve.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// The core as WebAssembly [default: built by cargo, in a checkout of vramcast].
    #[arg(long, value_name = "FILE")]
    core: Option<PathBuf>,
}

const TARGET: &str = "wasm32-unknown-unknown";
/// What every file of WebAssembly begins with.
const MAGIC: &[u8] = b"\0asm\x01\0\0\0";
const MOST_BYTES: u64 = 1 << 28;
/// The core's name in the site.
const CORE: &str = "core.wasm";

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let as_json = context.text_or_json("page")?;
    let folder = &arguments.out;
    let unwritten = |error: std::io::Error| Failure::bad_input(format!("--out {}: {error}", folder.display()));
    let holds = |name: &str| folder.join(name).exists();
    if std::fs::read_dir(folder).is_ok_and(|mut there| there.next().is_some()) && !holds(CORE) {
        return Err(Failure::bad_input(format!("--out {}: it is there, and no page of before", folder.display()))
            .hint("name a folder that is empty or not there yet"));
    }
    let file = match &arguments.core {
        Some(file) => file.clone(),
        None => built(context.quiet)?,
    };
    let within = |problem: String| Failure::bad_input(format!("--core {}: {problem}", file.display()));
    let core = disk::read(&file, MOST_BYTES).map_err(|error| within(error.to_string()))?;
    if !core.starts_with(MAGIC) {
        return Err(within("it is not WebAssembly".to_owned()).hint(RECIPE));
    }
    let (mut bytes, mut packed) = (core.len(), gzipped(&core));
    let write = |name: &str, content: &[u8]| {
        let path = folder.join(name.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap_or(folder)).and_then(|()| disk::write(&path, content))
    };
    write(CORE, &core).map_err(unwritten)?;
    for (name, content) in assets::PAGE {
        let content = match *name {
            "/index.html" => &index(content),
            name if name.ends_with(".js") || name.ends_with(".css") => &bare(content),
            _ => *content,
        };
        write(name, content).map_err(unwritten)?;
        bytes += content.len();
        packed += gzipped(content);
    }
    let files = assets::PAGE.len() + 1;
    if as_json {
        let document =
            json!({"schema": 1, "folder": folder, "files": files, "bytes": bytes, "gzip": packed, "core": core.len()});
        return Ok(Answer::document(document, Exit::Success));
    }
    let shown = folder.display();
    Ok(Answer::success(format!(
        "{shown}: {files} files, {:.1} MB, {:.2} under gzip; any web server serves it:\n  python3 -m http.server --directory {shown}\n",
        bytes as f64 / 1e6,
        packed as f64 / 1e6
    )))
}

/// What a visitor waits for: the size of a file as most hosts send it.
fn gzipped(content: &[u8]) -> usize {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(content).and_then(|()| packed.finish()).map_or(content.len(), |packed| packed.len())
}

/// A file of the page without the comments that have lines of their own: a fifth of what all of them take under gzip.
fn bare(content: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(content);
    let mut kept = String::with_capacity(text.len());
    let mut inside = false;
    for line in text.lines() {
        let words = line.trim();
        // What stands behind the end of one in its line is code: a cast has its type in a comment.
        let end = words.find("*/").map(|at| at + 2);
        if inside || (words.starts_with("/*") && end.is_none_or(|end| end == words.len())) {
            inside = end.is_none();
        } else if !words.starts_with("//") && !words.is_empty() {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept.into_bytes()
}

/// The first page, which names the core, asks for it and all modules at once, and allows itself no more than the server would.
fn index(page: &[u8]) -> Vec<u8> {
    let mut head = format!(
        "<meta charset=\"utf-8\">\n  \
         <meta http-equiv=\"content-security-policy\" content=\"default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; \
         style-src 'self'; img-src 'self' data: blob:; connect-src 'self' {hub}; base-uri 'none'; form-action 'none'\">\n  \
         <meta name=\"vramcast-core\" content=\"{CORE}\">\n  \
         <link rel=\"preload\" href=\"{CORE}\" as=\"fetch\" crossorigin>",
        hub = crate::env::DEFAULT_ENDPOINT
    );
    for (name, _) in assets::PAGE.iter().filter(|(name, _)| name.ends_with(".js") && !name.ends_with("/worker.js")) {
        head += &format!("\n  <link rel=\"modulepreload\" href=\"{}\">", &name[1..]);
    }
    String::from_utf8_lossy(page).replacen("<meta charset=\"utf-8\">", &head, 1).into_bytes()
}

const RECIPE: &str = "in a checkout of vramcast: cargo build --profile page --target wasm32-unknown-unknown -p vramcast-web; \
                      then --core target/wasm32-unknown-unknown/page/vramcast_web.wasm";

/// The core, built by cargo from the sources around the working directory.
fn built(quiet: bool) -> Result<PathBuf, Failure> {
    let here = std::env::current_dir().unwrap_or_default();
    let Some(root) = here.ancestors().find(|folder| folder.join("crates/web/Cargo.toml").is_file()) else {
        let problem = "the core as WebAssembly is built from vramcast's sources, and this is no folder of them";
        return Err(Failure::bad_input(problem).hint("run it in a checkout, or name a core with --core FILE"));
    };
    has_target(root)?;
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--profile", "page", "--target", TARGET, "-p", "vramcast-web", "--message-format", "json"]);
    let stderr = if quiet { Stdio::null() } else { Stdio::inherit() };
    let output = cargo.current_dir(root).stdin(Stdio::null()).stderr(stderr).output();
    let failed = |why: String| Failure::bad_input(format!("cargo could not build the core: {why}"));
    let output =
        output.map_err(|error| failed(error.to_string()).hint("install Rust, or name a core with --core FILE"))?;
    if !output.status.success() {
        return Err(failed(output.status.to_string()));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let made = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut files = made.flat_map(|message| message["filenames"].as_array().cloned().unwrap_or_default());
    let core =
        files.find_map(|file| Some(file.as_str()?.to_owned()).filter(|file| file.ends_with("vramcast_web.wasm")));
    core.map(PathBuf::from).ok_or_else(|| failed("it says of no file that it made it".to_owned()))
}

/// Whether the compiler has what it needs for pages.
fn has_target(root: &Path) -> Result<(), Failure> {
    let mut rustc = Command::new("rustc");
    let asked = rustc.args(["--print", "target-libdir", "--target", TARGET]).current_dir(root).output();
    let folder = asked.ok().map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    match folder.filter(|folder| !folder.is_empty()) {
        Some(folder) if Path::new(&folder).is_dir() => Ok(()),
        _ => Err(Failure::bad_input(format!("Rust's standard library for {TARGET} is not installed")).hint(
            "rustup target add wasm32-unknown-unknown; without rustup, on Debian: apt install rustc-web rust-web-src lld-22, \
             RUSTC_BOOTSTRAP=1 cargo build -Zbuild-std=std,panic_abort --profile page --target wasm32-unknown-unknown \
             -p vramcast-web, and --core with the file it makes",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_lose_their_comments_alone() {
        let text = "/** a */\n// b\nlet c = '//'; // d\n\n/*\n * e\n */\n  /** @type {F} */ (f)();\n";
        assert_eq!(
            String::from_utf8(bare(text.as_bytes())).unwrap(),
            "let c = '//'; // d\n  /** @type {F} */ (f)();\n"
        );
        for (name, content) in assets::PAGE.iter().filter(|(name, _)| name.ends_with(".js") || name.ends_with(".css")) {
            let text = String::from_utf8_lossy(content);
            // Comments of several lines end with a line, and strings of several lines hold none.
            assert!(
                text.lines().filter(|line| line.trim().starts_with("* ")).all(|line| !line.contains("*/")),
                "{name}"
            );
            let strings = text.split('`').skip(1).step_by(2).filter(|part| part.contains('\n'));
            assert!(strings.into_iter().all(|part| !part.contains("//") && !part.contains("/*")), "{name}");
        }
    }
}

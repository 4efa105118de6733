//! What hands a whole line on: shells, containers, queues, what watches a program or runs it elsewhere.

use super::launch::Launch;
use super::launcher;
use super::{base, is_known, is_program, serving, shell};
use crate::plan::Fault;

/// How often one may stand in another.
const DEEPEST: usize = 6;

/// Images whose own command is an engine.
const IMAGES: [(&str, &[&str]); 7] = [
    ("vllm", &["vllm", "serve"]),
    ("text-generation-inference", &["text-generation-launcher"]),
    ("sglang", &["sglang.launch_server"]),
    ("llama.cpp", &["llama-server"]),
    ("koboldcpp", &["koboldcpp"]),
    ("ollama/ollama", &["ollama", "serve"]),
    ("tritonserver", &["trtllm-serve"]),
];

/// What the first word behind an image of all of llama.cpp's tools starts.
const TOOLS: [(&str, &str); 6] = [
    ("--server", "llama-server"),
    ("-s", "llama-server"),
    ("--run", "llama-cli"),
    ("-r", "llama-cli"),
    ("--bench", "llama-bench"),
    ("-b", "llama-bench"),
];

/// Options of containers whose values may name an engine and are no image: folders above all.
const VALUED: [&str; 10] =
    ["-v", "--volume", "--mount", "--bind", "-B", "-e", "--env", "--name", "--env-file", "--hostname"];

const CONTAINERS: [&str; 6] = ["docker", "podman", "singularity", "apptainer", "nerdctl", "enroot"];

/// Programs that hand on the line behind their own options.
const OTHERS: &str = "timeout taskset nsys ncu ionice chrt setsid unbuffer ssh tmux screen kubectl oc sbatch salloc bsub \
                      jsrun aprun flux pdsh modal sky runai watch strace perf py-spy memray wandb aim hatch rye pdm \
                      mamba micromamba tox nohup systemd-run xvfb-run catchsegv eval command chroot caffeinate";

/// The line behind launchers and everything that hands lines on.
pub(super) fn unwrap(words: &[String], launch: &mut Launch) -> Result<Vec<String>, Vec<Fault>> {
    let mut rest = launcher::peel(words, launch)?.to_vec();
    for _ in 0..DEEPEST {
        if rest.first().is_some_and(|word| CONTAINERS.contains(&base(word))) {
            given(&rest, launch);
        }
        let Some(handed) = inner(&rest) else { break };
        rest = launcher::peel(&handed, launch)?.to_vec();
    }
    Ok(rest)
}

/// Variables that a container is given (`-e NAME=VALUE`).
fn given(words: &[String], launch: &mut Launch) {
    let behind =
        words.windows(2).filter(|pair| ["-e", "--env"].contains(&pair[0].as_str())).map(|pair| pair[1].as_str());
    let joined = words.iter().filter_map(|word| word.strip_prefix("--env="));
    for (name, value) in behind.chain(joined).filter_map(shell::assignment) {
        launch.environment(&name, &value);
    }
}

/// The line that a shell (`bash -c "…"`), a container (`docker run IMAGE …`) or another is handed.
fn inner(words: &[String]) -> Option<Vec<String>> {
    match base(words.first()?) {
        "bash" | "sh" | "zsh" => {
            let text = words.iter().skip_while(|word| !word.ends_with('c') || !word.starts_with('-')).nth(1)?;
            within(text)
        }
        container if CONTAINERS.contains(&container) => {
            // `docker pull`, `push` and their kin start nothing.
            let starts = ["run", "exec", "compose", "start"];
            words.iter().skip(1).find(|word| starts.contains(&word.as_str()))?;
            image(words).or_else(|| behind(words))
        }
        other if OTHERS.split_whitespace().any(|known| known == other) => behind(words),
        _ => None,
    }
}

/// The known line in a text.
fn within(text: &str) -> Option<Vec<String>> {
    shell::lines(text).into_iter().find(|words| is_known(words))
}

/// The first word behind options that begins a line, or that holds one.
fn behind(words: &[String]) -> Option<Vec<String>> {
    (1..words.len()).find_map(|at| {
        let word = words[at].strip_prefix("--wrap=").unwrap_or(&words[at]);
        if word.contains(' ') { within(word) } else { begins(&words[at..]).then(|| words[at..].to_vec()) }
    })
}

/// An engine's line behind words of a program that is not known, and those words.
pub(super) fn engine(words: &[String]) -> Option<(Vec<String>, String)> {
    // An engine's name alone may be a value.
    let serves = |at: &usize| {
        let second = words.get(at + 1).map_or("", String::as_str);
        serving::program(&words[*at..]).is_some() && (base(&words[*at]) != "vllm" || second == "serve")
    };
    let at = (1..words.len()).find(serves)?;
    Some((words[at..].to_vec(), words[..at].join(" ")))
}

fn begins(words: &[String]) -> bool {
    const STARTERS: [&str; 13] = [
        "torchrun",
        "accelerate",
        "deepspeed",
        "srun",
        "mpirun",
        "mpiexec",
        "bash",
        "sh",
        "uv",
        "poetry",
        "conda",
        "env",
        "python",
    ];
    let name = base(&words[0]);
    STARTERS.contains(&name)
        || name.starts_with("python3")
        || is_program(name)
        || serving::program(words).is_some()
        || shell::assignment(&words[0]).is_some() && words.get(1).is_some_and(|_| begins(&words[1..]))
}

/// What follows an image of an engine: its command, or options of the one it has.
fn image(words: &[String]) -> Option<Vec<String>> {
    let of = |word: &String| {
        IMAGES.iter().find(|(name, _)| !word.starts_with('-') && word.contains(name) && word.contains([':', '/']))
    };
    let value = |at: usize| VALUED.contains(&words[at - 1].as_str());
    let image = |(at, word): (usize, &String)| Some((at, of(word).filter(|_| !value(at))?));
    let (at, (_, program)) = words.iter().enumerate().skip(1).find_map(image)?;
    let mut rest = &words[at + 1..];
    // Variables may say everything.
    let told = || words[..at].iter().any(|word| word.contains("LLAMA_ARG_"));
    if rest.is_empty() && program.first() != Some(&"ollama") && !told() {
        return None;
    }
    // Images of all of llama.cpp's tools say which; that of one for prompts has it (.devops/tools.sh).
    let tag = words[at].rsplit_once(':').map_or("", |(_, tag)| tag);
    let tool = rest.first().and_then(|word| TOOLS.iter().find(|(flag, _)| flag == word));
    let program = match tool {
        Some((_, tool)) if tag.starts_with("full") => {
            rest = &rest[1..];
            &[*tool][..]
        }
        _ if *program == ["llama-server"] && tag.starts_with("light") => &["llama-cli"],
        _ => program,
    };
    // `--entrypoint bash IMAGE -lc "vllm serve …"`
    if let Some(at) =
        rest.iter().position(|word| word.starts_with('-') && !word.starts_with("--") && word.ends_with('c'))
        && let Some(line) = rest.get(at + 1).and_then(|text| within(text))
    {
        return Some(line);
    }
    let own = rest.first().is_some_and(|word| !word.starts_with('-') && !word.contains('/'));
    let program = if own { &[][..] } else { program };
    let mut line: Vec<String> = program.iter().map(|word| (*word).to_owned()).collect();
    line.extend(rest.iter().cloned());
    // The image's tag is the engine's version.
    if let (Some(version), true) = (version(&words[at]), serving::program(&line).is_some()) {
        line.extend(["--engine-version".to_owned(), version]);
    }
    Some(line)
}

/// The version that an image's tag says: `vllm/vllm-openai:v0.11.0`, `llama.cpp:server-cuda-b5781`.
fn version(image: &str) -> Option<String> {
    let tag = image.rsplit_once(':')?.1;
    let number = |text: &str| text.starts_with(|first: char| first.is_ascii_digit());
    if image.contains("vllm-openai") {
        return tag.strip_prefix('v').filter(|text| number(text) && text.contains('.')).map(str::to_owned);
    }
    let build = tag.rsplit('-').next()?;
    build.strip_prefix('b').filter(|text| image.contains("llama.cpp") && number(text)).map(|_| build.to_owned())
}

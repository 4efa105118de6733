//! Short help first: examples, the options people use first, and where the others are. `vramcast help` has them all.

use clap::{Arg, Args, Command};

use super::{Answer, Failure};

/// A command with more options than a screen has lines.
struct Long {
    command: &'static str,
    /// What people use first, in this order.
    first: &'static [&'static str],
    examples: &'static str,
}

const LONG: [Long; 4] = [
    Long {
        command: "train",
        first: &[
            "model",
            "gpu",
            "batch-size",
            "seq-len",
            "lora",
            "qlora",
            "gradient-checkpointing",
            "optimizer",
            "gpus",
            "engine",
            "plan",
        ],
        examples: "\
Examples:
  vramcast train llama3-8b --batch-size 2 --seq-len 4k --gpu h100
  vramcast train llama3-8b --qlora --gpu rtx4090
  vramcast train llama3-70b --gpus 16 --engine fsdp2 --gradient-checkpointing
  vramcast train llama3-8b --plan axolotl.yaml",
    },
    Long {
        command: "plan",
        first: &["model", "gpu", "gpus", "nodes", "batch-size", "seq-len", "keep", "prices", "engine", "plan"],
        examples: "\
Examples:
  vramcast plan llama3-8b --gpu rtx4090
  vramcast plan llama3-70b --gpu h100 --gpus 8 --nodes 8 --keep full
  vramcast plan phi-2 --batch-size 16 --gpu a100-80gb --prices prices.toml",
    },
    Long {
        command: "infer",
        first: &[
            "model",
            "gpu",
            "engine",
            "batch-size",
            "prompt",
            "new-tokens",
            "context",
            "dtype",
            "quantization",
            "tensor-parallel-size",
            "solve",
        ],
        examples: "\
Examples:
  vramcast infer llama3-8b --prompt 4k --new-tokens 512
  vramcast infer llama3-8b --engine vllm --gpu rtx4090 --context 8k
  vramcast infer llama3-8b --engine llama.cpp --gpu rtx4090 -c 8192",
    },
    Long {
        command: "compare",
        first: &["model", "gpu", "batch-size", "seq-len", "lora", "gpus", "engine", "ledger"],
        examples: "\
Examples:
  vramcast compare llama3-8b
  vramcast compare llama3-8b --lora --batch-size 4",
    },
];

/// Whose options, and which.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A command; none lists them.
    command: Option<String>,
    /// A topic of its options, or `all`.
    topic: Vec<String>,
}

/// The grammar with short help.
pub(super) fn short(mut grammar: Command) -> Command {
    // Behind those of the command.
    grammar = grammar.mut_args(|argument| argument.display_order(900));
    for long in &LONG {
        grammar = grammar.mut_subcommand(long.command, |command| {
            let after = format!("{}\n\n{}", long.examples, topics(&command));
            command.mut_args(|argument| shown(argument, long.first)).after_help(after)
        });
    }
    grammar
}

fn shown(argument: Arg, first: &[&str]) -> Arg {
    let id = argument.get_id().as_str().replace('_', "-");
    match first.iter().position(|name| *name == id) {
        Some(_) if argument.is_positional() => argument,
        Some(place) => argument.display_order(place).help_heading(None::<&str>),
        None => argument.hide(true),
    }
}

/// The headings of a command's options, with how many there are.
fn headings(command: &Command) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = Vec::new();
    for argument in command.get_arguments().filter(|argument| !argument.is_positional()) {
        let heading = argument.get_help_heading().unwrap_or("Options");
        match found.iter_mut().find(|(known, _)| known == heading) {
            Some((_, count)) => *count += 1,
            None => found.push((heading.to_owned(), 1)),
        }
    }
    found
}

fn topics(command: &Command) -> String {
    let mut text = format!("All options by topic (`vramcast help {} TOPIC`, or `all`):", command.get_name());
    for (heading, count) in headings(command) {
        text += &format!("\n  {:<28} {count}", heading.to_lowercase());
    }
    text
}

/// The help of a command, or of a topic of it.
pub(super) fn run(arguments: &Arguments, mut grammar: Command) -> Result<Answer, Failure> {
    let Some(name) = &arguments.command else {
        return Ok(Answer::success(grammar.render_help().ansi().to_string()));
    };
    grammar.build();
    let Some(command) = grammar.find_subcommand(name) else {
        let known: Vec<&str> = grammar.get_subcommands().map(Command::get_name).collect();
        return Err(Failure::bad_input(format!("{name} is no command: one of {}", known.join(", "))));
    };
    let mut command = command.clone();
    let topic = arguments.topic.join(" ").to_lowercase();
    if topic.is_empty() {
        let mut short = short(grammar.clone());
        let command = short.find_subcommand_mut(name).unwrap_or(&mut command);
        return Ok(Answer::success(command.render_help().ansi().to_string()));
    }
    let headings: Vec<String> = headings(&command).into_iter().map(|(heading, _)| heading).collect();
    let means = |heading: &&String| match heading.to_lowercase() {
        heading if heading == "options" => topic == heading || topic == "all",
        heading => topic == "all" || heading == topic || heading.split(' ').any(|word| word.starts_with(&topic)),
    };
    let meant: Vec<&String> = headings.iter().filter(means).collect();
    if meant.is_empty() {
        let known = headings.join(", ").to_lowercase();
        return Err(Failure::bad_input(format!("{topic} is no topic of {name}: one of {known}, or all")));
    }
    command = command.mut_args(|argument| {
        let heading = argument.get_help_heading().unwrap_or("Options");
        let hidden = !meant.iter().any(|known| *known == heading);
        argument.hide(hidden)
    });
    Ok(Answer::success(command.render_help().ansi().to_string()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::Cli;
    use super::*;

    /// Every name is an option, and the help fits two screens.
    #[test]
    fn what_is_used_first_exists() {
        let mut short = short(Cli::command());
        for long in &LONG {
            let command = short.find_subcommand_mut(long.command).unwrap();
            for name in long.first {
                let has = command.get_arguments().any(|one| one.get_id().as_str().replace('_', "-") == *name);
                assert!(has, "{} has no --{name}", long.command);
            }
            let lines = command.render_long_help().to_string().lines().count();
            assert!(lines < 100, "{} --help has {lines} lines", long.command);
        }
    }
}

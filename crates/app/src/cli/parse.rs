//! From words to a command.

use std::cell::RefCell;
use std::ffi::OsString;

use clap::{Command, CommandFactory, FromArgMatches};

use vramcast_core::ask::{Scope, table};

use super::{Cli, Failure, help, tips, words};

thread_local! {
    // Some hundreds of options take longer to set up than an estimate takes: once, for a library that is asked often.
    static GRAMMAR: RefCell<Command> = RefCell::new(help::short(Cli::command()));
}

/// Reads a command line, in our words or other tools'. The inner error is clap's: help and the version are such, too.
pub(super) fn parse(arguments: Vec<OsString>) -> Result<Result<Cli, clap::Error>, Failure> {
    GRAMMAR.with_borrow_mut(|grammar| {
        let arguments = translated(known_by_letters(arguments), grammar)?;
        let matches = grammar.try_get_matches_from_mut(&arguments).map_err(|error| tips::improved(error, &arguments));
        Ok(matches.and_then(|mut matches| {
            let cli = Cli::from_arg_matches_mut(&mut matches);
            cli.map_err(|error| error.format(grammar))
        }))
    })
}

/// Puts llama.cpp's and vLLM's flags of several letters behind one dash in words, for `infer` alone.
fn known_by_letters(arguments: Vec<OsString>) -> Vec<OsString> {
    if !arguments.iter().take(3).any(|argument| argument == "infer") {
        return arguments;
    }
    let long = |argument: OsString| {
        let letters = argument.to_str().and_then(|text| text.strip_prefix('-')).unwrap_or_default();
        let known = || table::of(Scope::SERVE).any(|row| row.aliases.contains(&letters));
        match letters {
            "c" => "--context".into(),
            letters if letters.len() > 1 && known() => format!("--{letters}").into(),
            _ => argument,
        }
    };
    arguments.into_iter().map(long).collect()
}

/// The command line in our own words. Words that are not UTF-8 are left as they are.
fn translated(arguments: Vec<OsString>, grammar: &Command) -> Result<Vec<OsString>, Failure> {
    let words: Option<Vec<String>> = arguments.iter().skip(1).map(|word| word.to_str().map(str::to_owned)).collect();
    let Some(words) = words else { return Ok(arguments) };
    let mut ours = true;
    let words = words.into_iter().map(|word| {
        ours &= word != "--";
        if ours { hyphened(word, grammar) } else { word }
    });
    let words = words.collect();
    let commands = grammar.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    let flags = grammar.find_subcommand("infer").into_iter().flat_map(|infer| infer.get_arguments());
    let names = flags.chain(grammar.get_arguments()).flat_map(|flag| flag.get_long_and_visible_aliases());
    let of_infer = names.flatten().map(str::to_owned).collect();
    let words = words::rewrite(words, &words::Known { commands, of_infer })?;
    Ok(arguments.into_iter().take(1).chain(words.into_iter().map(OsString::from)).collect())
}

/// Flags as Python's programs spell them, with underscores.
fn hyphened(word: String, grammar: &Command) -> String {
    let (name, rest) = word.find(['=', '.']).map_or((word.as_str(), ""), |at| word.split_at(at));
    let Some(name) = name.strip_prefix("--").filter(|name| name.contains('_')) else { return word };
    let plain = name.replace('_', "-");
    let mut flags = grammar.get_subcommands().flat_map(Command::get_arguments);
    let known = flags.any(|flag| flag.get_long_and_visible_aliases().is_some_and(|all| all.contains(&plain.as_str())));
    if known { format!("--{plain}{rest}") } else { word }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn underscores_are_hyphens() {
        let grammar = help::short(Cli::command());
        let spelled = |word: &str| hyphened(word.to_owned(), &grammar);
        assert_eq!(spelled("--per_device_train_batch_size=4"), "--per-device-train-batch-size=4");
        assert_eq!(spelled("--lora_target_modules"), "--lora-target-modules");
        assert_eq!(spelled("--no_such_option=a_b"), "--no_such_option=a_b");
        assert_eq!(spelled("q_proj"), "q_proj");
    }

    /// One grammar reads many command lines: none may leave something behind for the next.
    #[test]
    fn what_one_command_line_said_the_next_does_not_know() {
        let parse = |words: &[&str]| parse(words.iter().map(OsString::from).collect()).map_err(|_| ()).unwrap();
        for _ in 0..2 {
            let mistake = parse(&["vramcast", "train", "gpt2", "--no-such-option"]).err().unwrap().to_string();
            assert!(mistake.contains("--no-such-option") && mistake.contains("vramcast train"), "{mistake}");
            assert!(parse(&["vramcast", "train", "gpt2", "--json"]).is_ok_and(|cli| cli.json));
            assert!(parse(&["vramcast", "infer", "gpt2"]).is_ok_and(|cli| !cli.json));
            let help = parse(&["vramcast", "--help"]).err().unwrap();
            assert!(!help.use_stderr());
        }
    }
}

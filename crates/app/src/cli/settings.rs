//! Flags for every setting, made from the table.

use std::marker::PhantomData;
use std::sync::LazyLock;

use clap::{Arg, ArgAction, ArgMatches, Command, Error, FromArgMatches};
use vramcast_core::ask::{Given, Kind, Runner, Scope, Setting, table};

/// Whose settings.
pub(super) trait Whose {
    /// Those who run such plans.
    const SCOPE: Scope;
    /// Their flags, made once: several commands have them, and there are hundreds.
    fn arguments() -> &'static [Arg];
}

/// Settings of training.
#[derive(Debug, Clone, Copy)]
pub(super) struct Training;

/// Settings of generation and serving.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inference;

impl Whose for Training {
    const SCOPE: Scope = Scope::TRAIN;

    fn arguments() -> &'static [Arg] {
        static ARGUMENTS: LazyLock<Vec<Arg>> = LazyLock::new(|| arguments(Training::SCOPE));
        &ARGUMENTS
    }
}

impl Whose for Inference {
    const SCOPE: Scope = Scope::INFER;

    fn arguments() -> &'static [Arg] {
        static ARGUMENTS: LazyLock<Vec<Arg>> = LazyLock::new(|| arguments(Inference::SCOPE));
        &ARGUMENTS
    }
}

/// Settings that were given as flags.
#[derive(Debug, Clone)]
pub(super) struct SettingFlags<W: Whose> {
    pub(super) named: Vec<(String, Given)>,
    whose: PhantomData<W>,
}

impl<W: Whose> SettingFlags<W> {
    /// Whether a flag was given.
    pub(super) fn gives(&self, name: &str) -> bool {
        self.named.iter().any(|(known, _)| known == name)
    }
}

/// The rows of a scope, one for every flag.
fn rows(scope: Scope) -> Vec<&'static Setting> {
    let mut rows: Vec<&Setting> = Vec::new();
    for row in table::of(scope).filter(|row| !row.flag.is_empty()) {
        if !rows.iter().any(|known| known.flag == row.flag) {
            rows.push(row);
        }
    }
    rows
}

fn help(row: &Setting, scope: Scope) -> String {
    let mut text = row.help.to_owned();
    let words: Vec<&str> = match row.kind {
        Kind::Choice(words) => words.iter().map(|(word, _)| *word).collect(),
        Kind::Spelled(spelling) if !row.is_switch() => spelling.words.to_vec(),
        _ => Vec::new(),
    };
    if !words.is_empty() {
        text += &format!(": {}", words.join(", "));
    }
    let scopes: Vec<Scope> = table::all().filter(|other| other.flag == row.flag).map(|row| row.scope).collect();
    let whose: Vec<Runner> = scope.runners().filter(|one| scopes.iter().any(|scope| scope.has(*one))).collect();
    if whose.len() <= 3 {
        text += &format!(" ({})", whose.iter().map(|one| one.title()).collect::<Vec<_>>().join(", "));
    }
    if row.from != "off unless asked for" && !matches!(row.kind, Kind::Refused(_)) {
        text += &format!(" [default: {}]", row.from);
    }
    text
}

fn argument(row: &'static Setting, scope: Scope, taken: &mut Vec<&'static str>) -> Arg {
    let mut argument = Arg::new(row.flag).long(row.flag).help(help(row, scope)).help_heading(row.topic.title());
    let free: Vec<&str> = row.aliases.iter().copied().filter(|alias| !taken.contains(alias)).collect();
    taken.extend(&free);
    argument = argument.visible_aliases(free);
    if matches!(row.kind, Kind::Whole | Kind::Real | Kind::Spelled(_)) {
        // A negative number is a wrong value, not a flag.
        argument = argument.allow_negative_numbers(true);
    }
    if let Some(letter) = row.short {
        argument = argument.short(letter);
    }
    let bare = match row.kind {
        Kind::Spelled(spelling) => spelling.bare,
        Kind::Switch | Kind::Off | Kind::Refused(_) => Some("true"),
        _ => None,
    };
    argument = match bare {
        // What is refused is refused with the value that somebody gives it.
        Some(bare) => {
            argument.num_args(0..=1).require_equals(!matches!(row.kind, Kind::Refused(_))).default_missing_value(bare)
        }
        None => argument.num_args(1),
    };
    let several = matches!(row.kind, Kind::Names) || row.flag == "zero-option";
    argument = argument.action(if several { ArgAction::Append } else { ArgAction::Set });
    if matches!(row.kind, Kind::Refused(_)) {
        argument.value_name("N")
    } else if row.is_switch() {
        argument.hide_possible_values(true).value_name("BOOL")
    } else {
        argument.value_name(row.value)
    }
}

fn arguments(scope: Scope) -> Vec<Arg> {
    let rows = rows(scope);
    let mut taken: Vec<&'static str> = rows.iter().map(|row| row.flag).collect();
    let set = Arg::new("set").long("set").value_name("PATH=VALUE").action(ArgAction::Append);
    let set =
        set.help("Any setting by its place in a plan, such as quantization.threshold=0; see `vramcast list settings`");
    rows.into_iter().map(|row| argument(row, scope, &mut taken)).chain([set]).collect()
}

impl<W: Whose> clap::Args for SettingFlags<W> {
    fn augment_args(command: Command) -> Command {
        command.args(W::arguments())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<W: Whose> FromArgMatches for SettingFlags<W> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut named = Vec::new();
        for name in rows(W::SCOPE).iter().map(|row| row.flag).chain(["set"]) {
            let given = matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine);
            for text in matches.get_many::<String>(name).into_iter().flatten().filter(|_| given) {
                named.push((name.to_owned(), Given::Text(text.clone())));
            }
        }
        Ok(Self { named, whose: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

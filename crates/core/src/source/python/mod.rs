//! Python read without running it: what the calls of a program are handed, as far as its text tells.
//!
//! | module | what is in it |
//! |---|---|
//! | `tokens` | text as lines of tokens |
//! | `expression` | literals, names, arithmetic and calls, as values |
//! | `names` | what names hold, and what lines change that may not run |
//! | `classes` | classes of the file: fields with defaults, and parsers of arguments around them |
//! | `run` | assignments, functions and branches, in reading order |
//!
//! Nothing is imported and nothing is guessed: what the text does not tell is [`UNKNOWN`], with the words that stand there.

mod classes;
mod expression;
mod names;
mod run;
mod tokens;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// The key of an object that is a call: its name stands there, arguments by their names, the others by their numbers.
pub const CALL: &str = "()";
/// The key of an object that is not known: the words that stand in its place.
pub const UNKNOWN: &str = "?";

/// The name of the calls that set variables of the environment: which, and to what.
pub const ENVIRONMENT: &str = "os.environ";

/// The name of the words of a program's line, among what it is given.
pub const ARGUMENTS: &str = "sys.argv";

/// The number of a call among those that are kept, in its value.
const ID: &str = "#";

/// How a call hangs together with the others.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Link {
    /// Whether it stands in a branch of which only a run tells whether it is taken.
    pub unsure: bool,
    /// The calls, by their places in [`Program::calls`], whose results are in each argument.
    pub inside: BTreeMap<String, Vec<usize>>,
}

/// What a program calls, and its functions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Program {
    /// Calls of what is not defined in it, in the order in which they run.
    pub calls: Vec<Map<String, Value>>,
    /// How those hang together.
    pub links: Vec<Link>,
    /// Functions of the file that need no arguments, and what they return.
    pub functions: Vec<(String, Value)>,
    /// Defaults of the arguments that it parses.
    pub defaults: BTreeMap<String, Value>,
    /// What was taken although a run may have it otherwise: defaults of arguments and of the environment.
    pub notes: Vec<String>,
    /// Whether it is larger than what is followed.
    pub over: bool,
}

impl Program {
    /// Whether a call runs for sure, as far as branches go.
    pub fn is_sure(&self, at: usize) -> bool {
        self.links.get(at).is_none_or(|link| !link.unsure)
    }

    /// The calls whose results an argument holds, by its names.
    pub fn inside(&self, at: usize, names: &[&str]) -> &[usize] {
        let link = self.links.get(at);
        names.iter().find_map(|name| link?.inside.get(*name)).map_or(&[], Vec::as_slice)
    }

    /// The calls that were handed the result of one.
    pub fn holders(&self, of: usize) -> impl Iterator<Item = usize> {
        let holds = move |(at, link): (usize, &Link)| {
            (at != of && link.inside.values().any(|calls| calls.contains(&of))).then_some(at)
        };
        self.links.iter().enumerate().filter_map(holds)
    }
}

/// Reads a program; `given` are arguments of its line, by their names.
pub fn read(text: &str, given: &Map<String, Value>) -> Program {
    run::program(&tokens::lines(text), given)
}

/// The code of a notebook; `None` where it is none.
pub fn notebook(value: &Value) -> Option<String> {
    let cells = value.get("cells")?.as_array()?;
    let mut code = String::new();
    for cell in cells.iter().filter(|cell| cell["cell_type"] == "code") {
        match &cell["source"] {
            Value::Array(lines) => lines.iter().filter_map(Value::as_str).for_each(|line| code += line),
            Value::String(text) => code += text,
            _ => {}
        }
        code.push('\n');
    }
    // Lines for the shell are no Python; `%env NAME=value` sets a variable.
    let kept = code.lines().filter_map(|line| match line.strip_prefix("%env ").and_then(|rest| rest.split_once('=')) {
        Some((name, value)) => Some(format!("os.environ[\"{}\"] = \"{}\"", name.trim(), value.trim())),
        None => (!line.trim_start().starts_with(['!', '%'])).then(|| line.to_owned()),
    });
    Some(kept.collect::<Vec<_>>().join("\n"))
}

/// What is not known.
pub fn unknown(words: impl Into<String>) -> Value {
    json!({UNKNOWN: words.into()})
}

/// The words of what is not known.
pub fn words(value: &Value) -> Option<&str> {
    value.get(UNKNOWN)?.as_str()
}

/// The name of a call.
pub fn called(value: &Value) -> Option<&str> {
    value.get(CALL)?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read() {
        let text = r#"
import torch
from trl import SFTConfig
MODEL = "org/" + "name"  # a comment
parser.add_argument("--rank", type=int, default=8)
args = parser.parse_args()
def make(batch, steps=2 * 4):
    config = SFTConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=steps,
        model_init_kwargs={"dtype": torch.bfloat16}, **EXTRA, bf16=True if batch > 1 else False,
        rank=args.rank, name=f"{MODEL}-x", lines=[line for line in open("x")],
    )
    config.max_length = 1_024
    return config
EXTRA = dict(optim="adafactor")
if __name__ == "__main__":
    training = make(4)
    Trainer(MODEL, args=training)
"#;
        let read = read(text, &Map::new());
        let config = &read.calls.iter().find(|call| call[CALL] == "SFTConfig").unwrap();
        assert_eq!(
            (&config["per_device_train_batch_size"], &config["gradient_accumulation_steps"]),
            (&json!(4), &json!(8))
        );
        assert_eq!((&config["max_length"], &config["bf16"], &config["rank"]), (&json!(1024), &json!(true), &json!(8)));
        assert_eq!(words(&config["model_init_kwargs"]["dtype"]), Some("torch.bfloat16"));
        assert_eq!((&config["optim"], &config["name"]), (&json!("adafactor"), &json!("org/name-x")));
        assert!(words(&config["lines"]).is_some());
        let trainer = read.calls.iter().find(|call| call[CALL] == "Trainer").unwrap();
        assert_eq!((&trainer["0"], &trainer["args"]["max_length"]), (&json!("org/name"), &json!(1024)));
    }

    #[test]
    fn branches_that_are_not_known_leave_nothing_known() {
        let read = read(
            "size = 4\nif big():\n    size = 8\nelse:\n    other = 1\nif False:\n    f(1)\nf(size, other)\nwhile True:\n    f(2)\n",
            &Map::new(),
        );
        let calls: Vec<&Map<String, Value>> = read.calls.iter().filter(|call| call[CALL] == "f").collect();
        assert!(words(&calls[0]["0"]).is_some() && words(&calls[0]["1"]).is_some(), "{calls:?}");
        assert_eq!(calls.len(), 2);
    }

    #[test]
    fn whole_numbers_are_divided_as_python_does() {
        for (text, wanted) in [
            ("7 // -2", json!(-4)),
            ("-7 // 2", json!(-4)),
            ("-7 // -2", json!(3)),
            ("8 // -2", json!(-4)),
            ("7 % -2", json!(-1)),
            ("-7 % 2", json!(1)),
            ("-8 % 2", json!(0)),
            ("7.5 // 2", json!(3.0)),
            ("1 << 4", json!(16)),
        ] {
            assert_eq!(read(&format!("f({text})"), &Map::new()).calls[0]["0"], wanted, "{text}");
        }
        for text in
            ["(-9223372036854775807 - 1) // -1", "(-9223372036854775807 - 1) % -1", "1 // 0", "1 % 0", "3 << 63"]
        {
            assert!(words(&read(&format!("f({text})"), &Map::new()).calls[0]["0"]).is_some(), "{text}");
        }
    }

    #[test]
    fn odd_text_ends() {
        for text in [
            "(((((",
            "def f():\n    return f()\nf()",
            "x = [",
            "a = 'b",
            "lambda: (",
            "f(**",
            "x = 9 ** 99999",
            "  \\\n",
            "é = 1\nf(é)",
        ] {
            read(text, &Map::new());
        }
        let deep = format!("x = {}1{}", "(".repeat(5000), ")".repeat(5000));
        read(&deep, &Map::new());
    }
}

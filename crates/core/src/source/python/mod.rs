//! Python read without running it: what the calls of a program are handed, as far as its text tells.
//!
//! | module | what is in it |
//! |---|---|
//! | `tokens` | text as lines of tokens |
//! | `expression` | literals, names, arithmetic and calls, as values |
//! | `run` | assignments, functions and branches, in reading order |
//!
//! Nothing is imported and nothing is guessed: what the text does not tell is [`UNKNOWN`], with the words that stand there.

mod expression;
mod run;
mod tokens;

use serde_json::{Map, Value, json};

/// The key of an object that is a call: its name stands there, arguments by their names, the others by their numbers.
pub const CALL: &str = "()";
/// The key of an object that is not known: the words that stand in its place.
pub const UNKNOWN: &str = "?";

/// What a program calls, and its functions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Program {
    /// Calls of what is not defined in it, in the order in which they run.
    pub calls: Vec<Map<String, Value>>,
    /// Functions of the file that need no arguments, and what they return.
    pub functions: Vec<(String, Value)>,
    /// What was taken although a run may have it otherwise: defaults of arguments and of the environment.
    pub notes: Vec<String>,
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
    // Lines for the shell are no Python.
    let kept = code.lines().filter(|line| !line.trim_start().starts_with(['!', '%']));
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

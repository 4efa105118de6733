//! What a program does to its model and around it by calls that no argument of a trainer holds: Liger's kernels,
//! `torch.compile`, other sizes than the checkpoint's, variables of the environment.

use serde_json::{Value, json};

use super::model::{Run, shown};
use super::{argument, name, unknown};
use crate::ask::file::Content;
use crate::ask::read::Given;
use crate::ask::{environment, tree};
use crate::plan::Fault;
use crate::source::catalogue;
use crate::source::python::{self, ENVIRONMENT};

/// Keys of a config that `from_pretrained` and `AutoConfig` take and that decide a model's size.
const SIZES: [&str; 10] = [
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_local_experts",
];

impl Run<'_> {
    /// `AutoLigerKernelForCausalLM`, `apply_liger_kernel_to_…()` and `torch.compile(model)`, as the Trainer's arguments.
    pub(super) fn kernels(&mut self, value: &mut super::Call) {
        let program = self.program;
        let loads = self.call(self.model).is_some_and(|call| shown(call).contains("AutoLigerKernelFor"));
        let applied = (0..program.calls.len()).find(|at| {
            let name = name(&program.calls[*at]);
            name.starts_with("apply_liger_kernel_to_") || name == "_apply_liger_kernel"
        });
        if loads || applied.is_some() {
            value.insert("use_liger_kernel".into(), json!(true));
        }
        if let Some(at) = applied {
            let options: super::Call =
                super::keywords(&program.calls[at]).map(|(k, v)| (k.clone(), v.clone())).collect();
            if options.values().any(|on| *on == false) {
                value.entry("liger_kernel_config").or_insert(json!(options));
            }
            self.say_if_unsure(at);
        }
        // `m = torch.compile(m)`, `m.compile()`: of the model itself, not of a part.
        let compiles = |at: &usize| {
            let of = self.model.is_some_and(|model| program.inside(*at, &["self", "model", "0"]).contains(&model));
            let method = program.calls[*at].contains_key("self");
            let kept =
                method || self.trainer.is_some_and(|trainer| program.inside(trainer, &["model", "0"]).contains(at));
            name(&program.calls[*at]) == "compile" && of && kept
        };
        if let Some(at) = (0..program.calls.len()).find(compiles) {
            value.insert("torch_compile".into(), json!(true));
            self.say_if_unsure(at);
        }
    }

    /// Sizes that are not the checkpoint's: said to `from_pretrained` or its config, or a resized embedding.
    pub(super) fn reshape(&mut self, content: &mut Content) -> Result<(), Vec<Fault>> {
        let call = self.call(self.model);
        let config = call.and_then(|call| call.get("config")).and_then(Value::as_object);
        let mut sizes: Vec<(&str, Value)> = Vec::new();
        for key in SIZES.iter().filter(|key| !self.leaves_out(key)) {
            let given = [config, call].into_iter().flatten().filter_map(|call| call.get(*key)).next_back();
            sizes.extend(given.map(|value| (*key, value.clone())));
        }
        let unread: Vec<Fault> = sizes.iter().filter_map(|(key, value)| unknown(key, value)).collect();
        if !unread.is_empty() {
            return Err(unread);
        }
        const RESIZE: &str = "resize_token_embeddings";
        let resized = self.on(self.model, &[RESIZE]).last().filter(|_| !self.leaves_out(RESIZE));
        let entry = content.model.as_deref().and_then(catalogue::find);
        if let Some((at, call)) = resized {
            let rows = argument(call, &["new_num_tokens", "0"]).and_then(Value::as_u64);
            let pad = argument(call, &["pad_to_multiple_of", "1"]).and_then(Value::as_u64).unwrap_or(1).max(1);
            match rows.filter(|_| entry.is_some()) {
                Some(rows) => sizes.push(("vocab_size", json!(rows.next_multiple_of(pad)))),
                None => self.notes.push(format!("not simulated: {RESIZE}(…): the embedding has the checkpoint's rows")),
            }
            self.say_if_unsure(at);
        }
        if sizes.is_empty() {
            return Ok(());
        }
        let told: Vec<String> = sizes.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let told = told.join(", ");
        let Some((entry, model)) = entry.zip(content.model.take()) else {
            let first = sizes[0].0;
            let fault = Fault::new("", format!("{told}: sizes of this model are known from its checkpoint alone"));
            return Err(vec![fault.or(format!("give a config.json with these as the model, or --without {first}"))]);
        };
        let mut config = entry.config;
        for (key, value) in sizes {
            let place = match config.get(key) {
                None if config.get("text_config").is_some() => format!("text_config.{key}"),
                _ => key.to_owned(),
            };
            tree::set(&mut config, &place, value);
        }
        config["_name_or_path"] = json!(model);
        self.notes.push(format!("{model} with {told}, as the program has it"));
        content.config = Some(config);
        Ok(())
    }

    /// Variables of the environment that the program sets itself.
    pub(super) fn environment(&mut self, content: &mut Content) {
        let program = self.program;
        let set = program.calls.iter().enumerate().filter(|(_, call)| shown(call) == ENVIRONMENT);
        for (at, call) in set {
            let (Some(variable), Some(value)) = (call.get("0").and_then(Value::as_str), call.get("1")) else {
                continue;
            };
            let text = value.as_str().map_or_else(|| python::words(value).unwrap_or("…").to_owned(), str::to_owned);
            if environment::is_allocator(variable) && value.is_string() {
                content.named.push(("alloc-conf".into(), Given::Text(text)));
                self.say_if_unsure(at);
            } else if environment::cards(variable, &text).is_none_or(|cards| cards > 1) {
                let open = environment::open(variable, &text);
                let cards = environment::cards(variable, &text);
                let cards = cards
                    .map(|cards| format!("{variable}={text}: who starts {cards} processes is for the line to say"));
                self.notes.extend(cards.or(open));
            }
        }
    }
}

//! Models that nobody wrote down: their parameters were learned from the library that defines them.
//!
//! `data/learned.jsonl.zz` has a line for each type, made by `tools/learn/model_types.py`: the names and sizes of all
//! parameters as expressions of the config's keys, which parts are repeated how often, and what a flag adds. Keys that
//! could not be followed are listed: a config that differs there is refused, not guessed at. `data/heads.jsonl.zz` has, in the
//! same form, heads that give labels and the models of timm. How the text is written is in `tools/learn/tables.py`: layers are
//! alike, and types copied from each other, so a module that many have is one line.

mod condition;
mod expression;
mod facts;
pub mod passes;
pub mod program;
pub mod timm;

use std::io::Read;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use self::condition::Place;
use self::facts::Facts;
use super::op::Role;
use super::program::ModuleKind;
use super::{Config, Family, Graph, ModelError, Shape, Task};

/// What reads a type that was learned.
pub static FAMILY: Family = Family {
    name: "learned",
    model_types: &[],
    facts: super::facts::Facts { served: false, ..super::facts::Facts::DEFAULT },
    build,
};

/// No learned type has more parameters than this.
const MOST: usize = 1 << 20;

/// A page waits for every byte, so it has the first alone.
#[cfg(not(target_arch = "wasm32"))]
const PACKED: &[&[u8]] = &[TYPES, include_bytes!("../../../data/heads.jsonl.zz")];
#[cfg(target_arch = "wasm32")]
const PACKED: &[&[u8]] = &[TYPES];
const TYPES: &[u8] = include_bytes!("../../../data/learned.jsonl.zz");
/// What a type's line begins with, and no module's.
const TYPE_START: &str = "{\"type\":\"";

/// What a file holds: modules, each written once, and types that name the module they are.
struct Book {
    modules: Vec<&'static str>,
    types: Vec<&'static str>,
}

fn books() -> &'static [Book] {
    static TEXTS: OnceLock<Vec<String>> = OnceLock::new();
    static BOOKS: OnceLock<Vec<Book>> = OnceLock::new();
    BOOKS.get_or_init(|| {
        let texts = TEXTS.get_or_init(|| {
            let unpacked = |packed: &&[u8]| {
                let mut text = String::new();
                // Files of our own: what cannot be read has no lines.
                let _ = flate2::read::ZlibDecoder::new(*packed).read_to_string(&mut text);
                text
            };
            PACKED.iter().map(unpacked).collect()
        });
        let split = |text: &'static String| {
            let (types, modules) = text.lines().partition(|line| line.starts_with(TYPE_START));
            Book { modules, types }
        };
        texts.iter().map(split).collect()
    })
}

impl Book {
    /// The parameters of a module and of all in it, as rows: kind, name, sizes, where it is.
    fn rows(&self, module: Option<usize>, path: &str, rows: &mut Vec<Value>) {
        let line = module.and_then(|number| self.modules.get(number));
        for part in line.into_iter().flat_map(|line| line.split('\t')) {
            match part.split(' ').collect::<Vec<_>>()[..] {
                [name, kind, sizes, condition] => rows.push(json!([kind, format!("{path}{name}"), sizes, condition])),
                // A module stands before all that hold it, so this ends.
                [name, inner] => self.rows(inner.parse().ok(), &format!("{path}{name}."), rows),
                _ => {}
            }
        }
    }

    /// A line with the parameters in their place.
    fn read(&self, line: &str) -> Option<Value> {
        let mut known = serde_json::from_str::<Value>(line).ok()?;
        for table in known["classes"].as_object_mut()?.values_mut() {
            let mut rows = Vec::new();
            let whole = table["parameters"].as_u64().and_then(|number| usize::try_from(number).ok());
            self.rows(whole, "", &mut rows);
            table["parameters"] = Value::Array(rows);
        }
        Some(known)
    }
}

/// Every type that was learned; some come twice.
pub fn types() -> impl Iterator<Item = &'static str> {
    let lines = books().iter().flat_map(|book| &book.types);
    lines.filter_map(|line| line.strip_prefix(TYPE_START)?.split_once('"')).map(|(name, _)| name)
}

/// What was learned of a type.
fn find(model_type: &str) -> Option<Value> {
    let start = format!("{TYPE_START}{model_type}\",");
    let lines = books().iter().flat_map(|book| book.types.iter().map(move |line| (book, line)));
    let found = lines.filter(|(_, line)| line.starts_with(&start));
    found.filter_map(|(book, line)| book.read(line)).reduce(|mut all, mut more| {
        if let (Some(all), Some(more)) = (all["classes"].as_object_mut(), more["classes"].as_object_mut()) {
            all.append(more);
        }
        all
    })
}

/// The library that a type was learned from, with its version.
pub fn source(model_type: &str) -> Option<String> {
    find(model_type)?["from"].as_str().map(str::to_owned)
}

/// Whether a learned type's forward pass came along too.
pub fn runs(model_type: &str, task: Task) -> bool {
    passes::known(model_type, task.class())
}

/// The heads that a learned type has; nothing, where it was not learned.
pub fn tasks(model_type: &str) -> Option<Vec<Task>> {
    let classes = find(model_type)?;
    Some(classes["classes"].as_object()?.keys().filter_map(|class| Task::by_class(class)).collect())
}

fn build(config: &Config<'_>, task: Task, graph: &mut Graph) -> Result<(), ModelError> {
    let model_type = config.model_type();
    let known = find(model_type).unwrap_or(Value::Null);
    let table = &known["classes"][task.class()];
    if graph.inputs != super::Inputs::inventory() {
        if let Some(pass) = passes::find(config.object(), model_type, task.class())? {
            return program::read(&Value::Object(pass), graph);
        }
        return Err(ModelError::Unsupported {
            what: format!("running the type {model_type}, of which the parameters alone are known,"),
            hint: format!(
                "learn its forward pass with `vramcast learn {} --out model.json` and ask of model.json",
                timm::subject(model_type).unwrap_or_else(|| "config.json".into())
            ),
        });
    }
    Table::new(config.object(), table, model_type).declare(graph)
}

/// A learned table beside a config.
struct Table<'a> {
    facts: Facts<'a>,
    table: &'a Value,
    model_type: &'a str,
}

static NONE: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);

impl<'a> Table<'a> {
    fn new(config: &'a Map<String, Value>, table: &'a Value, model_type: &'a str) -> Self {
        let part = |name: &str| table[name].as_object().unwrap_or(&NONE);
        let facts = Facts { config, defaults: part("defaults"), absent: part("absent"), aliases: part("aliases") };
        Self { facts, table, model_type }
    }

    fn missing(&self, what: String) -> ModelError {
        ModelError::Missing { path: what, family: self.model_type.to_owned() }
    }

    fn number(&self, text: &str) -> Result<u64, ModelError> {
        expression::value(text, &|name| self.facts.fraction(name)).map_err(|what| self.missing(what))
    }

    fn declare(&self, graph: &mut Graph) -> Result<(), ModelError> {
        for path in self.table["fixed"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !self.facts.is_default(path) {
                let usual = self.facts.defaults.get(path).unwrap_or(&Value::Null).to_string();
                return Err(ModelError::BadValue {
                    path: path.to_owned(),
                    value: self.facts.get(path).unwrap_or(Value::Null).to_string().chars().take(60).collect(),
                    expected: format!(
                        "{}, with which the type {} was learned",
                        usual.chars().take(60).collect::<String>(),
                        self.model_type
                    ),
                });
            }
        }
        let rows: Vec<Row<'_>> =
            self.table["parameters"].as_array().into_iter().flatten().filter_map(Row::new).collect();
        let mut declared = 0;
        for together in rows.chunk_by(|a, b| a.list().is_some() && a.list() == b.list()) {
            match together[0].list() {
                None => self.row(graph, &together[0], &mut Vec::new(), &mut declared)?,
                // Layer by layer, as modules hold them.
                Some(list) => {
                    let count = self.extent(list)?;
                    for index in 0..count {
                        for row in together {
                            self.row(graph, row, &mut vec![Place { index, count }], &mut declared)?;
                        }
                    }
                }
            }
        }
        for pair in self.table["tied"].as_array().into_iter().flatten() {
            if let (Some(name), Some(own)) = (pair[0].as_str(), pair[1].as_str())
                && let Some(parameter) = graph.find(own)
            {
                graph.alias(name, parameter);
            }
        }
        Ok(())
    }

    fn extent(&self, list: &str) -> Result<u64, ModelError> {
        let text = self.table["loops"][list].as_str().unwrap_or("0");
        let count = self.number(text)?;
        if count > super::config::MAX_LAYERS {
            let expected = format!("a number of layers up to {}", super::config::MAX_LAYERS);
            return Err(ModelError::BadValue { path: text.to_owned(), value: count.to_string(), expected });
        }
        Ok(count)
    }

    /// Declares what a row stands for at the places of its loops so far.
    fn row(
        &self,
        graph: &mut Graph,
        row: &Row<'_>,
        places: &mut Vec<Place>,
        declared: &mut usize,
    ) -> Result<(), ModelError> {
        let first = places.first().copied().unwrap_or(Place { index: 0, count: 1 });
        let there = condition::holds(row.condition, first, &self.table["lists"], &self.facts);
        if !there.map_err(|what| self.missing(what))? {
            return Ok(());
        }
        if let Some(list) = row.list_at(places.len()) {
            let count = self.extent(&list)?;
            for index in 0..count {
                places.push(Place { index, count });
                self.row(graph, row, places, declared)?;
                places.pop();
            }
            return Ok(());
        }
        let mut name = row.name.to_owned();
        for place in places.iter() {
            name = name.replacen("{}", &place.index.to_string(), 1);
        }
        let sizes = row.sizes.split(',').filter(|text| !text.is_empty()).map(|text| self.number(text));
        let shape = Shape::new(&sizes.collect::<Result<Vec<_>, _>>()?);
        *declared += 1;
        if *declared > MOST {
            return Err(ModelError::Inconsistent {
                module: self.model_type.into(),
                problem: "too many parameters".into(),
            });
        }
        declare(graph, row.kind, &name, shape);
        Ok(())
    }
}

/// One line of a table: what kind of module, the name, its sizes, where it is.
struct Row<'a> {
    kind: &'a str,
    name: &'a str,
    sizes: &'a str,
    condition: &'a str,
}

impl<'a> Row<'a> {
    fn new(row: &'a Value) -> Option<Self> {
        let text = |place: usize| row[place].as_str();
        Some(Self { kind: text(0)?, name: text(1)?, sizes: text(2)?, condition: text(3)? })
    }

    /// The outermost list that it is repeated in.
    fn list(&self) -> Option<&'a str> {
        self.name.find(".{}").map(|place| &self.name[..place])
    }

    /// The list of its loop number `depth`.
    fn list_at(&self, depth: usize) -> Option<String> {
        let place = self.name.match_indices(".{}").nth(depth)?.0;
        Some(self.name[..place].to_owned())
    }
}

/// Puts a parameter and the module that owns it into the graph.
fn declare(graph: &mut Graph, kind: &str, name: &str, shape: Shape) {
    let (path, last) = name.rsplit_once('.').unwrap_or(("", name));
    let weight = last == "weight";
    let role = match kind {
        "L" | "T" if weight => Role::Linear,
        "E" if weight => Role::Embedding,
        "C" if weight => Role::Convolution,
        "N" => Role::Norm,
        "L" | "T" | "C" => Role::Bias,
        _ => Role::Other,
    };
    let id = graph.declare(name.to_owned(), shape, role);
    let module = match kind {
        _ if path.is_empty() => return,
        "L" if weight => ModuleKind::Linear { inputs: shape.size(1), outputs: shape.size(0) },
        "T" if weight => ModuleKind::Conv1d { inputs: shape.size(0), outputs: shape.size(1) },
        "E" if weight => ModuleKind::Embedding { rows: shape.size(0), width: shape.size(1) },
        "C" => ModuleKind::Convolution,
        "N" => ModuleKind::Norm,
        _ => ModuleKind::Container,
    };
    let module = graph.leaf(path, module);
    graph.attach(module, &[Some(id)]);
}

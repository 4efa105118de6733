//! A chat template within bounds of bytes and time. minijinja counts steps alone, and one step can double a value.
//!
//! So a template's instructions are gone through before they run: behind each that makes a value stands one that weighs it, and text
//! is joined by a function that looks first. What makes much of little at once (`replace`, `join`, widths) is weighed before it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use minijinja::machinery::{
    Instruction, Instructions, Token, eval, get_compiled_template, make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, escape_formatter, filters};

/// Instructions of one filling in.
const FUEL: u64 = 15_000_000;
/// What one value may weigh beside the chat itself, four times over.
const VALUE: u64 = 1 << 20;
/// How often that all values together may weigh.
const TOGETHER: u64 = 128;
const TIME: Duration = Duration::from_secs(1);
/// What an element of a list takes.
const ELEMENT: u64 = 32;
/// Lists in lists, and parts of one expression: readers of both call themselves.
const DEPTH: usize = 64;
const PARTS: usize = 1_000;
const BRANCHES: usize = 200;
/// Names that one template may set in namespaces.
const NAMES: usize = 64;

/// Names that no template can write.
const CHECK: &str = "{check}";
const INNER: &str = "{inner}";
const JOIN: &str = "{~}";

/// What is left for one filling in.
struct Budget {
    value: u64,
    left: AtomicU64,
    until: Instant,
}

/// Fills a template in. `chat` is how many bytes it is given.
pub(super) fn fill(
    template: &str,
    environment: Environment<'_>,
    syntax: SyntaxConfig,
    values: Value,
    chat: u64,
) -> Result<String, Error> {
    fill_within(VALUE + 4 * chat, template, environment, syntax, values)
}

/// The same, where no value weighs more.
fn fill_within(
    value: u64,
    template: &str,
    mut environment: Environment<'_>,
    syntax: SyntaxConfig,
    values: Value,
) -> Result<String, Error> {
    look(template, &syntax)?;
    environment.set_syntax(syntax);
    let budget = Budget { value, left: AtomicU64::new(value.saturating_mul(TOGETHER)), until: Instant::now() + TIME };
    guard(&mut environment, &Arc::new(budget));
    let parsed = environment.template_from_str(template)?;
    let compiled = get_compiled_template(&parsed);
    let main = weighed(&compiled.instructions)?;
    let blocks =
        compiled.blocks.iter().map(|(name, block)| Ok((*name, weighed(block)?))).collect::<Result<_, Error>>()?;
    let mut text = String::new();
    eval(&environment, &main, values, &blocks, &mut make_string_output(&mut text), AutoEscape::None)?;
    if text.len() as u64 > value {
        return Err(refused(format!("a text of {} bytes, and {value} are the most", text.len())));
    }
    Ok(text)
}

fn refused(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// What can be seen before it is read: minijinja works constants out while reading, and calls itself for every part of an expression.
fn look(template: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    let (mut parts, mut branches, mut constants) = (0, 0, 0_u64);
    let (mut times, mut product, mut text) = (false, 1_u64, 0_u64);
    for token in tokenize(template, false, syntax.clone()) {
        let (token, span) = token?;
        parts += 1;
        match token {
            Token::VariableStart | Token::BlockStart => (parts, times, product, text) = (0, false, 1, 0),
            Token::VariableEnd | Token::BlockEnd if times => {
                constants = constants.saturating_add(product.saturating_mul(text))
            }
            Token::Ident("elif") => branches += 1,
            Token::Mul => times = true,
            // No sum or product of numbers is more than that of each and one.
            Token::Int(number) => product = product.saturating_mul(number.saturating_add(1)),
            Token::Int128(_) | Token::Pow => product = u64::MAX,
            Token::Str(constant) => text += constant.len() as u64,
            Token::String(constant) => text += constant.len() as u64,
            Token::BracketOpen | Token::BraceOpen => text += 1,
            _ => {}
        }
        let what = match (parts > PARTS, branches > BRANCHES, constants > VALUE) {
            (true, ..) => format!("an expression of more than {PARTS} parts"),
            (_, true, _) => format!("more than {BRANCHES} times elif"),
            (.., true) => format!("constants that are multiplied to more than {VALUE} bytes"),
            _ => continue,
        };
        return Err(refused(format!("{what}, in line {}", span.start_line)));
    }
    Ok(())
}

/// The same instructions, with every value weighed that they make.
fn weighed<'source>(all: &Instructions<'source>) -> Result<Instructions<'source>, Error> {
    let mut names: Vec<&str> = Vec::new();
    let mut parts = Vec::new();
    let mut starts = vec![0];
    for at in 0.. {
        let Some(one) = all.get(at) else { break };
        let call = |name, count| Instruction::CallFunction(name, Some(count));
        let step = match one {
            Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
            Instruction::StringConcat => vec![call(JOIN, 2)],
            Instruction::SetAttr(name) => {
                if !names.contains(name) {
                    names.push(name);
                }
                vec![Instruction::Swap, call(INNER, 1), Instruction::Swap, one.clone()]
            }
            Instruction::Add
            | Instruction::Mul
            | Instruction::Slice
            | Instruction::GetItem
            | Instruction::BuildMap(_)
            | Instruction::BuildList(_)
            | Instruction::BuildTuple(_)
            | Instruction::ApplyFilter(..)
            | Instruction::PerformTest(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_)
            | Instruction::Eq
            | Instruction::Ne
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::In => vec![one.clone(), call(CHECK, 1)],
            _ => vec![one.clone()],
        };
        starts.push(starts[at as usize] + step.len() as u32);
        let line = all.get_line(at).unwrap_or_default() as u16;
        parts.extend(step.into_iter().map(|part| (part, line)));
    }
    if names.len() > NAMES {
        return Err(refused(format!("it sets {} names in namespaces, and {NAMES} are the most", names.len())));
    }
    let mut new = Instructions::new(all.name(), all.source());
    for (mut part, line) in parts {
        if let Instruction::Jump(to)
        | Instruction::JumpIfFalse(to)
        | Instruction::JumpIfFalseOrPop(to)
        | Instruction::JumpIfTrueOrPop(to)
        | Instruction::Iterate(to)
        | Instruction::BuildMacro(_, to, _) = &mut part
        {
            *to = starts.get(*to as usize).copied().unwrap_or(u32::MAX);
        }
        new.add_with_line(part, line);
    }
    Ok(new)
}

/// Gives an environment the functions that weigh, and filters that are weighed before they run.
fn guard(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    environment.set_fuel(Some(FUEL));
    let own = Arc::clone(budget);
    environment.add_function(CHECK, move |made: Rest<ValueOrKwargs>| own.check(only(made)?, false));
    let own = Arc::clone(budget);
    environment.add_function(INNER, move |made: Rest<ValueOrKwargs>| own.check(only(made)?, true));
    let own = Arc::clone(budget);
    environment.add_function(JOIN, move |parts: Rest<ValueOrKwargs>| {
        for part in parts.iter() {
            own.weigh(part)?;
        }
        own.check(Value::from(parts.iter().map(|part| part.to_string()).collect::<String>()), false)
    });
    let own = Arc::clone(budget);
    environment.set_formatter(move |out, state, value| {
        let weight = own.weigh(value)?;
        own.spend(weight)?;
        escape_formatter(out, state, value)
    });
    let own = Arc::clone(budget);
    environment.set_unknown_method_callback(move |state, value, method, args| {
        let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
        // `", ".join(list)`: the other way round than the filter.
        let turned = method == "join" && all.len() == 2;
        own.ahead(method, &if turned { vec![all[1].clone(), all[0].clone()] } else { all })?;
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    let own = [
        ("replace", Value::from_function(filters::replace)),
        ("join", Value::from_function(filters::join)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(filters::indent)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
    ];
    for (name, filter) in own {
        let budget = Arc::clone(budget);
        environment.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            budget.ahead(name, &args)?;
            filter.call(state, &args)
        });
    }
}

fn only(mut all: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    all.pop().map(ValueOrKwargs::into_value).ok_or_else(|| refused("nothing to weigh"))
}

impl Budget {
    /// A value that was made: what it is by itself counts; a list that is only worked out when read is worked out now, so that
    /// none stands on thousands of others. `inner`: it goes into a namespace.
    fn check(&self, value: Value, inner: bool) -> Result<Value, Error> {
        if Instant::now() > self.until {
            return Err(refused(format!("it takes more than {} s", TIME.as_secs())));
        }
        if inner && is_namespace(&value) {
            return Err(refused("a namespace inside of another"));
        }
        self.weigh(&value)?;
        if let Some(text) = value.as_str() {
            self.spend(text.len() as u64)?;
            return Ok(value);
        }
        match value.kind() {
            ValueKind::Iterable => {
                let list: Vec<Value> = value.try_iter()?.collect();
                self.spend(ELEMENT * list.len() as u64)?;
                Ok(Value::from(list))
            }
            ValueKind::Seq | ValueKind::Map => {
                self.spend(ELEMENT * value.len().unwrap_or_default() as u64)?;
                Ok(value)
            }
            _ => Ok(value),
        }
    }

    /// Some bytes of all that values may take.
    fn spend(&self, bytes: u64) -> Result<(), Error> {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(bytes), Ordering::Relaxed);
        if bytes > left {
            Err(refused(format!("its values take more than {} bytes together", self.value * TOGETHER)))
        } else {
            Ok(())
        }
    }

    fn within(&self, bytes: u64) -> Result<u64, Error> {
        if bytes > self.value { Err(refused(format!("a value of more than {} bytes", self.value))) } else { Ok(bytes) }
    }

    /// What a value takes when it is written out.
    fn weigh(&self, value: &Value) -> Result<u64, Error> {
        let mut bytes = 0;
        self.weigh_inside(value, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn weigh_inside(&self, value: &Value, depth: usize, bytes: &mut u64) -> Result<(), Error> {
        if let Some(text) = value.as_str() {
            *bytes += text.len() as u64;
            return self.within(*bytes).map(drop);
        }
        *bytes = self.within(*bytes + if depth > 0 { ELEMENT } else { 0 })?;
        let kind = value.kind();
        if !matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            return Ok(());
        }
        if depth > DEPTH {
            return Err(refused(format!("lists in each other more than {DEPTH} deep")));
        }
        if depth > 0 && is_namespace(value) {
            return Err(refused("a namespace inside of another value"));
        }
        self.within(value.len().unwrap_or_default() as u64 * ELEMENT)?;
        for item in value.try_iter()? {
            self.weigh_inside(&item, depth + 1, bytes)?;
            if kind == ValueKind::Map {
                self.weigh_inside(&value.get_item(&item)?, depth + 1, bytes)?;
            }
        }
        Ok(())
    }

    /// What some filters and methods make of what they are given, at most.
    fn ahead(&self, name: &str, args: &[Value]) -> Result<(), Error> {
        let Some((first, rest)) = args.split_first() else { return Ok(()) };
        let weight = self.weigh(first)?;
        let mut others = 0;
        let mut largest = 0_u64;
        for other in rest {
            others += self.weigh(other)?;
            largest = largest.max(number(other));
        }
        let text = first.as_str().unwrap_or_default();
        let most = match name {
            "replace" => {
                let [from, to] = [0, 1].map(|at| rest.get(at).and_then(Value::as_str).unwrap_or_default());
                (text.matches(from).count() as u64).saturating_mul(to.len() as u64) + weight
            }
            "join" => (weight / ELEMENT + first.len().unwrap_or_default() as u64).saturating_mul(others) + weight,
            "indent" => (text.lines().count() as u64 + 1).saturating_mul(largest) + weight,
            "batch" | "slice" => largest.saturating_mul(ELEMENT) + weight,
            "format" => {
                let places = text.matches(['%', '{']).count() as u64;
                let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|run| !run.is_empty());
                let widths = numbers.fold(0, |sum: u64, run| sum.saturating_add(run.parse().unwrap_or(u64::MAX)));
                let given = if text.contains('*') || text.contains(":{") { largest } else { 0 };
                places.saturating_mul(others.saturating_add(given)).saturating_add(widths).saturating_add(weight)
            }
            _ => return Ok(()),
        };
        self.within(most).and_then(|bytes| self.spend(bytes))
    }
}

/// The largest number in an argument, or in several that have names.
fn number(value: &Value) -> u64 {
    let own = value.as_i64().unwrap_or_default().unsigned_abs();
    match value.kind() {
        ValueKind::Map => value
            .try_iter()
            .into_iter()
            .flatten()
            .filter_map(|key| value.get_item(&key).ok())
            .map(|one| number(&one))
            .max()
            .unwrap_or(0),
        _ => own,
    }
}

/// Names can be set in it later, itself among them.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("Namespace"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    fn filled(template: &str) -> Result<String, String> {
        let values =
            context! { messages => vec![context! { role => "user", content => " a\nb " }], bos_token => "<s>" };
        fill_within(1 << 16, template, Environment::new(), SyntaxConfig::default(), values)
            .map_err(|error| error.to_string())
    }

    /// Forty turns of a loop that sets `x` anew.
    fn forty(first: &str, next: &str, last: &str) -> String {
        format!(
            "{{% set n = namespace(x={first}) %}}{{% for i in range(40) %}}{{% set n.x = {next} %}}{{% endfor %}}{{{{ {last} }}}}"
        )
    }

    #[test]
    fn what_doubles_is_refused() {
        let long = "{% set s = bos_token * 10000 %}";
        let text = "x".repeat(10_000);
        for template in [
            forty("'ab'", "n.x + n.x", "n.x|length"),
            forty("'ab'", "n.x ~ n.x", "n.x|length"),
            forty("'ab'", "n.x * 2", "n.x|length"),
            forty("'ab'", "n.x.replace('', n.x)", "n.x|length"),
            forty("'ab'", "n.x|replace('a', n.x)", "n.x|length"),
            forty("'ab'", "[n.x, n.x]|join", "n.x|length"),
            forty("'ab'", "'%s%s'|format(n.x, n.x)", "n.x|length"),
            forty("'ab'", "'{0}{0}'.format(n.x)", "n.x|length"),
            forty("range(9)", "n.x + n.x", "n.x|list|length"),
            forty("[1]", "n.x|chain(n.x)", "n.x|list|length"),
            forty("[1]", "[n.x, n.x]", "n.x"),
            forty("[1]", "{'a': n.x, 'b': n.x}", "n.x == 1"),
            forty("1", "[n]", "n ~ ''"),
            "{% set n = namespace() %}{% set n.x = n %}{{ n }}".into(),
            "{% set n = namespace(x=1) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}".into(),
            "{% macro d(x, n) %}{% if n %}{{ d(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ d('ab', 40) }}".into(),
            "{% macro d(x, n) %}{% if n %}{{ d([x, x], n - 1) }}{% endif %}{% endmacro %}{{ d('ab', 40) }}".into(),
            "{{ 'a' * 99999999 ~ 'a' * 99999999 }}".into(),
            "{{ 'a' * (9999 + 1) * (9999 + 1) }}".into(),
            "{{ ([1] * 99999999)|list|length }}".into(),
            "{{ ([bos_token] * 99999999)|list|length }}".into(),
            format!("{long}{{{{ range(99999)|join(s) }}}}"),
            format!("{long}{{{{ s.join(range(99999)) }}}}"),
            format!("{long}{{{{ s.replace('<', s) }}}}"),
            format!("{long}{{{{ range(99999)|map('indent', 9999, true)|list|length }}}}"),
            "{{ '%999999999s'|format('a') }}{{ '{:999999999}'.format('a') }}".into(),
            "{{ '%*d'|format(999999999, 1) }}".into(),
            "{{ bos_token|indent(999999999) }}".into(),
            "{{ bos_token|indent(width=999999999) }}".into(),
            "{{ [1]|batch(999999999, 'x')|list }}{{ [1]|slice(999999999)|list }}".into(),
            format!("{{% for i in range(99999) %}}{text}{{% endfor %}}"),
            format!("{{% set y %}}{{% for i in range(99999) %}}{text}{{% endfor %}}{{% endset %}}"),
            format!("{{{{ {} }}}}", vec!["bos_token"; 9999].join(" ~ ")),
            format!("{{{{ {}1 }}}}", "not ".repeat(9999)),
            format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(9999)),
            (0..99).map(|at| format!("{{% set a{at} = 'x' * 4000000 %}}")).collect(),
            "{% for i in range(9999) %}{{ bos_token }}{{ bos_token }}{{ bos_token }}{% endfor %}".into(),
        ] {
            let said = filled(&template);
            assert!(said.is_err(), "{template:.200}: {:.100}", said.unwrap_or_default());
        }
    }

    #[test]
    fn what_people_write_is_as_before() {
        for (template, text) in [
            (
                "{% for m in messages %}{{ m.role ~ ': ' + m['content'] | trim }}|{% endfor %}{{ '=' * 3 }}",
                "user: a\nb|===",
            ),
            (
                "{% set n = namespace(a=false, b='') %}{% if messages[0].role == 'user' %}{% set n.a = true %}{% endif %}{{ n.a }}",
                "True",
            ),
            ("{% macro m(x, y='q') %}<{{ x }}{{ y }}>{% endmacro %}{{ m(1) }}{{ m(2, y=3) }}", "<1q><23>"),
            (
                "{% for m in (messages + messages)[1:] %}{{ loop.index }}{{ m.content.split('\\n')[-1].strip() }}{% else %}none{% endfor %}",
                "1b",
            ),
            (
                "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% if i == 3 %}{% break %}{% endif %}{% endfor %}",
                "13",
            ),
            (
                "{% set x %}a{{ bos_token }}{% endset %}{{ x|upper }}{{ x is string and 'a' in x }}{{ [1, 2]|map('string')|join('-') }}",
                "A<S>True1-2",
            ),
            (
                "{% for x in [[1, 2], [3]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}{{ dict(a=1).items()|list }}",
                "123[('a', 1)]",
            ),
            (
                "{% filter upper %}a{% endfilter %}{% call(x) m() %}{{ x }}{% endcall %}{% macro m() %}{{ caller(7) }}{% endmacro %}",
                "A7",
            ),
        ] {
            let (bounded, plain) = (filled(template), {
                let mut environment = Environment::new();
                environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
                let values =
                    context! { messages => vec![context! { role => "user", content => " a\nb " }], bos_token => "<s>" };
                environment.render_str(template, values).map_err(|error| error.to_string())
            });
            assert_eq!(bounded, plain, "{template}");
            if let Ok(bounded) = bounded {
                assert_eq!(bounded, text, "{template}");
            }
        }
    }
}

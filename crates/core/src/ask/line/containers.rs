//! Files that start containers: services of Docker Compose and pods of Kubernetes, as the line that the first of them with an
//! engine stands for.

use serde_json::Value;

use super::{base, shell};

/// Parts of images' names and of programs by which an engine is known.
const ENGINES: [&str; 8] =
    ["vllm", "sglang", "text-generation", "llama.cpp", "llama-server", "trtllm-serve", "tensorrt-llm", "tritonserver"];

/// A container as its file has it.
#[derive(Debug, Default)]
struct Container {
    image: String,
    /// What runs in the image's stead.
    program: Vec<String>,
    /// What stands behind it.
    arguments: Vec<String>,
    variables: Vec<String>,
}

/// The line that a file starts; `None` where it starts no engine.
pub(in crate::ask) fn words(file: &Value) -> Option<Vec<String>> {
    let services = file.get("services").and_then(Value::as_object);
    let composed = services.into_iter().flat_map(|all| all.values()).map(service);
    let mut pods = Vec::new();
    if file.get("kind").is_some_and(Value::is_string) {
        gather(file, &mut pods);
    }
    composed.chain(pods.into_iter().map(pod)).find(Container::serves).map(Container::line)
}

/// A service of Compose.
fn service(value: &Value) -> Container {
    let variables = match &value["environment"] {
        Value::Object(map) => map.iter().map(|(name, value)| format!("{name}={}", text(value))).collect(),
        list => texts(list),
    };
    Container {
        image: text(&value["image"]),
        program: split(&value["entrypoint"]),
        arguments: split(&value["command"]),
        variables,
    }
}

/// A container of a pod: its command stands in the image's stead.
fn pod(value: &Value) -> Container {
    let variable = |one: &Value| Some(format!("{}={}", one["name"].as_str()?, text(one.get("value")?)));
    Container {
        image: text(&value["image"]),
        program: texts(&value["command"]),
        arguments: texts(&value["args"]),
        variables: value["env"].as_array().into_iter().flatten().filter_map(variable).collect(),
    }
}

/// Containers wherever a pod's template stands.
fn gather<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                match (key.as_str(), inner.as_array()) {
                    ("containers", Some(all)) => found.extend(all),
                    _ => gather(inner, found),
                }
            }
        }
        Value::Array(all) => all.iter().for_each(|inner| gather(inner, found)),
        _ => {}
    }
}

impl Container {
    fn serves(&self) -> bool {
        let known = |word: &str| ENGINES.iter().any(|name| word.contains(name));
        known(&self.image) || self.program.iter().chain(&self.arguments).any(|word| known(word))
    }

    fn line(self) -> Vec<String> {
        let mut line: Vec<String> = Vec::new();
        if self.program.is_empty() {
            line.extend(["docker".to_owned(), "run".to_owned()]);
            line.extend(self.variables.into_iter().flat_map(|variable| ["-e".to_owned(), variable]));
            line.push(self.image);
        } else {
            line.push("env".to_owned());
            line.extend(self.variables);
            line.extend(
                self.program
                    .iter()
                    .map(|word| if word.starts_with('/') { base(word).to_owned() } else { word.clone() }),
            );
        }
        line.extend(self.arguments);
        line
    }
}

/// Words of a list, or of a line.
fn split(value: &Value) -> Vec<String> {
    match value {
        Value::String(line) => shell::lines(&expanded(line)).into_iter().next().unwrap_or_default(),
        list => texts(list),
    }
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => expanded(text),
        other => other.to_string(),
    }
}

/// A text with the values that stand behind names for where they are not set: `${PORT:-8000}`.
fn expanded(text: &str) -> String {
    let mut made = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let (before, inner) = (&rest[..at], &rest[at + 2..]);
        made.push_str(before);
        let Some(end) = inner.find('}') else { break };
        match inner[..end].split_once(":-").or_else(|| inner[..end].split_once('-')) {
            Some((_, value)) => made.push_str(value),
            None => made.push_str(&rest[at..at + 3 + end]),
        }
        rest = &inner[end + 1..];
    }
    made.push_str(rest);
    made
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::words;

    #[test]
    fn services_and_pods_are_lines() {
        let compose = json!({"services": {
            "web": {"image": "ghcr.io/open-webui/open-webui:main"},
            "llm": {
                "image": "vllm/vllm-openai:v0.19.0",
                "environment": ["VLLM_USE_V1=1"],
                "command": ["--model", "${MODEL:-Qwen/Qwen3-8B}", "--port", 8000],
            },
        }});
        let line = "docker run -e VLLM_USE_V1=1 vllm/vllm-openai:v0.19.0 --model Qwen/Qwen3-8B --port 8000";
        assert_eq!(words(&compose).unwrap().join(" "), line);
        let folded = json!({"services": {"llm": {"image": "x", "entrypoint": "vllm serve", "command": "a/b --tp 2"}}});
        assert_eq!(words(&folded).unwrap().join(" "), "env vllm serve a/b --tp 2");
        let pod = json!({"kind": "Deployment", "spec": {"template": {"spec": {"containers": [
            {"image": "vllm/vllm-openai", "command": ["/bin/sh", "-c"], "args": ["vllm serve a/b"],
             "env": [{"name": "HF_HOME", "value": "/x"}, {"name": "HF_TOKEN", "valueFrom": {}}]},
        ]}}}});
        assert_eq!(words(&pod).unwrap(), ["env", "HF_HOME=/x", "sh", "-c", "vllm serve a/b"]);
        assert_eq!(words(&json!({"services": {"db": {"image": "postgres"}}})), None);
    }
}

//! Lines of serving engines as people paste them, each as one word in quotes behind a flag (truth/external/found/lines_serving.txt):
//! answered, refused with what to do instead, or of a model that only the hub knows.

use assert_cmd::Command;

const LINES: &str = include_str!("../../../truth/external/found/lines_serving.txt");

fn asked(line: &str) -> (Option<i32>, String) {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "400").args(["fit", "--gpu", "h200", line]);
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn lines_are_answered_or_say_why_not() {
    let lines: Vec<&str> = LINES.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(lines.len() >= 180, "{}", lines.len());
    let check = |line: &&str| {
        let (wanted, rest) = line.split_once(' ').unwrap();
        let (code, said) = asked(rest);
        let cured = said.contains("hint: ") && !said.contains("what it changes is not known");
        match (wanted, code) {
            ("answer", Some(0 | 1)) | ("network", Some(3)) => None,
            ("refuse", Some(2)) if cured => None,
            _ => Some(format!("{line}: {code:?} {said}")),
        }
    };
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let parts: Vec<_> = lines
            .chunks(50)
            .map(|part| scope.spawn(move || part.iter().filter_map(check).collect::<Vec<_>>()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a line's own words say shows in the answer as if it were asked for by flags.
#[test]
fn lines_mean_what_flags_do() {
    let budget = |words: &[&str]| {
        let mut command = Command::cargo_bin("vramcast").unwrap();
        command.env("HF_HUB_OFFLINE", "1").args(words).arg("--json");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect(&said);
        document["budgets"][0].clone()
    };
    let infer = |words: &str| budget(&[&["infer"], words.split(' ').collect::<Vec<_>>().as_slice()].concat());
    for (line, flags) in [
        // The model stands last, behind the value of a flag.
        (
            "vllm serve --port 8000 --max-model-len 4096 Qwen/Qwen3-8B",
            "Qwen/Qwen3-8B --engine vllm --gpu h200 --max-model-len 4096",
        ),
        (
            "unset X Y; exec vllm serve Qwen/Qwen3-8B --cudagraph-capture-sizes 1 2 4 8",
            "Qwen/Qwen3-8B --engine vllm --gpu h200 --max-cudagraph-capture-size 8",
        ),
        (
            "wrapper -g=4 -- vllm serve Qwen/Qwen2.5-VL-7B-Instruct --mm-processor-kwargs '{\"max_pixels\": 200704}'",
            "Qwen/Qwen2.5-VL-7B-Instruct --engine vllm --gpu h200 --max-pixels 200704",
        ),
        (
            "sglang serve --model-path Qwen/Qwen3-8B --chunked-prefill-size -1 --cuda-graph-max-bs 16",
            "Qwen/Qwen3-8B --engine sglang --gpu h200 --chunked-prefill-size 16384 --max-cudagraph-capture-size 16",
        ),
        (
            "podman run -v ~/.cache/vllm:/home/vllm/.cache --name=vllm registry.example/rhaiis/rh-vllm-cuda vllm serve Qwen/Qwen3-8B",
            "Qwen/Qwen3-8B --engine vllm --gpu h200",
        ),
        ("vllm serve /models/Qwen3-32B-AWQ", "Qwen/Qwen3-32B --engine vllm --gpu h200 --quantization awq"),
    ] {
        let (mut one, mut other) = (budget(&["fit", "--gpu", "h200", line]), infer(flags));
        [&mut one, &mut other].into_iter().for_each(|budget| budget["notes"] = serde_json::Value::Null);
        assert!(one["cache"].is_u64(), "{line}");
        assert_eq!(one, other, "{line}");
    }
}

//! Lines of llama.cpp, Ollama, koboldcpp and LM Studio as people paste them (truth/external/found/lines_llama.txt): each is answered,
//! or refused with what to do instead.

use assert_cmd::Command;

const LINES: &str = include_str!("../../../truth/external/found/lines_llama.txt");

fn asked(words: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "400").args(["fit", "--gpu", "rtx3090", "--"]).args(words);
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn lines_are_answered_or_refused_with_a_cure() {
    let lines: Vec<&str> = LINES.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(lines.len() >= 60, "{}", lines.len());
    let check = |line: &&str| {
        let (wanted, rest) = line.split_once(' ').unwrap();
        let (code, said) = asked(&rest.split(' ').collect::<Vec<_>>());
        let cured = said.contains("hint: ") && !said.contains("what it changes is not known");
        match (wanted, code) {
            ("answer", Some(0 | 1)) => None,
            ("refuse", Some(2)) if cured => None,
            _ => Some(format!("{line}: {code:?} {said}")),
        }
    };
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let parts: Vec<_> = lines
            .chunks(20)
            .map(|part| scope.spawn(move || part.iter().filter_map(check).collect::<Vec<_>>()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a line sets shows in the answer as if it were asked for by flags.
#[test]
fn other_programs_words_mean_what_llama_cpps_do() {
    let estimate = |words: &str| {
        let mut command = Command::cargo_bin("vramcast").unwrap();
        command.env("HF_HUB_OFFLINE", "1").args(["fit", "--gpu", "rtx3090", "--json", "--"]).args(words.split(' '));
        let document: serde_json::Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        document["buffers"][0]["estimate"].clone()
    };
    for (one, other) in [
        (
            "koboldcpp.exe --gpulayers 20 --usecublas lowvram --contextsize 8112 --quantkv 1 --moecpu 4 Qwen3-30B-A3B-Q4_K_M.gguf",
            "llama-server -m Qwen3-30B-A3B-Q4_K_M.gguf -ngl 20 -nkvo -c 8112 -ctk q8_0 -ctv q8_0 -fa on -ncmoe 4 -np 1 -b 512 -ub 512 --swa-full",
        ),
        (
            "koboldcpp Qwen3-8B-Q4_K_M.gguf 5001 --contextsize 4096 --flashattention --blasbatchsize 1024 --usecublas --gpulayers 99",
            "llama-server -m Qwen3-8B-Q4_K_M.gguf -c 4176 -fa on -np 1 -b 1024 -ub 1024 -ngl 99",
        ),
        (
            "LLAMA_ARG_CTX_SIZE=8192 LLAMA_ARG_N_GPU_LAYERS=20 llama-server -m Qwen3-8B-Q4_K_M.gguf",
            "llama-server -m Qwen3-8B-Q4_K_M.gguf -c 8192 -ngl 20",
        ),
        (
            "CUDA_VISIBLE_DEVICES=0,1 llama-server -m Qwen3-8B-Q4_K_M.gguf -c 8192",
            "llama-server -m Qwen3-8B-Q4_K_M.gguf -c 8192 -ts 1,1",
        ),
        (
            "python -m llama_cpp.server --model Qwen3-8B-Q4_K_M.gguf --n_gpu_layers -1 --n_ctx 8192",
            "llama-server -m Qwen3-8B-Q4_K_M.gguf -ngl all -c 8192 -fa off -np 1 -b 512 -ub 512",
        ),
    ] {
        let (one, other) = (estimate(one), estimate(other));
        assert!(one.is_object());
        assert_eq!(one, other);
    }
}

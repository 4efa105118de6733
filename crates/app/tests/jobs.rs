//! Whole jobs by the command line: lengths, evaluation, limits, loading, merging.

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use serde_json::Value;

fn vramcast(line: &str) -> Assert {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "80").env("XDG_CONFIG_HOME", "/nonexistent");
    command.args(line.split_whitespace()).assert()
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn json(line: &str) -> Value {
    serde_json::from_str(&stdout(&vramcast(&format!("{line} --json")))).unwrap()
}

fn number(document: &Value, pointer: &str) -> u64 {
    document.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}: {document}"))
}

/// Lengths in a file, in any of its forms, are the same lengths; a batch is padded to its longest.
#[test]
fn lengths_come_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let lengths: Vec<u64> = (0..64).map(|at| 40 + at * 13 % 900).collect();
    let numbers = lengths.iter().map(u64::to_string).collect::<Vec<_>>().join("\n");
    let rows = lengths.iter().map(|n| format!("{{\"input_ids\": {:?}}}", vec![1; *n as usize])).collect::<Vec<_>>();
    let forms = [("plain.txt", numbers), ("list.json", format!("{lengths:?}")), ("rows.jsonl", rows.join("\n"))];
    let answers: Vec<Value> = forms
        .into_iter()
        .map(|(name, text)| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            json(&format!("train gpt2 --batch-size 4 --seq-len 1024 --lengths {}", path.display()))
        })
        .collect();
    assert!(answers.windows(2).all(|two| two[0] == two[1]));
    let run = &answers[0]["run"];
    assert_eq!(run["steps"], 16);
    assert_eq!(run["lengths"][2].as_u64(), lengths.iter().max().copied());
    assert!(number(&answers[0], "/run/spread/reserved/1") >= number(&answers[0], "/totals/reserved"));
    let path = folder.path().join("words.txt");
    std::fs::write(&path, "four words, no number").unwrap();
    let refused = vramcast(&format!("train gpt2 --lengths {}", path.display())).code(2);
    assert!(String::from_utf8_lossy(&refused.get_output().stderr).contains("lognormal:"));
    vramcast("train gpt2 --lengths /nowhere/at/all").code(2);
}

/// A run of 40 steps whose batches are all of other lengths, the longest in the middle.
fn varied() -> String {
    let length = |step: u64| if step == 20 { 1024 } else { 200 + step * 371 % 800 };
    let lengths: Vec<String> = (0..160).map(|sample| length(sample / 4).to_string()).collect();
    format!("train gpt2 --batch-size 4 --seq-len 1024 --mask --sampler sequential --lengths {}", lengths.join(","))
}

/// What the allocator reserves depends on the order of lengths, what tensors take only on the longest batch.
#[test]
fn other_lengths_leave_other_blocks() {
    let one = json("train gpt2 --batch-size 4 --seq-len 1024 --mask");
    let many = json(&varied());
    let growing = json(&format!("{} --alloc-conf expandable_segments:True", varied()));
    let [of_one, of_many] = [&one, &many].map(|document| number(document, "/totals/allocated"));
    assert!(of_many.abs_diff(of_one) < of_one / 100, "{of_one} {of_many}");
    assert!(number(&many, "/totals/reserved") > number(&one, "/totals/reserved"));
    assert!(number(&growing, "/totals/reserved") < number(&many, "/totals/reserved"));
    assert_eq!((number(&many, "/run/peak/step"), number(&many, "/run/peak/tokens")), (21, 1024));
}

/// A part of the run decides, and is named.
#[test]
fn evaluation_can_decide() {
    let line = "train gpt2 --batch-size 1 --seq-len 512 --eval-batch-size 32 --eval-metrics --eval-rows 128";
    let kept = json(line);
    assert_eq!(kept["run"]["decides"], "evaluation");
    let sent = json(&format!("{line} --eval-accumulation-steps 1"));
    assert!(number(&sent, "/totals/allocated") < number(&kept, "/totals/allocated"));
    let text = stdout(&vramcast(line));
    assert!(text.contains("evaluation decides: it allocates"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

/// Liger's loss leaves logits out in training alone; TRL's SFTTrainer asks it to in evaluation, too.
#[test]
fn liger_makes_logits_in_an_evaluation() {
    let plain = "train TinyLlama/TinyLlama-1.1B-Chat-v1.0 --seq-len 256 --batch-size 1 --eval-batch-size 64 --eval-rows 64 --no-suggestions";
    let line = format!("{plain} --liger --loss standard");
    let of = |line: &str| number(&json(line), "/totals/allocated");
    let (without, made, skipped) = (of(plain), of(&line), of(&format!("{line} --eval-skip-logits")));
    assert!(made.abs_diff(without) < without / 100 && skipped < made, "{without} {made} {skipped}");
    let trl = json(&format!("{line} --framework trl"));
    assert_eq!(trl["plan"]["train"]["job"]["evaluation"]["skip_logits"], true);
    let kept = json(&format!("{line} --framework trl --eval-metrics"));
    assert!(kept["plan"]["train"]["job"]["evaluation"].get("skip_logits").is_none());
}

/// Under a limit a run fits, fits after retries, or fails at a step that is named.
#[test]
fn the_limit_decides() {
    let line = varied();
    let free = json(&line);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let [allocated, reserved] = ["/totals/allocated", "/totals/reserved"].map(|at| number(&free, at));
    assert_eq!(number(&free, "/run/retries"), 0);
    let between = json(&format!("{line} --memory-limit {}", gib((allocated + reserved) / 2)));
    assert!(number(&between, "/run/retries") > 0 && between["run"].get("fails").is_none(), "{}", between["run"]);
    let tight = json(&format!("{line} --memory-limit {}", gib(allocated * 9 / 10)));
    assert!(number(&tight, "/run/fails/bytes") > 0 && tight["verdicts"][0]["fits"] == false);
    let said = stdout(&vramcast(&format!("{line} --memory-limit {}", gib(allocated * 9 / 10))).code(1));
    assert!(said.contains("own limit of memory") && !said.contains("too much"), "{said}");
    vramcast("train gpt2 --memory-limit lots").code(2);
}

/// Loading alone, quantised on the way; merging takes an adapter.
#[test]
fn loading_and_merging() {
    let loaded = json("train gpt2 --steps 0 --from-pretrained");
    assert_eq!(loaded["run"]["parts"].as_array().map(Vec::len), Some(1));
    let merged = json("train gpt2 --lora --merge --from-pretrained");
    assert_eq!(merged["run"]["decides"], "merging");
    assert!(number(&merged, "/totals/allocated") > number(&loaded, "/totals/allocated"));
    let refused = vramcast("train gpt2 --merge").code(2);
    assert!(String::from_utf8_lossy(&refused.get_output().stderr).contains("no LoRA adapter"));
}

/// What would change nothing is refused, and a flag's lengths take the place of a file's.
#[test]
fn what_has_no_effect_is_refused() {
    for line in [
        "train gpt2 --seed 7",
        "train gpt2 --pad-to-multiple-of 8",
        "train gpt2 --sampler grouped",
        "train gpt2 --lora --merge --eval-batch-size 8",
        "train gpt2 --steps 0 --from-pretrained --lengths 5,6",
    ] {
        let refused = vramcast(line).code(2);
        assert!(String::from_utf8_lossy(&refused.get_output().stderr).contains("has no effect"), "{line}");
    }
    vramcast("train llama3-8b --lora --dora --merge").code(2);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.yaml");
    std::fs::write(&file, "job:\n  lengths:\n    uniform: [16, 512]\n").unwrap();
    let over = json(&format!("train gpt2 --plan {} --lengths 64,128", file.display()));
    assert_eq!(over["run"]["lengths"][2], 128);
}

/// Packed rows are full, and batches without padding are one row of all samples.
#[test]
fn samples_are_joined() {
    let lengths = "--lengths 300,200,150,100,80,60 --sampler sequential --seq-len 512 --batch-size 2";
    let padded = json(&format!("train gpt2 {lengths}"));
    let flat = json(&format!("train gpt2 {lengths} --padding-free"));
    let packed = json(&format!("train gpt2 {lengths} --packing bfd"));
    // 300 and 200 go together, then 150, 100, 80 and 60.
    assert_eq!((number(&padded, "/run/steps"), number(&packed, "/run/steps")), (3, 1));
    assert_eq!(number(&flat, "/run/lengths/2"), 500);
    assert_eq!(number(&packed, "/run/lengths/2"), 300 + 200 + 150 + 100 + 80 + 60);
    let refused = vramcast(&format!("train gpt2 {lengths} --packing bfd --padding-free")).code(2);
    assert!(String::from_utf8_lossy(&refused.get_output().stderr).contains("has no effect"));
    vramcast("train t5-small --packing bfd").code(2);
    vramcast("train gpt2 --packing zigzag").code(2);
    vramcast("train google/vit-base-patch16-224 --lengths 5,6").code(2);
}

/// Keeping less in an evaluation takes less.
#[test]
fn evaluations_keep_more_or_less() {
    let line = "train gpt2 --batch-size 1 --seq-len 512 --eval-batch-size 16 --eval-rows 64 --eval-metrics";
    let [all, by_batch, argmax] = ["", " --batch-eval-metrics", " --eval-argmax"]
        .map(|more| number(&json(&format!("{line}{more}")), "/run/parts/1/allocated"));
    assert!(by_batch < all && argmax < all, "{all} {by_batch} {argmax}");
    vramcast("train gpt2 --eval-batch-size 4 --eval-argmax").code(2);
}

/// Resuming reads states back; a batch that does not fit is made smaller.
#[test]
fn resuming_and_finding_a_batch() {
    let resumed = json("train gpt2 --resume --batch-size 1 --seq-len 128");
    assert_eq!(resumed["run"]["parts"][0]["name"], "resuming");
    let line = "train gpt2 --batch-size 64 --seq-len 512 --memory-limit 12";
    vramcast(line).code(1);
    let found = json(&format!("{line} --auto-find-batch-size"));
    let notes = found["notes"].to_string();
    assert!(notes.contains("the largest batch tried that fits"), "{notes}");
    assert!(found["run"].get("fails").is_none());
}

/// Cards see batches in turn: the one with the longest is simulated.
#[test]
fn several_cards_share_the_batches() {
    let lengths = "--lengths 900,100,120,140,160,180,200,220 --sampler sequential --batch-size 1 --seq-len 1024";
    for engine in ["--engine ddp --gpus 2", "--engine fsdp2 --gpus 2", "--zero 2 --gpus 2"] {
        let two = json(&format!("train gpt2 {lengths} {engine}"));
        assert_eq!((number(&two, "/run/steps"), number(&two, "/run/lengths/2")), (4, 900), "{engine}");
    }
    let evaluated = json(&format!("train gpt2 {lengths} --engine ddp --gpus 2 --eval-batch-size 4"));
    let parts = evaluated["run"]["parts"].to_string();
    assert!(parts.contains("evaluation"), "{parts}");
}

/// Text is counted by the model's tokenizer, chats by its template.
#[test]
fn data_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<String> = (0..50).map(|at| format!("\"w{at}\": {at}")).collect();
    let tokenizer = format!(
        "{{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [], \"normalizer\": null, \
         \"pre_tokenizer\": {{\"type\": \"WhitespaceSplit\"}}, \"post_processor\": null, \"decoder\": null, \
         \"model\": {{\"type\": \"WordLevel\", \"vocab\": {{{}}}, \"unk_token\": \"w0\"}}}}",
        words.join(", ")
    );
    let [data, tokens] = ["data.jsonl", "tokenizer.json"].map(|name| folder.path().join(name));
    std::fs::write(&tokens, tokenizer).unwrap();
    let rows: Vec<String> = (1..9).map(|at| format!("{{\"text\": \"{}\"}}", "w1 ".repeat(at * 40).trim())).collect();
    std::fs::write(&data, rows.join("\n")).unwrap();
    let line = format!("train gpt2 --batch-size 2 --seq-len 1024 --data {}", data.display());
    let counted = json(&format!("{line} --tokenizer {}", tokens.display()));
    assert_eq!(number(&counted, "/run/lengths/2"), 8 * 40 + 1);
    assert!(counted["notes"].to_string().contains("8 samples counted (text)"));
    let refused = vramcast(&line).code(2);
    assert!(String::from_utf8_lossy(&refused.get_output().stderr).contains("--tokenizer"));
    vramcast(&format!("{line} --tokenizer {} --lengths 5,6", tokens.display())).code(2);
    vramcast(&format!("{line} --tokenizer {}", data.display())).code(2);
}

/// A Trainer's file brings its evaluation and TRL's its packing.
#[test]
fn files_of_trainers_say_what_surrounds_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sft.yaml");
    let keys = "model_name_or_path: gpt2\nper_device_train_batch_size: 2\nmax_length: 256\npacking: true\n\
                eval_strategy: steps\nper_device_eval_batch_size: 4\ntorch_empty_cache_steps: 2\n";
    std::fs::write(&file, keys).unwrap();
    let document = json(&format!("train --plan {}", file.display()));
    let job = &document["plan"]["train"]["job"];
    let job = if job.is_null() { &document["plan"]["job"] } else { job };
    assert_eq!((&job["packing"], &job["empty_cache_steps"]), (&"bfd".into(), &2.into()), "{}", document["plan"]);
    assert_eq!(job["evaluation"]["batch_size"], 4);
    let parts = document["run"]["parts"].as_array().unwrap();
    assert!(parts.iter().any(|part| part["name"] == "evaluation"));
}

/// The pictures of docs/jobs.md are what its commands draw.
#[test]
fn pictures_are_drawn_by_their_commands() {
    let folder = tempfile::tempdir().unwrap();
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let text = std::fs::read_to_string(docs.join("jobs.md")).unwrap();
    for (name, begins) in
        [("jobs-lengths.svg", "--lora --gradient-checkpointing"), ("jobs-evaluation.svg", "--eval-batch-size 16")]
    {
        let command = text.lines().find(|line| line.starts_with("$ vramcast train") && line.contains(begins)).unwrap();
        let drawn = folder.path().join(name);
        let line = command.trim_start_matches("$ vramcast ");
        vramcast(&format!("{line} --gpu h200 --svg {}", drawn.display())).success();
        let [drawn, shown] = [drawn, docs.join(name)].map(|path| std::fs::read_to_string(path).unwrap());
        assert!(drawn == shown, "{name} is not what `vramcast {line} --svg` draws; draw it anew");
    }
}

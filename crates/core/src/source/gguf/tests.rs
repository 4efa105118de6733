//! What the GGUF header parser reads, asks for and refuses.

use super::*;
use crate::dtype::DType;

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    text(&mut out, key);
    out.extend(kind.to_le_bytes());
    out.extend(value);
    out
}

fn text_entry(key: &str, value: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    text(&mut bytes, value);
    entry(key, 8, &bytes)
}

fn array(kind: u32, length: u64, values: &[u8]) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(values);
    bytes
}

fn tensor(name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = Vec::new();
    text(&mut out, name);
    out.extend((dimensions.len() as u32).to_le_bytes());
    dimensions.iter().for_each(|dimension| out.extend(dimension.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

fn file(entries: &[Vec<u8>], tensors: &[Vec<u8>]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    entries.iter().chain(tensors).for_each(|part| out.extend(part));
    out
}

fn sample() -> Vec<u8> {
    let tokens: Vec<u8> = (0..2000u32)
        .flat_map(|number| {
            let mut token = Vec::new();
            text(&mut token, &format!("token {number}"));
            token
        })
        .collect();
    let heads: Vec<u8> = [8u32, 4, 8].iter().flat_map(|heads| heads.to_le_bytes()).collect();
    file(
        &[
            text_entry("general.architecture", "llama"),
            entry("llama.block_count", 4, &32u32.to_le_bytes()),
            entry("llama.attention.head_count_kv", 9, &array(4, 3, &heads)),
            entry("tokenizer.ggml.tokens", 9, &array(8, 2000, &tokens)),
            entry("tokenizer.ggml.scores", 9, &array(6, 2000, &[0; 8000])),
            text_entry("tokenizer.chat_template", &"x".repeat(5000)),
            entry("general.quantized", 7, &[1]),
        ],
        &[tensor("output.weight", &[512, 3], 12, 96), tensor("norm.weight", &[24], 0, 0)],
    )
}

fn ready(bytes: &[u8]) -> Header {
    match parse(bytes, None).unwrap() {
        Progress::Ready(header) => header,
        Progress::Need { bytes } => panic!("needs {bytes}"),
    }
}

fn refused(bytes: &[u8]) -> String {
    parse(bytes, None).unwrap_err().to_string()
}

#[test]
fn reads_metadata_and_tensors() {
    let header = ready(&sample());
    assert_eq!((header.version, header.architecture(), header.number("block_count")), (3, Some("llama"), Some(32)));
    let heads = header.get("llama.attention.head_count_kv").and_then(Value::as_array).unwrap();
    assert_eq!(heads.iter().filter_map(Value::as_u64).collect::<Vec<_>>(), [8, 4, 8]);
    assert_eq!(header.get("tokenizer.ggml.tokens"), Some(&Value::LongArray { length: 2000 }));
    assert_eq!(header.get("tokenizer.ggml.scores").and_then(Value::array_length), Some(2000));
    assert_eq!(header.get("tokenizer.chat_template"), Some(&Value::LongText { bytes: 5000 }));
    assert_eq!(header.get("general.quantized"), Some(&Value::Bool(true)));
    assert_eq!(header.split_count(), 1);
    let [norm, output] = header.tensors.as_slice() else { panic!("two tensors") };
    assert_eq!((norm.name.as_str(), &norm.stored, norm.bytes), ("norm.weight", &StoredType::Plain(DType::F32), 96));
    assert_eq!((&output.shape, output.bytes), (&vec![3, 512], 3 * 2 * 144));
    assert_eq!(header.tensor_bytes(), Some(96 + 864));
    assert!(header.data_start.is_multiple_of(32) && header.data_start >= sample().len() as u64);
}

#[test]
fn asks_for_more_until_it_has_all() {
    let bytes = sample();
    let mut length = 0;
    let mut requests = 0;
    loop {
        match parse(&bytes[..length.min(bytes.len())], None).unwrap() {
            Progress::Ready(header) => break assert_eq!(header, ready(&bytes)),
            Progress::Need { bytes: needed } => {
                assert!(needed > length as u64);
                length = needed as usize;
                requests += 1;
            }
        }
    }
    assert!(requests < 40, "{requests}");
    for cut in 0..bytes.len() {
        assert!(matches!(parse(&bytes[..cut], None), Ok(Progress::Need { .. })), "cut at {cut}");
    }
}

#[test]
fn refuses_what_it_cannot_read() {
    assert_eq!(refused(b"GGML\x03\0\0\0"), "not a GGUF file");
    assert_eq!(refused(b"GGUF\x01\0\0\0"), "GGUF version 1 is not supported, only 2 and 3");
    assert_eq!(refused(b"GGUF\0\0\0\x03"), "big-endian GGUF files are not supported");
    let nested = file(&[entry("a", 9, &array(9, 1, &[]))], &[]);
    assert_eq!(refused(&nested), "broken GGUF header: metadata `a`: arrays of arrays are not supported");
    assert_eq!(refused(&file(&[entry("a", 77, &[])], &[])), "broken GGUF header: metadata `a`: unknown value type 77");
    let twice = file(&[entry("a", 7, &[1]), entry("a", 7, &[1])], &[]);
    assert_eq!(refused(&twice), "broken GGUF header: metadata `a`: it is listed twice");
}

#[test]
fn refuses_hostile_sizes_before_allocating() {
    let mut many = b"GGUF\x03\0\0\0".to_vec();
    many.extend(u64::MAX.to_le_bytes());
    many.extend(0u64.to_le_bytes());
    assert!(refused(&many).contains("the number of tensors is 18446744073709551615"));
    let long = file(&[entry("a", 9, &array(10, u64::MAX / 2, &[]))], &[]);
    assert_eq!(refused(&long), "broken GGUF header: metadata `a`: an array longer than 64 bits");
    let gigabytes = file(&[entry("a", 9, &array(0, 1 << 40, &[]))], &[]);
    assert!(refused(&gigabytes).starts_with("broken GGUF header: metadata `a`: the header's length"));
    let mut name = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    name.extend((1u64 << 50).to_le_bytes());
    assert!(refused(&name).starts_with("broken GGUF header: tensor `number 0`: the length of a name"));
}

#[test]
fn refuses_hostile_tensors() {
    let refuse = |tensors: &[Vec<u8>]| refused(&file(&[], tensors));
    assert!(refuse(&[tensor("w", &[1; 5], 0, 0)]).contains("`w`: 5 dimensions"));
    assert!(refuse(&[tensor("w", &[1 << 40, 1 << 40], 0, 0)]).contains("`w`: shape"));
    assert!(refuse(&[tensor("w", &[1 << 62], 0, 0)]).contains("is too large"));
    assert!(refuse(&[tensor("w", &[100], 12, 0)]).contains("rows of 100 do not divide into q4_k blocks of 256"));
    assert!(refuse(&[tensor("w", &[8], 0, 3)]).contains("offset 3 is not a multiple of 32"));
    assert!(refuse(&[tensor("a", &[64], 0, 0), tensor("b", &[8], 0, 32)]).contains("`a`: it overlaps"));
    assert!(refuse(&[tensor("a", &[8], 0, 0), tensor("a", &[8], 0, 32)]).contains("listed twice"));
    assert!(refuse(&[tensor("w", &[8], 0, u64::MAX - 31)]).contains("past 64 bits"));
}

#[test]
fn unknown_types_take_the_room_they_have() {
    let bytes = file(&[], &[tensor("new", &[64], 137, 0), tensor("next", &[8], 0, 64)]);
    let header = ready(&bytes);
    assert_eq!(header.tensors[0].stored, StoredType::Unknown("ggml type 137".to_owned()));
    assert_eq!(header.tensors[0].bytes, 64);
    let last = file(&[], &[tensor("new", &[64], 137, 0)]);
    assert!(refused(&last).contains("its size is unknown: ggml type 137"));
    let Progress::Ready(header) = parse(&last, Some(ready(&file(&[], &[])).data_start + 160)).unwrap() else {
        panic!("complete")
    };
    assert!(header.tensors[0].bytes > 0);
}

/// A model of two layers whose header says `key` is `value`.
fn said(key: &str, value: u32) -> Option<String> {
    let mut numbers = [
        ("block_count", 2u32),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("vocab_size", 100),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("expert_count", 8),
    ];
    numbers.iter_mut().filter(|(known, _)| *known == key).for_each(|(_, number)| *number = value);
    let mut entries = vec![text_entry("general.architecture", "llama")];
    entries.extend(numbers.iter().map(|(key, number)| entry(&format!("llama.{key}"), 4, &number.to_le_bytes())));
    let mut tensors = vec![tensor("token_embd.weight", &[64, 100], 0, 0)];
    let mut offset = 64 * 100 * 4;
    for layer in 0..2 {
        for (name, sizes) in [
            ("attn_q", vec![64, 64]),
            ("attn_k", vec![64, 32]),
            ("ffn_down", vec![96, 64]),
            ("ffn_up_exps", vec![64, 32, 8]),
        ] {
            tensors.push(tensor(&format!("blk.{layer}.{name}.weight"), &sizes, 0, offset));
            offset += sizes.iter().product::<u64>() * 4;
        }
    }
    let header = ready(&file(&entries, &tensors));
    contradiction(&header)
}

#[test]
fn a_header_that_its_tensors_contradict_is_told_with_both() {
    assert_eq!(said("block_count", 2), None);
    for (key, value, tensor) in [
        ("block_count", 3, "blk.1."),
        ("block_count", 1, "blk.1."),
        ("embedding_length", 128, "token_embd.weight is [64, 100]"),
        ("vocab_size", 99, "token_embd.weight is [64, 100]"),
        ("feed_forward_length", 128, "blk.0.ffn_down.weight is [96, 64]"),
        ("attention.head_count_kv", 4, "blk.0.attn_k.weight is [64, 32]"),
        ("expert_count", 16, "blk.0.ffn_up_exps.weight is [64, 32, 8]"),
    ] {
        let told = said(key, value).unwrap_or_default();
        assert!(told.contains(&format!("llama.{key} is {value}")) && told.contains(tensor), "{key}: {told}");
    }
}

/// A file of Granite 4 H Micro was read as a mixture of eight experts, five times as large.
#[test]
fn layers_with_states_are_told_by_their_tensors() {
    let number = |key: &str, value: u64| (format!("granitehybrid.{key}"), Value::Unsigned(value));
    let mut metadata = vec![("general.architecture".to_owned(), Value::Text("granitehybrid".into()))];
    for (key, value) in [
        ("block_count", 2),
        ("embedding_length", 2048),
        ("feed_forward_length", 8192),
        ("ssm.inner_size", 4096),
        ("ssm.time_step_rank", 64),
        ("ssm.state_size", 128),
    ] {
        metadata.push(number(key, value));
    }
    metadata.push(("granitehybrid.rope.scaling.finetuned".into(), Value::Bool(false)));
    let tensors = ["blk.0.ssm_in.weight", "blk.1.attn_q.weight"].map(|name| Tensor {
        name: name.into(),
        stored: StoredType::Plain(DType::F32),
        shape: vec![1],
        offset: 0,
        bytes: 4,
    });
    let header = Header { version: 3, metadata, tensors: tensors.to_vec(), data_start: 0, alignment: 32 };
    let found = config(&header).unwrap();
    assert_eq!(found["layer_types"], serde_json::json!(["mamba", "attention"]));
    assert_eq!(
        [&found["num_local_experts"], &found["mamba_d_head"], &found["shared_intermediate_size"]],
        [0, 64, 8192]
    );
    assert_eq!(found["position_embedding_type"], "nope");
}

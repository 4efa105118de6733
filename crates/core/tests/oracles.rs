//! Files written by the formats' own libraries (PyPI gguf 0.19 and safetensors 0.8) read as those libraries mean them.

use vramcast_core::dtype::DType;
use vramcast_core::source::gguf::Value;
use vramcast_core::source::{Progress, StoredType, gguf, safetensors};

#[test]
fn a_gguf_file_of_the_reference_writer() {
    let bytes = include_bytes!("../../../fuzz/seeds/gguf/whole");
    let Ok(Progress::Ready(header)) = gguf::parse(bytes, Some(bytes.len() as u64)) else { panic!("complete") };
    assert_eq!((header.version, header.architecture(), header.number("block_count")), (3, Some("llama"), Some(2)));
    assert_eq!(header.number("context_length"), Some(4096));
    assert_eq!(header.get("x.big").and_then(Value::array_length), Some(2000));
    assert_eq!(header.get("tokenizer.ggml.tokens").and_then(Value::as_array).map(<[Value]>::len), Some(3));
    let tensors: Vec<_> =
        header.tensors.iter().map(|t| (t.name.as_str(), &t.stored, t.shape.clone(), t.bytes)).collect();
    let (plain, block) = (StoredType::Plain(DType::F32), StoredType::Format("q4_k".to_owned()));
    assert_eq!(tensors, [("norm.weight", &plain, vec![24], 96), ("q.weight", &block, vec![3, 512], 864)]);
    // The data begin where the writer put them: header, padding, 96 bytes, padding to 32, 864 bytes.
    assert_eq!(header.data_start + 96 + 864, bytes.len() as u64);
}

#[test]
fn a_safetensors_file_of_the_reference_writer() {
    let bytes = include_bytes!("../../../fuzz/seeds/safetensors/with-data");
    let Ok(Progress::Ready(header)) = safetensors::parse(bytes) else { panic!("complete") };
    assert_eq!(header.file_bytes(), Some(bytes.len() as u64));
    assert_eq!(header.metadata, [("format".to_owned(), "pt".to_owned())]);
    let mut tensors: Vec<_> =
        header.tensors.iter().map(|t| (t.name.as_str(), t.stored.name(), t.shape.clone())).collect();
    tensors.sort_unstable();
    assert_eq!(tensors, [("a.weight", "fp16", vec![2, 3]), ("b.bias", "fp32", vec![4]), ("c", "int64", vec![])]);
}

//! What the safetensors header parser reads, asks for and refuses.

use super::*;

fn file(json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

fn header(json: &str) -> Header {
    match parse(&file(json)).unwrap() {
        Progress::Ready(header) => header,
        Progress::Need { bytes } => panic!("needs {bytes}"),
    }
}

fn refused(json: &str) -> String {
    parse(&file(json)).unwrap_err().to_string()
}

#[test]
fn reads_tensors_in_the_order_of_their_data() {
    let header = header(
        r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[12,16]},
            "a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
            "s":{"dtype":"F32","shape":[],"data_offsets":[16,20]},
            "z":{"dtype":"F32","shape":[0,9],"data_offsets":[20,20]}}"#,
    );
    let names: Vec<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "s", "z"]);
    assert_eq!(header.metadata, [("format".to_owned(), "pt".to_owned())]);
    assert_eq!(header.tensors[0].stored, StoredType::Plain(DType::BF16));
    assert_eq!((header.tensors[0].elements(), header.data_bytes), (6, 20));
    assert_eq!(header.file_bytes(), Some(header.data_start + 20));
}

#[test]
fn asks_for_what_is_missing() {
    let bytes = file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#);
    assert_eq!(parse(&[]).unwrap(), Progress::Need { bytes: 8 });
    assert_eq!(parse(&bytes[..7]).unwrap(), Progress::Need { bytes: 8 });
    for cut in 8..bytes.len() {
        assert_eq!(parse(&bytes[..cut]).unwrap(), Progress::Need { bytes: bytes.len() as u64 });
    }
    assert!(matches!(parse(&bytes).unwrap(), Progress::Ready(_)));
}

#[test]
fn padding_after_the_json_is_fine() {
    assert_eq!(header("{}      ").tensors, []);
}

#[test]
fn keeps_unknown_and_narrow_types() {
    let header = header(
        r#"{"new":{"dtype":"F3","shape":[8],"data_offsets":[0,3]},
            "half":{"dtype":"F4","shape":[6],"data_offsets":[3,6]}}"#,
    );
    assert_eq!(header.tensors[0].stored, StoredType::Unknown("F3".to_owned()));
    assert_eq!(header.tensors[0].bytes, 3);
    assert_eq!(header.tensors[1].stored, StoredType::Format("fp4_e2m1".to_owned()));
}

#[test]
fn refuses_hostile_lengths() {
    let gigabyte = (1u64 << 30).to_le_bytes();
    assert_eq!(parse(&gigabyte).unwrap_err(), SafetensorsError::HeaderTooLong { bytes: 1 << 30 });
    assert!(parse(&u64::MAX.to_le_bytes()).is_err());
    assert_eq!(parse(&[0; 8]).unwrap_err(), SafetensorsError::HeaderTooShort { bytes: 0 });
}

#[test]
fn refuses_hostile_shapes_by_name() {
    assert!(
        refused(r#"{"w":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#)
            .starts_with("broken safetensors header: tensor `w`: invalid value: integer `-1`")
    );
    assert_eq!(
        refused(r#"{"w":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,1]}}"#),
        "broken safetensors header: tensor `w`: shape [4294967296, 4294967296] has too many elements"
    );
    assert!(refused(r#"{"w":{"dtype":"U8","shape":[1e30],"data_offsets":[0,1]}}"#).contains("tensor `w`"));
    let many = vec!["1"; 65].join(",");
    assert!(
        refused(&format!(r#"{{"w":{{"dtype":"U8","shape":[{many}],"data_offsets":[0,1]}}}}"#))
            .contains("more than 64 dimensions")
    );
}

#[test]
fn refuses_hostile_offsets() {
    assert_eq!(
        refused(
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#
        ),
        "broken safetensors header: tensors `a` and `b` overlap"
    );
    assert_eq!(
        refused(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[9,13]}}"#),
        "broken safetensors header: 9 bytes before tensor `a` belong to none"
    );
    assert_eq!(
        refused(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#),
        "broken safetensors header: tensor `a`: its data end at 0, before they begin at 4"
    );
    assert_eq!(
        refused(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}"#),
        "broken safetensors header: tensor `a`: F32 of shape [4] takes 16 bytes, not 4"
    );
    assert!(refused(r#"{"a":{"dtype":"X","shape":[4],"data_offsets":[0,18446744073709551615]},"b":{"dtype":"X","shape":[4],"data_offsets":[18446744073709551615,18446744073709551615]},"c":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#).contains("overlap"));
}

#[test]
fn refuses_what_is_not_a_header() {
    assert!(refused("[]").contains("an object of tensors"));
    assert!(refused("{\"a\":").contains("EOF"));
    assert!(refused(&format!("{{\"a\":{}{}}}", "[".repeat(5000), "]".repeat(5000))).contains("tensor `a`"));
    assert!(refused(r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#).contains("listed twice"));
    assert!(parse(&[4, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0xfd, 0xfc]).unwrap_err().to_string().contains("utf-8"));
}

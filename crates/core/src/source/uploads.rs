//! Quantised uploads, by their names: while the hub is out of reach a name is all that says how a checkpoint is stored.

/// Ends of names, longest first, and the method that makes such a checkpoint.
const ENDS: [(&str, &str); 20] = [
    ("-unsloth-bnb-4bit", "nf4"),
    ("-qat-w4a16-ct", "gptq"),
    ("-quantized.w4a16", "gptq"),
    ("-quantized.w8a8", "fp8"),
    ("-fp8-dynamic", "fp8"),
    ("-modelopt-fp4", "nvfp4"),
    ("-gptq-int4", "gptq"),
    ("-awq-int4", "awq"),
    ("-awq-4bit", "awq"),
    ("-bnb-4bit", "nf4"),
    ("-int4-awq", "awq"),
    ("-w4a16", "gptq"),
    ("-w8a8", "fp8"),
    ("-nvfp4", "nvfp4"),
    ("-mxfp4", "mxfp4"),
    ("-gptq", "gptq"),
    ("-awq", "awq"),
    ("-int4", "gptq"),
    ("-fp8", "fp8"),
    ("-fp4", "nvfp4"),
];

/// What is left of an upload's name, and the method that its end says.
pub fn quantised(name: &str) -> Option<(&str, &'static str)> {
    let lower = name.to_ascii_lowercase();
    let (end, method) = ENDS.iter().find(|(end, _)| lower.ends_with(end))?;
    Some((&name[..name.len() - end.len()], method))
}

#[cfg(test)]
mod tests {
    use super::quantised;

    #[test]
    fn names_say_how_checkpoints_are_stored() {
        assert_eq!(quantised("Qwen/Qwen2.5-32B-Instruct-AWQ"), Some(("Qwen/Qwen2.5-32B-Instruct", "awq")));
        assert_eq!(quantised("RedHatAI/Llama-3.1-8B-FP8-dynamic"), Some(("RedHatAI/Llama-3.1-8B", "fp8")));
        assert_eq!(quantised("unsloth/x-unsloth-bnb-4bit"), Some(("unsloth/x", "nf4")));
        assert_eq!(quantised("Qwen/Qwen2.5-32B-Instruct"), None);
    }
}

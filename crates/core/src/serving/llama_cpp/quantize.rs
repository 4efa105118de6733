//! Which type every tensor gets under a named mixture (`llama_tensor_get_type_impl` of llama-quant.cpp at b21e4de).
//!
//! Mixtures of the IQ family are made with an importance matrix, as all that are published are; the others without.

use super::ahead;
use super::publishers::{self, Library, Own, PUBLISHERS};
use crate::dtype::{Format, builtin_formats, find_format};

/// A mixture: its name, and the type it is mostly made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixture {
    /// `Q4_K_M`.
    pub name: &'static str,
    pub(super) mostly: &'static str,
    /// That of llama-quantize which it is, or which a publisher's own begins with.
    pub(super) rule: &'static str,
    pub(super) own: Own,
}

/// What `llama-quantize` knows (`llama_ftype_get_default_type`), from few bits to many.
pub const MIXTURES: &[Mixture] = &[
    mixture("IQ1_S", "iq1_s"),
    mixture("IQ1_M", "iq1_m"),
    mixture("TQ1_0", "tq1_0"),
    mixture("TQ2_0", "tq2_0"),
    mixture("IQ2_XXS", "iq2_xxs"),
    mixture("IQ2_XS", "iq2_xs"),
    mixture("IQ2_S", "iq2_xs"),
    mixture("IQ2_M", "iq2_s"),
    mixture("Q2_K_S", "q2_k"),
    mixture("Q2_K", "q2_k"),
    mixture("IQ3_XXS", "iq3_xxs"),
    mixture("IQ3_XS", "iq3_s"),
    mixture("IQ3_S", "iq3_s"),
    mixture("IQ3_M", "iq3_s"),
    mixture("Q3_K_S", "q3_k"),
    mixture("Q3_K_M", "q3_k"),
    mixture("Q3_K_L", "q3_k"),
    mixture("IQ4_XS", "iq4_xs"),
    mixture("IQ4_NL", "iq4_nl"),
    mixture("MXFP4_MOE", "ggml-mxfp4"),
    mixture("Q4_0", "q4_0"),
    mixture("Q4_1", "q4_1"),
    mixture("Q4_K_S", "q4_k"),
    mixture("Q4_K_M", "q4_k"),
    mixture("Q5_0", "q5_0"),
    mixture("Q5_1", "q5_1"),
    mixture("Q5_K_S", "q5_k"),
    mixture("Q5_K_M", "q5_k"),
    mixture("Q6_K", "q6_k"),
    mixture("Q8_0", "q8_0"),
    mixture("F16", "f16"),
    mixture("BF16", "bf16"),
    mixture("F32", "f32"),
];

const fn mixture(name: &'static str, mostly: &'static str) -> Mixture {
    Mixture { name, mostly, rule: name, own: Own::No }
}

impl Mixture {
    /// What the name of a GGUF file or repository says: the model, and how it is stored. A repository without a tag is taken
    /// as `Q4_K_M`, as `llama-server -hf` does (common/arg.cpp).
    pub fn of_name(name: &str) -> Option<(String, &'static Self)> {
        let last = name.rsplit(['/', '\\']).next()?;
        let owner = name.split_once('/').map_or("", |(owner, _)| owner);
        if let Some(stem) = last.strip_suffix(".gguf") {
            // Parts of one file: `-00001-of-00003`.
            let stem = stem.split("-0000").next()?;
            let at = stem.rfind(['-', '.'])?;
            let (plain, tag) = (&stem[..at], &stem[at + 1..]);
            let dynamic = plain.strip_suffix("-UD").and_then(|plain| Some((plain, Self::find(&format!("UD-{tag}"))?)));
            let (plain, found) = dynamic.or_else(|| Some((plain, Self::find(tag)?)))?;
            return Some((publishers::plain(plain), publishers::trained(plain, found)));
        }
        // Uploads of gpt-oss keep its experts as they were published, and have no other file.
        let usual = if last.to_ascii_lowercase().contains("gpt-oss") { "MXFP4" } else { "Q4_K_M" };
        let (repository, tag) = last.split_once(':').unwrap_or((last, usual));
        let plain = repository.strip_suffix("-GGUF").or_else(|| repository.strip_suffix("-gguf"))?;
        // llama.cpp takes the first file whose name holds the tag (`get_hf_file` of common/download.cpp).
        let found = Self::find(tag).or_else(|| Self::find(&format!("UD-{tag}")))?;
        let found = match owner.eq_ignore_ascii_case("unsloth") {
            true => publishers::trained(plain, publishers::unsloths(found)),
            false => found,
        };
        Some((publishers::plain(plain), found))
    }

    /// A mixture by its name; `Q4_K` is `Q4_K_M` and `MXFP4` is that of experts, as in llama-quantize.
    pub fn find(name: &str) -> Option<&'static Self> {
        let wanted = ahead::unmarked(name).0.to_ascii_uppercase().replace('-', "_");
        let wanted = match wanted.as_str() {
            "Q3_K" => "Q3_K_M",
            "Q4_K" => "Q4_K_M",
            "Q5_K" => "Q5_K_M",
            "MXFP4" => "MXFP4_MOE",
            "FP16" => "F16",
            "FP32" => "F32",
            other => other,
        };
        let wanted = wanted.replacen("UD_", "UD-", 1);
        MIXTURES.iter().chain(PUBLISHERS).find(|mixture| mixture.name == wanted)
    }

    /// Those that are usually published, from many bits to few.
    pub fn published() -> impl Iterator<Item = &'static Self> {
        let rare = ["F32", "F16", "TQ1_0", "TQ2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4_MOE", "Q2_K_S", "IQ4_NL"];
        MIXTURES.iter().rev().filter(move |mixture| !mixture.is(&rare))
    }

    /// Whether the types that it gives an architecture are a guess.
    pub fn is_guessed(&self, architecture: &str) -> bool {
        let delta = || Library::of(architecture) == Some(Library::Delta);
        self.own == Own::Dynamic || (self.own == Own::Named && delta())
    }

    /// The type it is mostly made of.
    pub fn mostly(&self) -> &'static str {
        self.mostly
    }

    fn is(&self, names: &[&str]) -> bool {
        names.contains(&self.rule)
    }

    /// Whether an importance matrix is at hand.
    fn measured(&self) -> bool {
        self.rule.starts_with("IQ")
    }
}

/// What a model is made of, as far as the rules ask.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Made {
    pub(super) layers: usize,
    pub(super) hidden: u64,
    pub(super) experts: u64,
    /// Query heads for every key head.
    pub(super) shared: u64,
    pub(super) falcon: bool,
    /// A model that llama.cpp takes for a 70B.
    pub(super) large: bool,
    /// The output is the embedding's table.
    pub(super) tied: bool,
    /// Tensors whose values are attention's.
    pub(super) values: usize,
    /// Its experts were published in MXFP4, which no mixture changes.
    pub(super) mxfp4: bool,
    /// Gated delta rules.
    pub(super) delta: bool,
    /// Its experts are tensors of their own, which no rule of the quantiser knows.
    pub(super) parts: bool,
    /// Made since March 2026.
    pub(super) late: bool,
    /// A file of Ollama's library, by its architecture.
    pub(super) library: Option<Library>,
}

/// Goes over a model's tensors in the order of its file and gives every one its type.
#[derive(Debug)]
pub(super) struct Quantizer {
    mixture: &'static Mixture,
    made: Made,
    values: usize,
    downs: usize,
}

/// Parts of names whose matrices are left as they are (`tensor_allows_quantization`), in the 16 bits of what is converted.
const HALVES: [&str; 5] = ["altup_proj", "altup_unembd_proj", "altup_router.", "laurel", "per_layer_model_proj"];

/// And those that the converter writes in fp32.
const KEPT: [&str; 10] = [
    "_norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "attn_rel_b.weight",
    "position_embd.weight",
    "token_types.weight",
];

/// Types of 256 elements, and what takes their place where rows do not divide (`tensor_type_fallback`).
const INSTEAD: [(&str, &str); 15] = [
    ("iq1_s", "iq4_nl"),
    ("iq1_m", "iq4_nl"),
    ("iq2_xxs", "iq4_nl"),
    ("iq2_xs", "iq4_nl"),
    ("iq2_s", "iq4_nl"),
    ("iq3_xxs", "iq4_nl"),
    ("iq3_s", "iq4_nl"),
    ("iq4_xs", "iq4_nl"),
    ("q2_k", "q4_0"),
    ("q3_k", "q4_0"),
    ("tq1_0", "q4_0"),
    ("tq2_0", "q4_0"),
    ("q4_k", "q5_0"),
    ("q5_k", "q5_1"),
    ("q6_k", "q8_0"),
];

impl Quantizer {
    pub(super) fn new(mixture: &'static Mixture, made: Made) -> Self {
        Self { mixture, made, values: 0, downs: 0 }
    }

    /// The type of a tensor; sizes as PyTorch orders them.
    pub(super) fn format(&mut self, name: &str, shape: &[u64]) -> Option<&'static Format> {
        let find = |name: &str| find_format(builtin_formats(), name);
        let matrix = shape.iter().filter(|size| **size > 1).count() >= 2 && name.ends_with("weight");
        let halved = matrix
            && self.mixture.own != Own::Alike
            && self.mixture.mostly != "f32"
            && HALVES.iter().any(|part| name.contains(part));
        if halved && !name.contains("_norm.") {
            return find("bf16");
        }
        if !matrix || KEPT.iter().any(|part| name.contains(part)) {
            return find("f32");
        }
        let columns = shape.last().copied().unwrap_or(1);
        if self.made.mxfp4 && shape.len() > 2 && name.contains("_exps.") {
            return find("ggml-mxfp4");
        }
        if matches!(self.mixture.mostly, "f16" | "bf16" | "f32") {
            return find(self.mixture.mostly);
        }
        let usual = match name {
            // As Mixtral's files were made in December 2023: `blk.0.ffn_down.3.weight` is no `ffn_down.weight`, and attention's
            // output has no rule for eight experts yet (`get_k_quant_type` of llama.cpp before 4927).
            _ if self.made.parts && shape.len() > 2 => self.mixture.mostly,
            _ if self.made.parts && self.made.experts == 8 && name.contains("attn_output.") => self.mixture.mostly,
            _ => self.chosen(name, columns, shape.len() > 2),
        };
        let chosen = publishers::own(self.mixture, &self.made, name, usual);
        let fits = |format: &&Format| block(format) != 0 && columns.is_multiple_of(block(format));
        let instead = INSTEAD.iter().find(|(from, _)| *from == chosen).map_or("f16", |(_, to)| *to);
        [chosen, instead, "f16"].into_iter().filter_map(find).find(fits)
    }

    fn chosen(&mut self, name: &str, columns: u64, stacked: bool) -> &'static str {
        let (mixture, made) = (self.mixture, self.made);
        let mostly = mixture.mostly;
        let output = name == "output.weight" || (made.tied && name == "token_embd.weight");
        let small = ["IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M", "IQ2_S", "IQ2_M"];
        if output {
            let divides = find_format(builtin_formats(), mostly).is_some_and(|f| columns.is_multiple_of(block(f)));
            return match mixture.rule {
                "MXFP4_MOE" => "q8_0",
                _ if made.falcon || !divides => "q8_0",
                _ if mixture.is(&small) || mixture.is(&["IQ3_XXS"]) => "q5_k",
                "Q8_0" => "q8_0",
                _ => "q6_k",
            };
        }
        if mixture.rule == "MXFP4_MOE" {
            return if stacked { "ggml-mxfp4" } else { "q8_0" };
        }
        if name == "token_embd.weight" || name == "per_layer_token_embd.weight" {
            return match mixture.rule {
                "IQ2_XXS" | "IQ2_XS" | "IQ1_S" | "IQ1_M" => "q2_k",
                "IQ2_S" | "IQ2_M" | "IQ3_XXS" => "iq3_s",
                "TQ1_0" | "TQ2_0" => "q4_k",
                _ => mostly,
            };
        }
        let values = name.contains("attn_v.weight");
        if mixture.is(&small) {
            return self.few_bits(name, values);
        }
        match name {
            _ if values => self.value_type(),
            // Since March 2026 (19770) these follow the rule of values; most files that people have are older.
            _ if made.late && name.contains("attn_qkv.weight") => self.value_type(),
            _ if name.contains("attn_qkv.weight") => match mixture.rule {
                "Q3_K_M" | "Q3_K_L" | "IQ3_M" => "q4_k",
                "Q4_K_M" => "q5_k",
                "Q5_K_M" => "q6_k",
                _ => mostly,
            },
            _ if name.contains("attn_k.weight") => match mixture.rule {
                _ if made.experts == 8 => "q8_0",
                "IQ3_XS" => "iq3_xxs",
                "IQ3_XXS" => "iq2_s",
                _ => mostly,
            },
            _ if name.contains("attn_q.weight") => match mixture.rule {
                "IQ3_XS" => "iq3_xxs",
                "IQ3_XXS" => "iq2_s",
                _ => mostly,
            },
            _ if name.contains("attn_output.weight") => self.output_type(),
            _ if name.contains("ffn_up") || name.contains("ffn_gate") => {
                let layer = layer(name);
                let middle = layer >= made.layers / 8 && layer < 7 * made.layers / 8;
                if mixture.rule == "IQ3_XS" && middle { "iq3_xxs" } else { mostly }
            }
            _ if name.contains("ffn_down") => self.down_type(name),
            _ => mostly,
        }
    }

    /// Mixtures of one and two bits.
    fn few_bits(&mut self, name: &str, values: bool) -> &'static str {
        let (mixture, made) = (self.mixture, self.made);
        let two = mixture.is(&["IQ2_S", "IQ2_M"]);
        let more = if two { "iq3_s" } else { "q2_k" };
        if values {
            return if made.shared >= 4 || made.experts >= 4 { "q4_k" } else { more };
        }
        match name {
            _ if made.experts == 8 && name.contains("attn_k.weight") => "q4_k",
            _ if name.contains("ffn_down") => {
                self.downs += 1;
                if self.downs <= made.layers / 8 { more } else { mixture.mostly }
            }
            _ if name.contains("attn_output.weight") => match mixture.rule {
                _ if made.experts == 8 => "q5_k",
                "IQ1_S" | "IQ1_M" => "iq2_xxs",
                _ if two => "iq3_s",
                _ => mixture.mostly,
            },
            _ => mixture.mostly,
        }
    }

    fn value_type(&mut self) -> &'static str {
        let (mixture, made, at) = (self.mixture, self.made, self.values);
        self.values += 1;
        let shared = made.shared >= 4;
        let chosen = match mixture.rule {
            "Q2_K" => {
                if shared {
                    "q4_k"
                } else {
                    "q3_k"
                }
            }
            "Q2_K_S" if shared => "q4_k",
            "IQ3_XXS" => {
                if shared {
                    "q4_k"
                } else {
                    "iq3_xxs"
                }
            }
            "IQ3_XS" | "IQ3_S" if shared => "q4_k",
            "IQ3_M" => "q4_k",
            "Q3_K_M" => {
                if at < 2 {
                    "q5_k"
                } else {
                    "q4_k"
                }
            }
            "Q3_K_L" => "q5_k",
            "IQ4_NL" | "IQ4_XS" if shared => "q5_k",
            "Q4_K_M" | "Q5_K_M" if more_bits(at, made.values) => "q6_k",
            "Q4_K_S" if at < 4 => "q5_k",
            _ => mixture.mostly,
        };
        match chosen {
            _ if made.experts == 8 => "q8_0",
            "q3_k" | "q4_k" if made.large => "q5_k",
            chosen => chosen,
        }
    }

    fn output_type(&self) -> &'static str {
        let (mixture, made) = (self.mixture, self.made);
        if made.falcon {
            return if mixture.rule == "Q3_K_L" { "q4_k" } else { mixture.mostly };
        }
        let raised =
            ["Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS"];
        if made.experts == 8 {
            return if mixture.is(&raised) { "q5_k" } else { mixture.mostly };
        }
        match mixture.rule {
            "Q2_K" => "q3_k",
            "IQ3_XXS" => "iq3_s",
            "Q3_K_M" | "IQ3_M" => "q4_k",
            "Q3_K_L" => "q5_k",
            _ => mixture.mostly,
        }
    }

    fn down_type(&mut self, name: &str) -> &'static str {
        let (mixture, made) = (self.mixture, self.made);
        // Experts are counted by their layers' names, others as they come.
        let at = if made.experts > 1 { layer(name) } else { self.downs };
        self.downs += 1;
        let (layers, first) = (made.layers, at < made.layers / 8);
        match mixture.rule {
            "Q2_K" => "q3_k",
            "Q2_K_S" if first => "q4_k",
            "Q3_K_M" if at < layers / 16 => "q5_k",
            "Q3_K_M" => {
                if !made.falcon || more_bits(at, layers) {
                    "q4_k"
                } else {
                    "q3_k"
                }
            }
            "IQ3_M" if first || (made.experts == 8 && more_bits(at, layers)) => "q4_k",
            "Q3_K_L" => {
                if made.falcon {
                    "q4_k"
                } else {
                    "q5_k"
                }
            }
            "Q4_K_M" if made.falcon && at < layers / 16 => "q6_k",
            "Q4_K_M" if more_bits(at, layers) => {
                if made.falcon {
                    "q5_k"
                } else {
                    "q6_k"
                }
            }
            "IQ4_NL" | "IQ4_XS" if first && !mixture.measured() => "q5_k",
            "Q5_K_M" if more_bits(at, layers) => "q6_k",
            "Q4_K_S" if !made.falcon && first => "q5_k",
            _ => mixture.mostly,
        }
    }
}

/// The first and last eighth of layers, and every third between.
fn more_bits(at: usize, layers: usize) -> bool {
    at < layers / 8 || at >= 7 * layers / 8 || (at - layers / 8) % 3 == 2
}

fn layer(name: &str) -> usize {
    name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok()).unwrap_or(0)
}

fn block(format: &Format) -> u64 {
    crate::serving::ggml::tensor::Kind::of(format).map_or(1, |kind| kind.block)
}

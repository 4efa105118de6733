//! What publishers change of llama-quantize's mixtures: bartowski's wide tables, Unsloth's dynamic ones, Ollama's library.

use super::quantize::{Made, Mixture};

/// Whose a mixture is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Own {
    /// llama-quantize's.
    No,
    /// Tables of words in `Q8_0` (`Q4_K_L`).
    WideTables,
    /// Tables like all else: of models that were trained to be stored so.
    Alike,
    /// Unsloth's: the name of one of llama-quantize's, and its own types where layers have gated delta rules.
    Named,
    /// Unsloth's: its own types everywhere (`UD-Q4_K_XL`).
    Dynamic,
}

/// Architectures that Ollama treats in a way of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Library {
    Gemma,
    Latent,
    Delta,
    Qwen3,
}

impl Library {
    pub(super) fn of(architecture: &str) -> Option<Self> {
        match architecture {
            "gemma3n" | "gemma4" => Some(Self::Gemma),
            "deepseek2" => Some(Self::Latent),
            "qwen35" | "qwen35moe" | "qwen3next" => Some(Self::Delta),
            "qwen3" => Some(Self::Qwen3),
            _ => None,
        }
    }
}

/// Mixtures that publishers have beside those of llama-quantize.
pub(super) const PUBLISHERS: &[Mixture] = &[
    variant("Q2_K_L", "Q2_K", "q2_k", Own::WideTables),
    variant("Q3_K_XL", "Q3_K_L", "q3_k", Own::WideTables),
    variant("Q4_K_L", "Q4_K_M", "q4_k", Own::WideTables),
    variant("Q5_K_L", "Q5_K_M", "q5_k", Own::WideTables),
    variant("Q6_K_L", "Q6_K", "q6_k", Own::WideTables),
    variant("QAT_Q4_0", "Q4_0", "q4_0", Own::Alike),
    variant("UD-IQ1_S", "IQ1_S", "iq1_s", Own::Dynamic),
    variant("UD-IQ1_M", "IQ1_M", "iq1_m", Own::Dynamic),
    variant("UD-IQ2_XXS", "IQ2_XXS", "iq2_xxs", Own::Dynamic),
    variant("UD-IQ2_M", "IQ2_M", "iq2_s", Own::Dynamic),
    variant("UD-IQ3_XXS", "IQ3_XXS", "iq3_xxs", Own::Dynamic),
    variant("UD-IQ3_S", "IQ3_S", "iq3_s", Own::Dynamic),
    variant("UD-IQ4_XS", "IQ4_XS", "iq4_xs", Own::Dynamic),
    variant("UD-IQ4_NL", "IQ4_NL", "iq4_nl", Own::Dynamic),
    variant("UD-Q2_K_XL", "Q2_K", "q2_k", Own::Dynamic),
    variant("UD-Q3_K_XL", "Q3_K_M", "q3_k", Own::Dynamic),
    variant("UD-Q4_K_XL", "Q4_K_M", "q4_k", Own::Dynamic),
    variant("UD-Q5_K_XL", "Q5_K_M", "q5_k", Own::Dynamic),
    variant("UD-Q6_K_XL", "Q6_K", "q6_k", Own::Dynamic),
    variant("UD-Q8_K_XL", "Q8_0", "q8_0", Own::Dynamic),
    variant("UD-Q3_K_S", "Q3_K_S", "q3_k", Own::Named),
    variant("UD-Q3_K_M", "Q3_K_M", "q3_k", Own::Named),
    variant("UD-Q4_K_S", "Q4_K_S", "q4_k", Own::Named),
    variant("UD-Q4_K_M", "Q4_K_M", "q4_k", Own::Named),
    variant("UD-Q5_K_S", "Q5_K_S", "q5_k", Own::Named),
    variant("UD-Q5_K_M", "Q5_K_M", "q5_k", Own::Named),
    variant("UD-Q6_K", "Q6_K", "q6_k", Own::Named),
];

const fn variant(name: &'static str, rule: &'static str, mostly: &'static str, own: Own) -> Mixture {
    Mixture { name, mostly, rule, own }
}

/// What Unsloth uploads under a name of llama-quantize's.
pub(super) fn unsloths(mixture: &'static Mixture) -> &'static Mixture {
    let own = PUBLISHERS.iter().find(|own| own.own == Own::Named && own.rule == mixture.name);
    own.unwrap_or(mixture)
}

/// What Unsloth uploads of a model that was trained to be stored in 4 bits, whatever it is called: a log of Gemma 4 12B's
/// `UD-Q4_K_XL` has its table in 540 MiB and 6390 in all, which is `Q4_0` throughout.
pub(super) fn trained(repository: &str, mixture: &'static Mixture) -> &'static Mixture {
    let says = repository.to_ascii_lowercase().split(['-', '_', '.']).any(|part| part == "qat");
    let own = PUBLISHERS.iter().find(|own| own.own == Own::Alike && says && mixture.name == "UD-Q4_K_XL");
    own.unwrap_or(mixture)
}

/// A repository's name without what says who converted it and how: `Qwen_Qwen3-14B` (bartowski), `-i1` (mradermacher), `-MTP`.
pub(super) fn plain(name: &str) -> String {
    let name = ["-i1", "-MTP", "-mtp", "-imatrix", "-UD", "-qat", "-QAT"]
        .iter()
        .fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
    match name.split_once('_') {
        Some((owner, rest)) if OWNERS.iter().any(|known| known.eq_ignore_ascii_case(owner)) => rest.to_owned(),
        _ => name.to_owned(),
    }
}

/// Owners of models that bartowski writes before their names.
const OWNERS: [&str; 16] = [
    "Qwen",
    "google",
    "mistralai",
    "meta-llama",
    "microsoft",
    "nvidia",
    "openai",
    "zai-org",
    "THUDM",
    "deepseek-ai",
    "ibm-granite",
    "allenai",
    "HuggingFaceTB",
    "LiquidAI",
    "moonshotai",
    "tiiuae",
];

/// The type that a publisher gives a matrix which llama-quantize would give `usual`.
pub(super) fn own(mixture: &Mixture, made: &Made, name: &str, usual: &'static str) -> &'static str {
    let table = name == "token_embd.weight" || name == "output.weight";
    match mixture.own {
        Own::WideTables if table => "q8_0",
        Own::Alike if table => mixture.mostly,
        Own::Dynamic | Own::Named if !table && name.starts_with("blk.") => dynamic(mixture, made, name, usual),
        Own::Dynamic if table && mixture.mostly == "q8_0" => "bf16",
        Own::No => made.library.map_or(usual, |kind| library(kind, made, mixture, name, usual)),
        _ => usual,
    }
}

/// Unsloth's, as far as sizes of files and logs of them tell: its own lists are not published. Sizes of uploads of Qwen 3, 3.5
/// and 3.6, DeepSeek-V3 and gpt-oss come out within 2 % (truth/external/found/README.md),
/// some of which are remembered and not read, and by which these types were found.
fn dynamic(mixture: &Mixture, made: &Made, name: &str, usual: &'static str) -> &'static str {
    let everywhere = mixture.own == Own::Dynamic;
    let is = |part: &str| name.contains(part);
    match name {
        _ if made.delta && (is("ssm_alpha.") || is("ssm_beta.")) => "f32",
        _ if !everywhere && !made.delta => usual,
        // Experts in the mixture's type, all else in 8 bits.
        _ if made.experts > 1 && is("_exps.") => match mixture.rule {
            "Q4_K_M" | "Q4_K_S" if made.delta && is("ffn_down") => "q5_k",
            rule if rule.starts_with("IQ") || rule == "Q2_K" => usual,
            _ => mixture.mostly,
        },
        _ if made.experts > 1 => {
            if mixture.mostly == "q8_0" {
                "bf16"
            } else {
                "q8_0"
            }
        }
        _ if !everywhere => usual,
        _ if made.delta && mixture.mostly == "q4_k" => match name {
            _ if is("attn_qkv.") || is("attn_v.") => "q6_k",
            _ if is("ssm_out.") => "q8_0",
            _ if is("ffn_down.") => "q5_k",
            _ => usual,
        },
        _ if is("attn_output.") => match usual {
            "q4_k" => "q5_k",
            "q5_k" => "q6_k",
            "q8_0" => "bf16",
            other => other,
        },
        _ => usual,
    }
}

/// Ollama's own quantiser until May 2026 (server/quantization.go of its repository), and what it tells llama-quantize since.
fn library(kind: Library, made: &Made, mixture: &Mixture, name: &str, usual: &'static str) -> &'static str {
    let is = |part: &str| name.contains(part);
    if !mixture.rule.starts_with("Q4_K") {
        return usual;
    }
    match kind {
        Library::Gemma if is("per_layer_token_embd") => "bf16",
        Library::Latent
            if ["attn_k_b.", "attn_v_b.", "attn_kv_a_mqa.", "attn_q_a.", "attn_q_b."].iter().any(|part| is(part)) =>
        {
            "q8_0"
        }
        Library::Delta => match name {
            _ if is("attn_v.") || is("ffn_down_exps.") || is("ffn_down_shexp.") => "q6_k",
            _ if is("ffn_down.") || !name.starts_with("blk.") => usual,
            _ => "q4_k",
        },
        // Those of April 2025 keep attention's values in 16 bits: a log of qwen3:8b says so to the last digit, sizes of the others
        // in the library agree (0.6B to 32B; 4B and 30B were replaced by those of July).
        Library::Qwen3 if made.hidden != 2560 => {
            if is("attn_v.") {
                "bf16"
            } else {
                usual
            }
        }
        _ => usual,
    }
}

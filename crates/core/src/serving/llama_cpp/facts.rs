//! Sizes of a model out of its metadata (`load_hparams` of llama-model.cpp and of the architectures).

use super::architectures::{Architecture, Rotary, Sliding};
use super::file::ModelFile;

/// `llama_hparams`, as far as memory depends on it.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// Layers that run; those that guess ahead (`nextn`) come after.
    pub(super) layers: usize,
    /// All of them.
    pub(super) all_layers: usize,
    pub(super) positions: u64,
    pub(super) hidden: u64,
    pub(super) vocabulary: u64,
    pub(super) heads: Vec<u64>,
    pub(super) kv_heads: Vec<u64>,
    pub(super) key: u64,
    pub(super) value: u64,
    pub(super) sliding_key: u64,
    pub(super) sliding_value: u64,
    pub(super) turned: u64,
    pub(super) experts: u64,
    pub(super) chosen: u64,
    pub(super) groups: u64,
    pub(super) chosen_groups: u64,
    pub(super) expert_scale: bool,
    pub(super) expert_norm: Option<bool>,
    pub(super) gating: Option<u64>,
    pub(super) window: u64,
    /// Which layers see a window.
    pub(super) slides: Vec<bool>,
    pub(super) latent: u64,
    /// Width of keys and values per head of a latent that is kept compressed; 0 otherwise.
    pub(super) latent_key: u64,
    pub(super) latent_value: u64,
    pub(super) positions_per_token: u64,
    pub(super) attention_cap: bool,
    pub(super) final_cap: bool,
    pub(super) embedding_scale: bool,
    pub(super) residual_scale: bool,
    pub(super) logit_scale: bool,
    pub(super) clamped: bool,
    pub(super) temperature: bool,
    /// Layers from here on read the keys and values of earlier ones.
    pub(super) caching: usize,
    /// Original positions of a stretched rotary embedding.
    pub(super) original: u64,
    pub(super) causal: bool,
    /// Which layers keep states of constant size, and the elements of a sequence's two.
    recurrent: Vec<bool>,
    pub(super) states: [u64; 2],
    /// What makes them.
    pub(super) recurrence: Recurrence,
    /// Whether queries and keys are turned at all.
    pub(super) turns: bool,
    /// Whether such layers attend as well.
    both: bool,
}

/// Sizes of a layer with states (`ssm_…` of `llama_hparams`).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Recurrence {
    /// Inputs that a convolution sees.
    pub(super) kernel: u64,
    pub(super) inner: u64,
    pub(super) state: u64,
    /// Heads of what is stored.
    pub(super) heads: u64,
    /// Heads, or groups of them, of what reads and writes it.
    pub(super) groups: u64,
}

impl Facts {
    pub(super) fn of(file: &ModelFile, architecture: &Architecture) -> Result<Self, String> {
        let need = |key: &str| {
            file.number(key).ok_or_else(|| format!("the GGUF file does not say {}.{key}", file.architecture))
        };
        let all_layers = usize::try_from(need("block_count")?.min(4096)).unwrap_or(0);
        let ahead = file.number("nextn_predict_layers").unwrap_or(0);
        let layers = all_layers.saturating_sub(usize::try_from(ahead).unwrap_or(0));
        let hidden = need("embedding_length")?;
        let heads = file.numbers("attention.head_count", all_layers).unwrap_or_else(|| vec![0; all_layers]);
        let kv_heads = file.numbers("attention.head_count_kv", all_layers).unwrap_or_else(|| heads.clone());
        let first = heads.first().copied().unwrap_or(0);
        let per_head = hidden.checked_div(first).unwrap_or(0);
        let key = file.number("attention.key_length").unwrap_or(per_head);
        let value = file.number("attention.value_length").unwrap_or(per_head);
        let (window, slides) = windows(file, architecture, all_layers);
        let positions = file.positions();
        let sections = file.numbers("rope.dimension_sections", 4).unwrap_or_default();
        let many = architecture.many_positions
            || (architecture.maybe_many_positions
                && sections.iter().take(2).all(|size| *size > 0)
                && !sections.is_empty());
        let shared = file.number("attention.shared_kv_layers").map(|shared| usize::try_from(shared).unwrap_or(0));
        Ok(Self {
            layers,
            all_layers,
            positions,
            hidden,
            vocabulary: file.vocabulary(),
            key,
            value,
            sliding_key: file.number("attention.key_length_swa").unwrap_or(key),
            sliding_value: file.number("attention.value_length_swa").unwrap_or(value),
            turned: file.number("rope.dimension_count").unwrap_or(key),
            heads,
            kv_heads,
            experts: file.number("expert_count").unwrap_or(0),
            chosen: file.number("expert_used_count").unwrap_or(0),
            groups: file.number("expert_group_count").unwrap_or(0),
            chosen_groups: file.number("expert_group_used_count").unwrap_or(0),
            expert_scale: file.real("expert_weights_scale").is_some_and(|scale| scale != 1.0),
            expert_norm: file.flag("expert_weights_norm"),
            gating: file.number("expert_gating_func").filter(|gating| *gating > 0),
            window,
            slides,
            latent: file.number("attention.kv_lora_rank").unwrap_or(0),
            latent_key: file.number("attention.key_length_mla").unwrap_or(0),
            latent_value: file.number("attention.value_length_mla").unwrap_or(0),
            positions_per_token: if many { 4 } else { 1 },
            attention_cap: architecture.attention_cap,
            // Gemma 3n's is not asked for.
            final_cap: file.real("final_logit_softcapping").is_some() || architecture.streams,
            embedding_scale: file.real("embedding_scale").is_some(),
            residual_scale: file.real("residual_scale").is_some(),
            logit_scale: file.real("logit_scale").is_some(),
            clamped: file.real("attention.clamp_kqv").is_some(),
            temperature: file.real("attention.temperature_scale").is_some(),
            caching: shared.map_or(all_layers, |shared| all_layers.saturating_sub(shared)),
            original: file.number("rope.scaling.original_context_length").unwrap_or(positions),
            causal: file.flag("attention.causal").unwrap_or(true),
            recurrent: recurrent(file, layers),
            states: states(file, hidden, first),
            recurrence: recurrence(file),
            turns: architecture.rotary != Rotary::Finetuned || file.flag("rope.scaling.finetuned") != Some(false),
            both: file.architecture == "falcon-h1",
        })
    }

    pub(super) fn slides(&self, layer: usize) -> bool {
        self.slides.get(layer).copied().unwrap_or(false)
    }

    pub(super) fn recurs(&self, layer: usize) -> bool {
        self.recurrent.get(layer).copied().unwrap_or(false)
    }

    pub(super) fn recurs_anywhere(&self) -> bool {
        self.recurrent.contains(&true)
    }

    /// Whether a layer has keys and values: one that is a feed-forward alone has none.
    pub(super) fn attends(&self, layer: usize) -> bool {
        self.kv_heads(layer) > 0 && (self.both || !self.recurs(layer))
    }

    pub(super) fn any_slides(&self) -> bool {
        self.slides.iter().any(|slides| *slides)
    }

    pub(super) fn heads(&self, layer: usize) -> u64 {
        self.heads.get(layer).copied().unwrap_or(0)
    }

    pub(super) fn kv_heads(&self, layer: usize) -> u64 {
        self.kv_heads.get(layer).copied().unwrap_or(0)
    }

    /// Width of a key of a layer.
    pub(super) fn key(&self, layer: usize) -> u64 {
        if self.slides(layer) { self.sliding_key } else { self.key }
    }

    pub(super) fn value(&self, layer: usize) -> u64 {
        if self.slides(layer) { self.sliding_value } else { self.value }
    }

    /// Keys of all heads.
    pub(super) fn keys(&self, layer: usize) -> u64 {
        self.key(layer).saturating_mul(self.kv_heads(layer))
    }

    pub(super) fn values(&self, layer: usize) -> u64 {
        self.value(layer).saturating_mul(self.kv_heads(layer))
    }

    /// The widest values of all layers: transposed values are padded to it.
    pub(super) fn widest_values(&self) -> u64 {
        (0..self.all_layers).map(|layer| self.values(layer)).max().unwrap_or(0)
    }

    /// Whether one compressed key is kept for all heads.
    pub(super) fn compressed(&self) -> bool {
        self.latent_key > 0 && self.latent_value > 0
    }
}

/// The window, and who sees it.
fn windows(file: &ModelFile, architecture: &Architecture, layers: usize) -> (u64, Vec<bool>) {
    let said = file.number("attention.sliding_window");
    let none = (0, vec![false; layers]);
    let (period, dense_first, window) = match architecture.sliding {
        Sliding::Never => return none,
        Sliding::Always { period, dense_first, window } => (period, dense_first, said.unwrap_or(window)),
        // A window of 0 in the file is none.
        Sliding::WhenSaid { period } => match said {
            Some(window) if window > 0 => (period, false, window),
            _ => return none,
        },
    };
    if let Some(pattern) = file.numbers("attention.sliding_window_pattern", layers) {
        let array = pattern.windows(2).any(|pair| pair[0] != pair[1]) || pattern.iter().all(|value| *value <= 1);
        if array {
            return (window, pattern.iter().map(|value| *value > 0).collect());
        }
        let period = pattern.first().copied().unwrap_or(period);
        return (window, by_period(period, dense_first, layers));
    }
    (window, by_period(period, dense_first, layers))
}

/// `set_swa_pattern`: of every `period` layers one sees all.
fn by_period(period: u64, dense_first: bool, layers: usize) -> Vec<bool> {
    let slides = |layer: u64| match (period, dense_first) {
        (0, _) => true,
        (_, true) => !layer.is_multiple_of(period),
        (_, false) => layer % period < period - 1,
    };
    (0..layers as u64).map(slides).collect()
}

/// Elements of a sequence's states in a layer that keeps some: its last inputs, and what it made of all of them (`n_embd_r` and
/// `n_embd_s` of llama-hparams.cpp).
fn states(file: &ModelFile, hidden: u64, heads: u64) -> [u64; 2] {
    let size = |key: &str| file.number(key).unwrap_or(0);
    let (kernel, inner, state) = (size("ssm.conv_kernel"), size("ssm.inner_size"), size("ssm.state_size"));
    let inputs = kernel.saturating_sub(1);
    match (size("wkv.head_size"), size("shortconv.l_cache"), size("kda.head_dim")) {
        (0, 0, 0) => {
            let grouped = size("ssm.group_count").saturating_mul(state).saturating_mul(2);
            [inputs.saturating_mul(inner.saturating_add(grouped)), state.saturating_mul(inner)]
        }
        (0, 0, head) => {
            let inner = heads.saturating_mul(head);
            let inputs = if kernel > 0 { inputs } else { 3 };
            [inputs.saturating_mul(3).saturating_mul(inner), inner.saturating_mul(head)]
        }
        (0, kernel, _) => [hidden.saturating_mul(kernel - 1), 0],
        (head, ..) => {
            let shifts = file.number("token_shift_count").unwrap_or(2);
            [shifts.saturating_mul(hidden), hidden.saturating_mul(head)]
        }
    }
}

fn recurrence(file: &ModelFile) -> Recurrence {
    let size = |key: &str| file.number(key).unwrap_or(0);
    let short = size("shortconv.l_cache");
    Recurrence {
        kernel: if short > 0 { short } else { size("ssm.conv_kernel") },
        inner: size("ssm.inner_size"),
        state: size("ssm.state_size"),
        heads: size("ssm.time_step_rank").max(1),
        groups: size("ssm.group_count").max(1),
    }
}

/// Layers that keep states (`is_recr_impl` of the architectures): as the file lists them, at intervals, or all that have no heads
/// of keys and values and no feed-forward in their place.
fn recurrent(file: &ModelFile, layers: usize) -> Vec<bool> {
    const INTERVALS: [&str; 4] = ["qwen3next", "qwen35", "qwen35moe", "minimax-01"];
    if states(file, 1, 1) == [0, 0] {
        return vec![false; layers];
    }
    if let Some(listed) = file.numbers("attention.recurrent_layers", layers) {
        return listed.iter().map(|flag| *flag > 0).collect();
    }
    if INTERVALS.contains(&file.architecture.as_str()) {
        let interval = file.number("full_attention_interval").unwrap_or(4).max(1);
        return (1..=layers as u64).map(|layer| !layer.is_multiple_of(interval)).collect();
    }
    let kept = |key: &str| file.numbers(key, layers).unwrap_or_else(|| vec![0; layers]);
    // One width for all layers says nothing of any of them.
    let wide = kept("feed_forward_length");
    let wide = if wide.windows(2).all(|pair| pair[0] == pair[1]) { vec![0; layers] } else { wide };
    let heads = kept("attention.head_count_kv");
    let all = file.architecture == "falcon-h1";
    heads.iter().zip(wide).map(|(heads, wide)| all || (*heads == 0 && wide == 0)).collect()
}

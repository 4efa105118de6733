//! What llama.cpp's architectures do differently, as far as buffers can tell (src/models/*.cpp at b21e4de, 2026-08-22).
//!
//! Whether a layer has biases, norms of queries and keys, post norms, gates or experts is read off its tensors; what the
//! code alone says is here.

/// How an architecture computes a decoder layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Architecture {
    pub(super) names: &'static [&'static str],
    /// LayerNorm instead of RMSNorm: ggml computes it in a buffer of its own.
    pub(super) layer_norm: bool,
    pub(super) activation: Activation,
    pub(super) sliding: Sliding,
    pub(super) rotary: Rotary,
    /// Norms of queries and keys run over all heads at once, before these are told apart.
    pub(super) whole_norms: bool,
    /// Norms of queries and keys come after the rotary embedding.
    pub(super) late_norms: bool,
    /// Queries are scaled in an operation of their own.
    pub(super) scaled_query: bool,
    /// So is the embedding.
    pub(super) scaled_embedding: bool,
    pub(super) residual: Residual,
    /// The norm before the feed-forward is called `post_attention_norm`.
    pub(super) renamed_norm: bool,
    /// Scores pass a soft cap.
    pub(super) attention_cap: bool,
    pub(super) router: Router,
    /// Whether the weights of chosen experts are made to sum to one; `None`: as the file says.
    pub(super) sum_to_one: Option<bool>,
    /// Chosen experts' inputs are weighted, not their outputs.
    pub(super) weighted_first: bool,
    /// Rows without output are left out after the last layer only.
    pub(super) late_outputs: bool,
    /// Only after the last norm, even.
    pub(super) normed_outputs: bool,
    /// The build since which that is so: what guesses ahead reads all rows. Earlier ones leave them out in the last layer.
    pub(super) late_since: u32,
    /// Values have a norm without weights; where they have no projection of their own they are the keys.
    pub(super) normed_values: bool,
    /// Factors of frequencies are for layers that see all.
    pub(super) full_factors: bool,
    /// Four positions a token.
    pub(super) many_positions: bool,
    pub(super) maybe_many_positions: bool,
    /// Bidirectional: no cache.
    pub(super) encoder: bool,
    /// A layer is one thing alone: states, attention, or a feed-forward.
    pub(super) single: bool,
    /// Several streams, of which one runs through a layer (`streams.rs`).
    pub(super) streams: bool,
    /// The norm of a layer is computed before what reads it is built.
    pub(super) early_norm: bool,
    /// The gate of shared experts is a sigmoid; otherwise silu divided by its input.
    pub(super) sigmoid_gate: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activation {
    Silu,
    Gelu,
    ReluSquared,
    /// One operation over both halves of a wide `ffn_up`.
    Halves,
    /// gpt-oss's.
    Clipped,
}

/// In which order a layer adds what it made: ggml writes a sum over its first operand where it can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Residual {
    /// Attention, then feed-forward, each to the stream.
    Serial,
    /// The feed-forward's sum has the stream as its first operand.
    StreamFirst,
    /// Both sums have.
    StreamAlways,
    /// Both read one norm: (feed-forward + stream) + attention.
    Beside,
    /// (feed-forward + attention) + stream.
    BesideAttention,
    /// (attention + feed-forward) + stream.
    AttentionFirst,
}

impl Residual {
    pub(super) fn parallel(self) -> bool {
        matches!(self, Self::Beside | Self::BesideAttention | Self::AttentionFirst)
    }
}

/// Which layers see a window where the file has no list of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sliding {
    Never,
    Always { period: u64, dense_first: bool, window: u64 },
    WhenSaid { period: u64 },
}

/// Which layers turn queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rotary {
    All,
    None,
    /// Those that see a window, or all where none does.
    Sliding,
    /// All but every n-th.
    Skipping(usize),
    /// All, unless the file says that its embedding was not tuned: Granite's switch.
    Finetuned,
}

/// How scores of experts become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Router {
    Softmax,
    Sigmoid,
    /// Softmax over the chosen ones.
    Chosen,
}

const PLAIN: Architecture = Architecture {
    names: &[
        "llama",
        "qwen2",
        "qwen3",
        "internlm2",
        "mistral3",
        "exaone",
        "arctic",
        "xverse",
        "baichuan",
        "orion",
        "refact",
        "minicpm",
        "deci",
        "ernie4_5",
        "ernie4_5-moe",
        "pangu-embedded",
        "maincoder",
        "jais2",
        "qwen3moe",
        "smallthinker",
        "plamo",
        "llama-embed",
        "grok",
        "seed_oss_base",
        "apertus",
        "yi",
    ],
    layer_norm: false,
    activation: Activation::Silu,
    sliding: Sliding::Never,
    rotary: Rotary::All,
    whole_norms: false,
    late_norms: false,
    scaled_query: false,
    scaled_embedding: false,
    residual: Residual::Serial,
    renamed_norm: false,
    attention_cap: false,
    router: Router::Softmax,
    sum_to_one: Some(true),
    weighted_first: false,
    late_outputs: false,
    normed_outputs: false,
    late_since: 0,
    normed_values: false,
    full_factors: false,
    many_positions: false,
    maybe_many_positions: false,
    encoder: false,
    single: false,
    streams: false,
    early_norm: false,
    sigmoid_gate: false,
};

const GEMMA: Architecture = Architecture {
    names: &["gemma"],
    activation: Activation::Gelu,
    scaled_query: true,
    scaled_embedding: true,
    ..PLAIN
};

const LAYER_NORM: Architecture = Architecture {
    names: &["starcoder2", "gptneox_serial", "codeshell"],
    layer_norm: true,
    activation: Activation::Gelu,
    ..PLAIN
};

/// Gated delta rules between layers of attention.
const DELTA: Architecture = Architecture {
    names: &["qwen3next"],
    renamed_norm: true,
    late_outputs: true,
    normed_outputs: true,
    // 25589.
    late_since: 10238,
    early_norm: true,
    sigmoid_gate: true,
    ..PLAIN
};

const fn every(period: u64, window: u64) -> Sliding {
    Sliding::Always { period, dense_first: false, window }
}

/// Those that are known; the first is the rule for others.
pub(super) const ALL: &[Architecture] = &[
    PLAIN,
    GEMMA,
    LAYER_NORM,
    Architecture { names: &["gemma2"], sliding: every(2, 4096), attention_cap: true, ..GEMMA },
    Architecture {
        names: &["gemma4"],
        sliding: every(6, 512),
        scaled_query: false,
        late_outputs: true,
        normed_outputs: true,
        // 23398.
        late_since: 9549,
        normed_values: true,
        full_factors: true,
        ..GEMMA
    },
    Architecture {
        names: &["gemma3n"],
        sliding: every(5, 512),
        scaled_query: false,
        normed_values: true,
        streams: true,
        ..GEMMA
    },
    Architecture { names: &["gemma3"], sliding: Sliding::WhenSaid { period: 6 }, ..GEMMA },
    Architecture {
        names: &["phi3", "phimoe"],
        activation: Activation::Halves,
        scaled_query: true,
        residual: Residual::StreamFirst,
        ..PLAIN
    },
    Architecture { names: &["glm4", "chatglm"], activation: Activation::Halves, maybe_many_positions: true, ..PLAIN },
    Architecture {
        names: &["glm4moe"],
        renamed_norm: true,
        router: Router::Sigmoid,
        sum_to_one: None,
        maybe_many_positions: true,
        ..PLAIN
    },
    Architecture { names: &["seed_oss"], renamed_norm: true, ..PLAIN },
    Architecture {
        names: &["gpt-oss"],
        activation: Activation::Clipped,
        sliding: every(2, 128),
        renamed_norm: true,
        router: Router::Chosen,
        sum_to_one: Some(false),
        late_outputs: true,
        // 25794.
        late_since: 10158,
        ..PLAIN
    },
    Architecture { names: &["qwen2moe", "deepseek"], sum_to_one: Some(false), ..PLAIN },
    Architecture { names: &["olmoe"], sum_to_one: Some(false), whole_norms: true, ..PLAIN },
    Architecture { names: &["minimax-m2"], whole_norms: true, router: Router::Sigmoid, ..PLAIN },
    Architecture { names: &["deepseek2", "dots1", "bailingmoe2", "bailingmoe"], sum_to_one: None, ..PLAIN },
    Architecture { names: &["hunyuan-moe", "hunyuan-dense"], late_norms: true, ..PLAIN },
    Architecture {
        names: &["llama4"],
        sliding: every(4, 8192),
        rotary: Rotary::Skipping(4),
        late_norms: true,
        router: Router::Sigmoid,
        sum_to_one: Some(false),
        weighted_first: true,
        ..PLAIN
    },
    Architecture { names: &["command-r"], layer_norm: true, residual: Residual::Beside, ..PLAIN },
    Architecture {
        names: &["cohere2"],
        layer_norm: true,
        residual: Residual::Beside,
        sliding: every(4, 4096),
        rotary: Rotary::Sliding,
        ..PLAIN
    },
    Architecture { names: &["olmo2"], sliding: Sliding::WhenSaid { period: 4 }, whole_norms: true, ..PLAIN },
    Architecture { names: &["olmo"], layer_norm: true, ..PLAIN },
    Architecture { names: &["exaone4"], sliding: Sliding::WhenSaid { period: 4 }, rotary: Rotary::Sliding, ..PLAIN },
    Architecture { names: &["smollm3"], rotary: Rotary::Skipping(4), ..PLAIN },
    Architecture { names: &["stablelm"], layer_norm: true, ..PLAIN },
    Architecture { names: &["nemotron"], layer_norm: true, activation: Activation::ReluSquared, ..PLAIN },
    Architecture { names: &["arcee"], activation: Activation::ReluSquared, ..PLAIN },
    Architecture { names: &["phi2"], scaled_query: true, residual: Residual::AttentionFirst, ..LAYER_NORM },
    Architecture { names: &["falcon"], residual: Residual::BesideAttention, ..LAYER_NORM },
    Architecture { names: &["gptneox"], residual: Residual::Beside, ..LAYER_NORM },
    Architecture { names: &["gpt2", "bloom", "mpt", "starcoder", "jais"], rotary: Rotary::None, ..LAYER_NORM },
    Architecture { names: &["granite", "granitemoe", "granitehybrid"], rotary: Rotary::Finetuned, ..PLAIN },
    DELTA,
    // 22673.
    Architecture { names: &["qwen35", "qwen35moe"], many_positions: true, late_since: 9180, ..DELTA },
    Architecture {
        names: &["nemotron_h", "nemotron_h_moe"],
        activation: Activation::ReluSquared,
        rotary: Rotary::None,
        router: Router::Sigmoid,
        sum_to_one: None,
        late_outputs: true,
        normed_outputs: true,
        // 26725.
        late_since: 10344,
        single: true,
        ..PLAIN
    },
    Architecture { names: &["lfm2", "lfm2moe"], residual: Residual::StreamAlways, ..PLAIN },
    Architecture { names: &["qwen2vl", "qwen3vl", "qwen3vlmoe"], many_positions: true, ..PLAIN },
    Architecture { names: &["bert", "jina-bert-v2"], encoder: true, rotary: Rotary::None, ..LAYER_NORM },
    Architecture { names: &["nomic-bert-moe", "jina-bert-v3"], encoder: true, ..LAYER_NORM },
    Architecture { names: &["nomic-bert"], encoder: true, activation: Activation::Silu, ..LAYER_NORM },
];

impl Architecture {
    /// Whether a build leaves rows without output out after the last layer only.
    pub(super) fn late(&self, build: u32) -> bool {
        self.late_outputs && build >= self.late_since
    }
}

/// The rules of an architecture, and whether its graph is built here.
pub(super) fn of(name: &str) -> (&'static Architecture, bool) {
    let found = ALL.iter().find(|architecture| architecture.names.contains(&name));
    (found.unwrap_or(&ALL[0]), found.is_some())
}

//! A header against its own tensors: llama.cpp makes the shapes it expects out of the metadata and refuses a file that has others
//! (`create_tensor` and `done_getting_tensors` of llama-model-loader.cpp).

use super::{Header, Value, architecture};
use crate::source::Tensor;

/// What a header says of its tensors that they do not bear out: the key and its value, the tensor and its sizes.
pub fn contradiction(header: &Header) -> Option<String> {
    let name = header.architecture()?;
    let view = View { header, name };
    view.layers().or_else(|| view.table()).or_else(|| {
        // Shapes inside of layers are those of architectures that are known.
        architecture::model_type(name)?;
        header.tensors.iter().find_map(|tensor| view.within(tensor))
    })
}

struct View<'a> {
    header: &'a Header,
    name: &'a str,
}

impl View<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.header.get(&format!("{}.{key}", self.name))
    }

    /// A number of a layer: one for all, or its own of an array.
    fn number(&self, key: &str, layer: usize) -> Option<u64> {
        let value = self.value(key)?;
        match value.as_array() {
            Some(all) => all.get(layer).and_then(Value::as_u64),
            None => value.as_u64(),
        }
    }

    /// As many layers as there are; those that guess ahead may be left out.
    fn layers(&self) -> Option<String> {
        let said = self.header.number("block_count")?;
        let ahead = self.header.number("nextn_predict_layers").unwrap_or(0);
        let last = self.header.tensors.iter().filter_map(|tensor| Some((layer(&tensor.name)? as u64, tensor)));
        let (last, tensor) = last.max_by_key(|(layer, _)| *layer)?;
        let wrong = last >= said || last + 1 < said.saturating_sub(ahead);
        let count = |layers: u64| if layers == 1 { "1 layer".to_owned() } else { format!("{layers} layers") };
        wrong.then(|| {
            format!(
                "{}.block_count is {said}, but its tensors are of {}: the last is {}",
                self.name,
                count(last + 1),
                tensor.name
            )
        })
    }

    /// The table of words: one row for each, as wide as the model.
    fn table(&self) -> Option<String> {
        let table = self.header.tensors.iter().find(|tensor| tensor.name == "token_embd.weight")?;
        let [rows, width] = table.shape[..] else { return None };
        let listed = self.header.get("tokenizer.ggml.tokens").and_then(Value::array_length);
        let words = match listed {
            Some(count) => ("the length of tokenizer.ggml.tokens".to_owned(), Some(count)),
            None => (format!("{}.vocab_size", self.name), self.header.number("vocab_size")),
        };
        let wide = (format!("{}.embedding_length", self.name), self.header.number("embedding_length"));
        [(wide, width), (words, rows)].into_iter().find_map(|((key, said), found)| {
            let said = said.filter(|said| *said != found)?;
            Some(format!("{key} is {said}, but {} is {}", table.name, shown(table)))
        })
    }

    /// A matrix of a layer.
    fn within(&self, tensor: &Tensor) -> Option<String> {
        let layer = layer(&tensor.name)?;
        let (_, part) = tensor.name.strip_prefix("blk.")?.split_once('.')?;
        let number = |key: &str| self.number(key, layer);
        let [first, last] = [tensor.shape.first(), tensor.shape.last()].map(|size| size.copied().unwrap_or(0));
        let wrong = |key: &str, said: u64, found: u64| {
            (said != found).then(|| format!("{}.{key} is {said}, but {} is {}", self.name, tensor.name, shown(tensor)))
        };
        match part {
            "ffn_down.weight" => {
                wrong("feed_forward_length", number("feed_forward_length").filter(|size| *size > 0)?, last)
            }
            "ffn_gate_exps.weight" | "ffn_up_exps.weight" | "ffn_down_exps.weight" => {
                let width = || wrong("expert_feed_forward_length", number("expert_feed_forward_length")?, last);
                let count = number("expert_count").and_then(|count| wrong("expert_count", count, first));
                count.or_else(|| if part == "ffn_down_exps.weight" { width() } else { None })
            }
            "attn_q.weight" | "attn_k.weight" | "attn_v.weight" => self.heads(tensor, layer, first, part),
            _ => None,
        }
    }

    /// As many heads as are said; a gate may stand beside queries, and windows have widths of their own. Latents have none.
    fn heads(&self, tensor: &Tensor, layer: usize, found: u64, part: &str) -> Option<String> {
        if self.value("attention.kv_lora_rank").is_some() {
            return None;
        }
        let number = |key: &str| self.number(key, layer).filter(|size| *size > 0);
        let queries = number("attention.head_count")?;
        let (key, width) = match part {
            "attn_q.weight" => ("attention.head_count", "attention.key_length"),
            "attn_k.weight" => ("attention.head_count_kv", "attention.key_length"),
            _ => ("attention.head_count_kv", "attention.value_length"),
        };
        let heads = number(key).unwrap_or(queries);
        let usual = number("embedding_length")?.checked_div(self.number("attention.head_count", 0)?);
        let (own, window) = (number(width).or(usual)?, number(&format!("{width}_swa")));
        let sides = [Some(own), window].into_iter().flatten().map(|side| side.saturating_mul(heads));
        let gated = part == "attn_q.weight";
        let fits = sides.into_iter().any(|side| side == found || (gated && side.saturating_mul(2) == found));
        (!fits).then(|| {
            let name = self.name;
            format!("{name}.{key} is {heads} and {name}.{width} {own}, but {} is {}", tensor.name, shown(tensor))
        })
    }
}

fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Sizes as llama.cpp writes them, the fastest first.
fn shown(tensor: &Tensor) -> String {
    let sizes: Vec<String> = tensor.shape.iter().rev().map(u64::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

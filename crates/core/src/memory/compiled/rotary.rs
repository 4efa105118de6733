//! Rotary positions in torch's smallest operations.

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use crate::dtype::DType;
use crate::model::op::Rotary;

/// Queries and keys, rotated; with a rest of each that does not turn, joined with it at once.
pub(super) fn rotary(g: &mut Graph, style: Rotary, inputs: &[Id]) -> Result<Vec<Option<Id>>, String> {
    let [query, key, cosine, sine, rest @ ..] = inputs else { return Err("a rotation without its tables".into()) };
    let open = |g: &mut Graph, table: Id| {
        let sizes = g.shape(table);
        g.view("unsqueeze", table, if sizes.rank() == 3 { sizes.inserted(1, 1) } else { sizes })
    };
    let (cosine, sine) = (open(g, *cosine), open(g, *sine));
    let mut turned = Vec::new();
    for (at, x) in [*query, *key].into_iter().enumerate() {
        let own = rotate(g, x, cosine, sine, style);
        turned.push(Some(match rest.get(at) {
            Some(rest) => {
                let (shape, dtype) = (g.shape(own), g.dtype(own));
                let whole = shape.with(-1, shape.last() + g.shape(*rest).last());
                let parts: Vec<Id> = [own, *rest].into_iter().filter(|part| g.shape(*part).elements() > 0).collect();
                g.with_rule(Kind::Join, &parts, whole, dtype, Rule::Join)
            }
            None => own,
        }));
    }
    Ok(turned)
}

/// `x * cos + cat(-x₂, x₁) * sin`; of neighbours as pairs `stack(-x₂, x₁)`, which is joined alike.
fn rotate(g: &mut Graph, x: Id, cosine: Id, sine: Id, style: Rotary) -> Id {
    let from = x;
    let x = if matches!(style, Rotary::HalfFp32 | Rotary::InterleavedFp32) { g.cast(x, DType::F32) } else { x };
    let straight = g.both("mul", x, cosine);
    let half = g.shape(x).with(-1, g.shape(x).last() / 2);
    let first = g.node(Kind::View("slice"), &[x], half, g.dtype(x));
    let second = g.node(Kind::View("slice further"), &[x], half, g.dtype(x));
    let negative = g.map("neg", second, g.dtype(x));
    let turned = g.node(Kind::Join, &[negative, first], g.shape(x), g.dtype(x));
    let crosswise = g.both("mul", turned, sine);
    let sum = g.both("add", straight, crosswise);
    g.rules[sum as usize] = Rule::Rotation { x, cosine, sine };
    match style {
        Rotary::Half | Rotary::Interleaved => sum,
        _ => g.cast(sum, g.dtype(from)),
    }
}

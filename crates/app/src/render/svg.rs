//! A timeline as SVG: stacked areas of weights, optimizer state, gradients and the rest, with the peak marked.

use std::fmt::Write;

use vramcast_core::report::{Report, Sample};

use super::gib;
use super::train::phase_name;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 50.0;
const PLOT_WIDTH: f64 = WIDTH - LEFT - 20.0;
const PLOT_HEIGHT: f64 = HEIGHT - TOP - 60.0;

/// A layer of the picture: name, colour, what it shows.
type Layer = (&'static str, &'static str, fn(&Sample) -> u64);

/// Layers from the bottom up.
const LAYERS: [Layer; 4] = [
    ("weights", "#4c78a8", |sample| sample.weights),
    ("optimizer state", "#72b7b2", |sample| sample.optimizer),
    ("gradients", "#eeca3b", |sample| sample.gradients),
    ("activations, logits, temporaries", "#e45756", |sample| {
        sample.bytes - sample.weights - sample.optimizer - sample.gradients
    }),
];

/// The picture; of what has no course over time, a serving engine, the bars of what it holds.
pub fn timeline(report: &Report) -> String {
    let bars = || super::report::page(report, &[]).svg();
    let still = report.timeline.is_empty().then(bars).flatten();
    still.unwrap_or_else(|| super::showing(report, || picture(report)))
}

fn picture(report: &Report) -> String {
    let samples = &report.timeline;
    let highest = samples.iter().map(|sample| sample.bytes).max().unwrap_or(0).max(1) as f64;
    let x = |index: usize| LEFT + PLOT_WIDTH * index as f64 / samples.len().saturating_sub(1).max(1) as f64;
    let y = |bytes: u64| TOP + PLOT_HEIGHT * (1.0 - bytes as f64 / highest);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let title = format!(
        "{}: peak {} GiB allocated ({})",
        report.model.name,
        gib(report.totals.allocated),
        phase_name(&report.peak_phase)
    );
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>", escape(&title));
    let mut below = vec![0u64; samples.len()];
    for (name, colour, pick) in LAYERS {
        let above: Vec<u64> = samples.iter().zip(&below).map(|(sample, low)| low + pick(sample)).collect();
        let top = above.iter().enumerate().map(|(i, bytes)| format!("{:.1},{:.1}", x(i), y(*bytes)));
        let bottom = below.iter().enumerate().rev().map(|(i, bytes)| format!("{:.1},{:.1}", x(i), y(*bytes)));
        let points = top.chain(bottom).collect::<Vec<_>>().join(" ");
        let _ = writeln!(svg, "<polygon points=\"{points}\" fill=\"{colour}\"><title>{name}</title></polygon>");
        below = above;
    }
    let mut last = "";
    for (index, sample) in samples.iter().enumerate().filter(|(_, sample)| sample.phase != "load") {
        if sample.phase != last {
            let at = x(index);
            let bottom = TOP + PLOT_HEIGHT;
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"#999\" stroke-dasharray=\"3 3\"/>"
            );
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{}\" fill=\"#555\">{}</text>",
                at + 3.0,
                bottom + 16.0,
                escape(&sample.phase)
            );
            last = &sample.phase;
        }
    }
    if let Some((index, sample)) = samples.iter().enumerate().max_by_key(|(_, sample)| sample.bytes) {
        let _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"none\" stroke=\"black\"/>",
            x(index),
            y(sample.bytes)
        );
    }
    for share in 0..=4u64 {
        let bytes = highest as u64 / 4 * share;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y(bytes) + 4.0,
            gib(bytes)
        );
    }
    for (index, (name, colour, _)) in LAYERS.iter().enumerate() {
        let at = LEFT + 170.0 * index as f64;
        let _ =
            writeln!(svg, "<rect x=\"{at}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>", HEIGHT - 18.0);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\">{name}</text>", at + 14.0, HEIGHT - 9.0);
    }
    svg + "</svg>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

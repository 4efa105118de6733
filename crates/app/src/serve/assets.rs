//! The files of the page, embedded. One table: a new file of `ui/` gets a row here.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;

/// A file.
#[derive(Clone)]
pub(crate) struct Asset {
    /// Its content.
    pub(crate) content: &'static [u8],
    /// The same under gzip.
    pub(crate) packed: &'static [u8],
    /// What its content is known by, in quotes.
    pub(crate) tag: String,
    /// Its media type.
    pub(crate) media_type: &'static str,
}

/// The page: addresses and files.
pub(crate) const PAGE: &[(&str, &[u8])] = &[
    ("/index.html", include_bytes!("../../ui/index.html")),
    ("/api.js", include_bytes!("../../ui/api.js")),
    ("/ask.js", include_bytes!("../../ui/ask.js")),
    ("/compare.js", include_bytes!("../../ui/compare.js")),
    ("/components.js", include_bytes!("../../ui/components.js")),
    ("/dom.js", include_bytes!("../../ui/dom.js")),
    ("/export.js", include_bytes!("../../ui/export.js")),
    ("/form.css", include_bytes!("../../ui/form.css")),
    ("/form.js", include_bytes!("../../ui/form.js")),
    ("/format.js", include_bytes!("../../ui/format.js")),
    ("/frontier.js", include_bytes!("../../ui/frontier.js")),
    ("/heat.js", include_bytes!("../../ui/heat.js")),
    ("/hub.js", include_bytes!("../../ui/hub.js")),
    ("/icon.svg", include_bytes!("../../ui/icon.svg")),
    ("/import.js", include_bytes!("../../ui/import.js")),
    ("/inside.js", include_bytes!("../../ui/inside.js")),
    ("/layout.css", include_bytes!("../../ui/layout.css")),
    ("/main.js", include_bytes!("../../ui/main.js")),
    ("/notice.js", include_bytes!("../../ui/notice.js")),
    ("/origin.js", include_bytes!("../../ui/origin.js")),
    ("/paths.js", include_bytes!("../../ui/paths.js")),
    ("/picker.js", include_bytes!("../../ui/picker.js")),
    ("/presets.js", include_bytes!("../../ui/presets.js")),
    ("/placement.js", include_bytes!("../../ui/placement.js")),
    ("/real.js", include_bytes!("../../ui/real.js")),
    ("/results.css", include_bytes!("../../ui/results.css")),
    ("/results.js", include_bytes!("../../ui/results.js")),
    ("/search.js", include_bytes!("../../ui/search.js")),
    ("/serving.js", include_bytes!("../../ui/serving.js")),
    ("/solve.js", include_bytes!("../../ui/solve.js")),
    ("/state.js", include_bytes!("../../ui/state.js")),
    ("/suggestions.js", include_bytes!("../../ui/suggestions.js")),
    ("/tables.js", include_bytes!("../../ui/tables.js")),
    ("/theme.js", include_bytes!("../../ui/theme.js")),
    ("/tokens.css", include_bytes!("../../ui/tokens.css")),
    ("/types.js", include_bytes!("../../ui/types.js")),
    ("/url.js", include_bytes!("../../ui/url.js")),
    ("/worker.js", include_bytes!("../../ui/worker.js")),
    ("/charts/axes.js", include_bytes!("../../ui/charts/axes.js")),
    ("/charts/bar.js", include_bytes!("../../ui/charts/bar.js")),
    ("/charts/stack.js", include_bytes!("../../ui/charts/stack.js")),
    ("/charts/timeline.js", include_bytes!("../../ui/charts/timeline.js")),
    ("/charts/treemap.js", include_bytes!("../../ui/charts/treemap.js")),
    ("/fields/field.js", include_bytes!("../../ui/fields/field.js")),
    ("/fields/index.js", include_bytes!("../../ui/fields/index.js")),
    ("/fields/settings.js", include_bytes!("../../ui/fields/settings.js")),
];

/// The readable page of the API.
const DOCS: &[(&str, &[u8])] = &[
    ("/docs/docs.html", include_bytes!("docs/docs.html")),
    ("/docs/docs.js", include_bytes!("docs/docs.js")),
    ("/docs/docs.css", include_bytes!("docs/docs.css")),
];

/// The file at an address.
pub(crate) fn find(path: &str) -> Option<Asset> {
    let path = match path {
        "/" => "/index.html",
        "/docs" | "/docs/" => "/docs/docs.html",
        other => other,
    };
    // Packed once: what is embedded does not change.
    static ALL: LazyLock<BTreeMap<&'static str, Asset>> =
        LazyLock::new(|| PAGE.iter().chain(DOCS).map(|(path, content)| (*path, asset(path, content))).collect());
    ALL.get(path).cloned()
}

fn asset(path: &str, content: &'static [u8]) -> Asset {
    let mut packer = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to memory does not fail.
    let packed = packer.write_all(content).and_then(|()| packer.finish()).unwrap_or_default();
    // FNV-1a: a checksum that is the same in every build, not a secret.
    let sum = content
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let tag = format!("\"{sum:016x}\"");
    Asset { content, packed: packed.leak(), tag, media_type: media_type(path) }
}

fn media_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, extension)| extension) {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("json") => "application/json",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every file of the page is served, under its own name.
    #[test]
    fn the_table_is_whole() {
        let ui = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("ui");
        let mut folders = vec![ui.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let address = format!("/{}", path.strip_prefix(&ui).unwrap().display());
                let asset = find(&address).unwrap_or_else(|| panic!("{address} has no row"));
                assert_eq!(asset.content, std::fs::read(&path).unwrap(), "{address}");
                assert_ne!(asset.media_type, "application/octet-stream", "{address}");
            }
        }
    }
}

//! A page: headings, tables, bars and verdicts, once, for every form of output.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};

use super::table::Table;
use super::{bar, gib, guessing, rounded, width};

/// How well something fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// With room to spare.
    Good,
    /// Just so.
    Tight,
    /// Not at all.
    Bad,
}

impl Level {
    /// By how full a card is, in percent: beyond 90 is tight.
    pub fn of(percent: f64) -> Self {
        match percent {
            p if p > 100.0 => Self::Bad,
            p if p > 90.0 => Self::Tight,
            _ => Self::Good,
        }
    }

    fn style(self) -> Style {
        let colour = match self {
            Self::Good => AnsiColor::Green,
            Self::Tight => AnsiColor::Yellow,
            Self::Bad => AnsiColor::Red,
        };
        Style::new().fg_color(Some(colour.into())).bold()
    }
}

/// A piece of a page.
#[derive(Debug)]
pub enum Block {
    /// A heading.
    Heading(String),
    /// A paragraph.
    Text(String),
    /// A table.
    Table(Table),
    /// Bytes by name, as bars.
    Bars(Vec<(String, u64)>),
    /// Bars that only show what a table says already.
    Picture(Vec<(String, u64)>),
    /// The answer.
    Verdict(Level, String),
    /// Something to know.
    Note(String),
}

/// A page.
#[derive(Debug, Default)]
pub struct Page {
    /// Its first line.
    pub title: String,
    /// What is on it.
    pub blocks: Vec<Block>,
    /// Whether its bars are those of a guess, whose numbers have no digits behind the point.
    guessed: bool,
}

impl Page {
    /// An empty page.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), ..Self::default() }
    }

    /// Adds a piece.
    pub fn add(&mut self, block: Block) {
        self.guessed |= guessing() && matches!(block, Block::Bars(_) | Block::Picture(_));
        self.blocks.push(block);
    }

    /// Adds a table under a heading.
    pub fn table(&mut self, heading: &str, table: Table) {
        self.add(Block::Heading(heading.into()));
        self.add(Block::Table(table));
    }

    /// For a terminal; colours are stripped where there is none.
    pub fn text(&self) -> String {
        rounded(self.guessed, || self.as_text())
    }

    fn as_text(&self) -> String {
        let bold = Style::new().bold();
        let mut page = format!("{bold}{}{bold:#}\n", self.title);
        for block in &self.blocks {
            page += &match block {
                Block::Heading(text) => format!("\n{bold}{text}{bold:#}\n"),
                Block::Text(text) => format!("{}\n", wrapped(text, width())),
                Block::Table(table) => marked(&table.fitted(width())),
                Block::Bars(bars) => bars_text(bars),
                Block::Picture(bars) => format!("\n{}", bars_text(bars)),
                Block::Verdict(level, text) => {
                    let style = level.style();
                    format!("\n{style}{text}{style:#}\n")
                }
                Block::Note(text) => format!("{}\n", wrapped(&format!("note: {text}"), width())),
            };
        }
        page
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        rounded(self.guessed, || self.as_markdown())
    }

    fn as_markdown(&self) -> String {
        let mut page = format!("# {}\n", self.title);
        for block in &self.blocks {
            page += &match block {
                Block::Heading(text) => format!("\n## {text}\n"),
                Block::Text(text) => format!("\n{text}\n"),
                Block::Table(table) => format!("\n{}", table.markdown()),
                Block::Bars(bars) => format!("\n{}", bars_table(bars).markdown()),
                Block::Picture(_) => String::new(),
                Block::Verdict(_, text) => format!("\n**{text}**\n"),
                Block::Note(text) => format!("\n> {text}\n"),
            };
        }
        page
    }

    /// The tables as comma-separated values, a blank line between them; words go into lines that start with `#`.
    pub fn csv(&self) -> String {
        rounded(self.guessed, || self.as_csv())
    }

    fn as_csv(&self) -> String {
        let mut page = format!("# {}\n", self.title);
        for block in &self.blocks {
            match block {
                Block::Table(table) => page += &csv_of(table),
                Block::Bars(bars) => page += &csv_of(&bars_table(bars)),
                Block::Picture(_) => {}
                Block::Heading(text) => page += &format!("\n# {text}\n"),
                Block::Text(text) | Block::Verdict(_, text) | Block::Note(text) => {
                    text.lines().for_each(|line| page += &format!("# {line}\n"));
                }
            }
        }
        page
    }

    /// One HTML file that needs nothing else.
    pub fn html(&self) -> String {
        rounded(self.guessed, || self.as_html())
    }

    fn as_html(&self) -> String {
        let mut body = format!("<h1>{}</h1>\n", escape(&self.title));
        for block in &self.blocks {
            body += &match block {
                Block::Heading(text) => format!("<h2>{}</h2>\n", escape(text)),
                Block::Text(text) => format!("<p>{}</p>\n", escape(text)),
                Block::Table(table) => html_of(table),
                Block::Bars(bars) | Block::Picture(bars) => html_bars(bars),
                Block::Verdict(level, text) => {
                    let class = format!("{level:?}").to_lowercase();
                    format!("<p class=\"verdict {class}\">{}</p>\n", escape(text))
                }
                Block::Note(text) => format!("<p class=\"note\">{}</p>\n", escape(text)),
            };
        }
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{}</title>\n<style>{STYLE}</style>\n{body}</html>\n",
            escape(&self.title)
        )
    }

    /// Its bars as a picture, where it has any.
    pub fn svg(&self) -> Option<String> {
        rounded(self.guessed, || self.as_svg())
    }

    fn as_svg(&self) -> Option<String> {
        let bars = self.blocks.iter().find_map(|block| match block {
            Block::Bars(bars) | Block::Picture(bars) => Some(bars),
            _ => None,
        })?;
        let most = bars.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(1);
        let height = 50 + 26 * bars.len();
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 {height}\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"12\" y=\"24\" font-size=\"15\">{}</text>\n",
            escape(&self.title)
        );
        for (index, (name, bytes)) in bars.iter().enumerate() {
            let top = 40 + 26 * index;
            let length = 340.0 * *bytes as f64 / most as f64;
            let _ = writeln!(
                svg,
                "<text x=\"12\" y=\"{}\">{}</text><rect x=\"270\" y=\"{top}\" width=\"{length:.1}\" height=\"18\" fill=\"#4c78a8\"/><text x=\"{:.1}\" y=\"{}\">{} GiB</text>",
                top + 14,
                escape(name),
                276.0 + length,
                top + 14,
                gib(*bytes)
            );
        }
        Some(svg + "</svg>\n")
    }
}

const STYLE: &str = "body{font:15px system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse;margin:1em 0}th,td{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}\
th:first-child,td:first-child{text-align:left}.verdict{font-weight:bold}.good{color:#176f2c}.tight{color:#8a5a00}\
.bad{color:#b3261e}.note{color:#555}.bar{background:#4c78a8;height:.9em;display:inline-block}";

/// A line broken at spaces.
pub fn wrapped(text: &str, width: usize) -> String {
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line += word;
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// Colours the signs of yes and no, after the columns are set.
fn marked(text: &str) -> String {
    let (yes, no) = (Level::Good.style(), Level::Bad.style());
    text.replace('✓', &format!("{yes}✓{yes:#}")).replace('✗', &format!("{no}✗{no:#}"))
}

fn bars_text(bars: &[(String, u64)]) -> String {
    let whole = bars.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let names = bars.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let room = width().saturating_sub(names + 14).clamp(8, 48);
    let line = |(name, bytes): &(String, u64)| {
        let pad = " ".repeat(names - name.chars().count());
        format!("{name}{pad}  {:>9}  {}\n", gib(*bytes), bar(*bytes, whole, room)).trim_end().to_owned() + "\n"
    };
    bars.iter().map(line).collect()
}

fn bars_table(bars: &[(String, u64)]) -> Table {
    let mut table = Table::new(&["what", "GiB", "bytes"]);
    for (name, bytes) in bars {
        table.row(vec![name.clone(), gib(*bytes), bytes.to_string()]);
    }
    table
}

fn csv_of(table: &Table) -> String {
    let cell = |cell: &String| {
        if cell.contains([',', '"', '\n']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.clone() }
    };
    let line = |cells: &[String]| cells.iter().map(cell).collect::<Vec<_>>().join(",") + "\n";
    line(table.headers()) + &table.rows().iter().map(|row| line(row)).collect::<String>()
}

fn html_of(table: &Table) -> String {
    let cells = |tag: &str, cells: &[String]| {
        let all: String = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        format!("<tr>{all}</tr>\n")
    };
    let rows: String = table.rows().iter().map(|row| cells("td", row)).collect();
    format!("<table>\n<thead>{}</thead>\n<tbody>\n{rows}</tbody>\n</table>\n", cells("th", table.headers()).trim_end())
}

fn html_bars(bars: &[(String, u64)]) -> String {
    let most = bars.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(1);
    let row = |(name, bytes): &(String, u64)| {
        let length = 20.0 * *bytes as f64 / most as f64;
        format!(
            "<tr><td>{}</td><td>{}</td><td style=\"text-align:left\"><span class=\"bar\" style=\"width:{length:.2}em\"></span></td></tr>\n",
            escape(name),
            gib(*bytes)
        )
    };
    let rows: String = bars.iter().map(row).collect();
    format!("<table>\n<thead><tr><th>what</th><th>GiB</th><th></th></tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n")
}

/// Text for XML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::new("a <b> & \"c\"");
        let mut table = Table::new(&["card", "fits"]);
        table.row(vec!["one, two".into(), "✓".into()]);
        page.table("cards", table);
        page.add(Block::Bars(vec![("weights".into(), 1 << 30), ("rest".into(), 1 << 29)]));
        page.add(Block::Verdict(Level::Good, "fits".into()));
        page
    }

    #[test]
    fn every_form_has_the_same_words() {
        let page = page();
        assert!(page.csv().contains("\"one, two\",✓\n") && page.csv().contains("weights,1.00,1073741824"));
        assert!(page.markdown().contains("| one, two | ✓ |") && page.markdown().contains("**fits**"));
        assert!(
            page.html().contains("a &lt;b&gt; &amp; &quot;c&quot;") && page.html().contains("class=\"verdict good\"")
        );
        assert!(page.svg().unwrap().contains("1.00 GiB"));
        assert!(Page::new("no bars").svg().is_none());
    }

    #[test]
    fn long_lines_are_broken() {
        assert_eq!(wrapped("one two three", 7), "one two\nthree");
        assert!(wrapped(&"word ".repeat(40), 80).lines().all(|line| line.chars().count() <= 80));
    }
}

//! Plain tables: columns by spaces, the first left, numbers right.

use std::fmt;

/// A table to be printed.
#[derive(Debug, Default)]
pub struct Table {
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub fn new(headers: &[&str]) -> Self {
        Self { headers: headers.iter().map(|h| (*h).to_owned()).collect(), rows: Vec::new() }
    }

    /// The table as Markdown.
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let marks: Vec<String> =
            (0..self.headers.len()).map(|column| if column == 0 { "---" } else { "--:" }.into()).collect();
        line(&self.headers) + &line(&marks) + &self.rows.iter().map(|row| line(row)).collect::<String>()
    }

    /// The column names.
    pub fn headers(&self) -> &[String] {
        &self.headers
    }

    /// The rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// The table in so many columns: words of wide columns go on on further lines, and a word that is too long for its
    /// column goes on after a sign in it.
    pub fn fitted(&self, width: usize) -> String {
        const LEAST: usize = 10;
        let lengths = |column: usize| {
            let cells = self.rows.iter().filter_map(move |row| row.get(column)).chain(self.headers.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..self.headers.len()).map(lengths).collect();
        while widths.iter().map(|width| width + 2).sum::<usize>() > width + 2 {
            match widths.iter_mut().max() {
                Some(widest) if *widest > LEAST => *widest -= 1,
                _ => break,
            }
        }
        let broken = |cells: &[String]| -> Vec<Vec<String>> {
            let lines: Vec<Vec<String>> = cells
                .iter()
                .zip(&widths)
                .map(|(cell, width)| {
                    super::page::wrapped(cell, *width).lines().flat_map(|line| pieces(line, *width)).collect()
                })
                .collect();
            let most = lines.iter().map(Vec::len).max().unwrap_or(0).max(1);
            let line = |at: usize| lines.iter().map(|cell| cell.get(at).cloned().unwrap_or_default()).collect();
            (0..most).map(line).collect()
        };
        let rows = self.rows.iter().flat_map(|row| broken(row)).collect();
        Self { headers: self.headers.clone(), rows }.plain()
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

/// A line in pieces that fit, each ending in a sign where there is one.
fn pieces(line: &str, width: usize) -> Vec<String> {
    let mut rest: Vec<char> = line.chars().collect();
    let mut pieces = Vec::new();
    while rest.len() > width.max(1) {
        let sign = rest[..width].iter().rposition(|c| "/._,=-:".contains(*c)).filter(|at| *at + 1 > width / 2);
        let tail = rest.split_off(sign.map_or(width, |at| at + 1));
        pieces.push(rest.into_iter().collect());
        rest = tail;
    }
    pieces.push(rest.into_iter().collect());
    pieces
}

fn is_number(cell: &str) -> bool {
    let cell = cell.trim_start_matches('~').trim_end_matches(['%', ' ']);
    cell.is_empty()
        || cell.starts_with(|c: char| c.is_ascii_digit() || c == '+' || c == '-')
            && cell.chars().all(|c| c.is_ascii_digit() || "+-.,/".contains(c))
}

impl fmt::Display for Table {
    /// In the columns there are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.fitted(super::width()))
    }
}

impl Table {
    /// As wide as its cells.
    fn plain(&self) -> String {
        let mut page = String::new();
        let columns = self.headers.len();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).chain(self.headers.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let right: Vec<bool> = (0..columns)
            .map(|column| {
                column > 0
                    && !self.rows.is_empty()
                    && self.rows.iter().all(|row| row.get(column).is_none_or(|c| is_number(c)))
            })
            .collect();
        let mut line = |cells: &[String]| {
            let mut text = String::new();
            for (column, cell) in cells.iter().enumerate().take(columns) {
                let pad = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
                if right[column] {
                    text += &format!("{pad}{cell}  ");
                } else {
                    text += &format!("{cell}{pad}  ");
                }
            }
            page += text.trim_end();
            page.push('\n');
        };
        line(&self.headers);
        line(&widths.iter().map(|width| "─".repeat(*width)).collect::<Vec<_>>());
        self.rows.iter().for_each(|row| line(row));
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_tables_are_fitted() {
        let mut table = Table::new(&["name", "says"]);
        table.row(vec!["one".into(), "many words that do not fit on one line of the table".into()]);
        table.row(vec!["two".into(), "few".into()]);
        let text = table.fitted(30);
        assert!(text.lines().all(|line| line.chars().count() <= 30), "{text}");
        assert!(text.contains("many words that do not") && text.contains("one line"));
        assert_eq!(table.fitted(200), table.plain());
        table.row(vec!["three".into(), "model.layers.*.self_attn.q_proj.weight".into()]);
        let text = table.fitted(30);
        assert!(text.lines().all(|line| line.chars().count() <= 30), "{text}");
        assert!(text.contains("model.layers.*.self_\n"), "{text}");
    }
}

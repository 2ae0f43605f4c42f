//! Pages of the guide out of the headers' declarations and doc comments, so that neither can go stale alone.

use crate::Output;
use std::fmt::Write as _;
use std::path::Path;

struct Page {
    file: &'static str,
    title: &'static str,
    about: &'static str,
    /// Below include/.
    headers: &'static [&'static str],
}

const PAGES: &[Page] = &[
    Page {
        file: "ep.md",
        title: "ep.h, the register_layer ABI",
        about: "The functions of `libnvte_ep.so`. Every function throws `std::runtime_error` on an error; \
                [nvte_ep_status.h](status.md) has twins that return a status. T is the number of this rank's tokens in the step, H the \
                hidden size, K the top-k, C `max_recv_tokens_per_rank`.",
        headers: &["nvte_ep/transformer_engine/ep.h", "nvte_ep/transformer_engine/comm_window.h"],
    },
    Page {
        file: "ep_te.md",
        title: "ep.h, TransformerEngine's ABI",
        about: "The functions of `libtransformer_engine.so` and `libnvte_ep_preload.so`, as programs compiled against TransformerEngine \
                2.19 or later call them. Letters and errors as in [the register_layer ABI](ep.md).",
        headers: &["nvte_ep/te/transformer_engine/ep.h", "nvte_ep/te/transformer_engine/comm_window.h"],
    },
    Page {
        file: "ext.md",
        title: "nvte_ep_ext.h, our additions",
        about: "Options, totals, a memory report and symmetric memory, for every ABI.",
        headers: &["nvte_ep/nvte_ep_ext.h"],
    },
    Page {
        file: "status.md",
        title: "nvte_ep_status.h, status codes",
        about: "Every function again as `nvte_ep_try_...`: it returns a status, never throws, and writes what the function returns to \
                its last argument, `result`. For callers that take no exceptions: C, ctypes, `-fno-exceptions`.",
        headers: &["nvte_ep/nvte_ep_status.h"],
    },
    Page {
        file: "hpp.md",
        title: "nvte_ep.hpp, C++17",
        about: "Classes that own things and arguments with names, over the functions of either ABI. Bodies and private members are left \
                out here.",
        headers: &["nvte_ep/nvte_ep.hpp"],
    },
    Page {
        file: "tensor.md",
        title: "transformer_engine.h, tensors",
        about: "`NVTETensor` describes memory of the caller: pointer, type, shape. As in TransformerEngine; the C++ classes \
                `TensorWrapper` and others are in `wrappers.h` beside it.",
        headers: &["nvte_ep/transformer_engine/transformer_engine.h"],
    },
    Page {
        file: "host.md",
        title: "nvte_ep_host.h, the host runtime's own functions",
        about: "What [the host runtime](../host_runtime.md) adds to the interfaces that it stands in for.",
        headers: &["nvte_ep_host/nvte_ep_host.h"],
    },
];

/// The pages; `headers` are those that were generated just now, others are read.
pub fn generate(root: &Path, headers: &[Output]) -> Result<Vec<Output>, String> {
    PAGES
        .iter()
        .map(|page| {
            let mut text = format!(
                "<!-- Generated from the headers by `cargo run -p nvte-ep-codegen -- headers`. -->\n# {}\n\n{}\n",
                page.title, page.about
            );
            let mut twins = Vec::new();
            for header in page.headers {
                let path = Path::new("include").join(header);
                let source = match headers.iter().find(|output| output.path == path) {
                    Some(output) => output.text.clone(),
                    None => {
                        std::fs::read_to_string(root.join(&path)).map_err(|e| format!("{}: {e}", path.display()))?
                    }
                };
                for item in items(&source) {
                    match item.doc.first().and_then(|line| line.strip_suffix(", returning a status.")) {
                        Some(name) => twins.push((name.to_owned(), item.name())),
                        None => render(&item, header.ends_with(".hpp"), &mut text),
                    }
                }
            }
            if !twins.is_empty() {
                text.push_str("\n## The twins\n\n| function | with a status |\n|---|---|\n");
                for (name, twin) in twins {
                    let _ = writeln!(text, "| `{name}` | `{twin}` |");
                }
            }
            Ok(Output { path: Path::new("docs/reference").join(page.file), text })
        })
        .collect()
}

/// A declaration with its doc comment.
struct Item {
    doc: Vec<String>,
    code: Vec<String>,
}

/// The documented declarations at the left margin of a header, and its structures.
fn items(source: &str) -> Vec<Item> {
    let mut lines = source.lines().peekable();
    let mut items = Vec::new();
    while let Some(line) = lines.peek() {
        let mut comment = Vec::new();
        if line.starts_with("/**") {
            while !comment.last().is_some_and(|line: &String| line.ends_with("*/")) {
                comment.push(lines.next().expect("a comment ends").to_owned());
            }
        } else if !(line.starts_with("struct ") && line.ends_with('{') && !line.contains('<')) {
            // One of several structures below one comment goes on.
            lines.next();
            continue;
        }
        let mut code: Vec<String> = Vec::new();
        for line in lines.by_ref() {
            code.push(line.to_owned());
            let is_directive = code[0].starts_with('#');
            let depth: i32 = code.iter().map(|line| braces(line)).sum();
            if is_directive && !line.ends_with('\\') || !is_directive && depth == 0 && line.ends_with([';', '}']) {
                break;
            }
        }
        items.push(Item { doc: plain(&comment), code });
    }
    items
}

fn braces(line: &str) -> i32 {
    line.chars().map(|c| i32::from(c == '{') - i32::from(c == '}')).sum()
}

/// The text of a comment, without its marks.
fn plain(comment: &[String]) -> Vec<String> {
    let text = comment.join("\n");
    let text = text.trim().trim_start_matches("/**").trim_end_matches("*/");
    let lines = text.lines().map(|line| {
        let line = line.trim();
        line.strip_prefix("* ").or_else(|| line.strip_prefix('*')).unwrap_or(line).trim_end().to_owned()
    });
    let mut lines: Vec<String> = lines.skip_while(String::is_empty).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

impl Item {
    /// What is declared.
    fn name(&self) -> String {
        let code = self.code.iter().find(|line| !line.starts_with("template")).map_or("", String::as_str);
        let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        if code.starts_with("typedef") && code.ends_with(';') && !code.contains('(') {
            return word(code.trim_end_matches(';').rsplit([' ', '*']).next().unwrap_or_default());
        }
        for keyword in ["#define ", "struct ", "class ", "enum ", "typedef struct ", "typedef enum ", "using "] {
            if let Some(rest) = code.strip_prefix(keyword) {
                // A function that returns an enum is no enum.
                if !code.contains('(') || keyword == "#define " {
                    return word(rest);
                }
            }
        }
        if code.contains('(') {
            let before = code.split('(').next().unwrap_or_default();
            return before.rsplit([' ', '*']).next().unwrap_or_default().to_owned();
        }
        word(code.trim_end_matches(';').rsplit([' ', '*']).next().unwrap_or_default())
    }
}

fn render(item: &Item, is_cpp: bool, text: &mut String) {
    let code = item.code.join("\n");
    if code.starts_with("#ifdef") {
        return;
    }
    if let (Some(constant), [_]) = (code.strip_prefix("#define "), item.code.as_slice()) {
        let in_list = text.lines().last().is_some_and(|line| line.starts_with(['*', ' ']));
        let _ = writeln!(
            text,
            "{}* `{constant}`: {}",
            if in_list { "" } else { "\n## Constants\n\n" },
            escaped(&item.doc.join("\n  "))
        );
        return;
    }
    let _ = write!(text, "\n## {}\n\n", item.name());
    if is_cpp {
        let about = prose(&item.doc, "");
        let _ = write!(text, "{about}{}```cpp\n{}\n```\n", if about.is_empty() { "" } else { "\n" }, outline(&code));
    } else if code.contains('{') && !code.starts_with('#') {
        text.push_str(&prose(&item.doc, ""));
        text.push('\n');
        members(&item.code, text);
    } else {
        let _ = write!(text, "```c\n{code}\n```\n\n{}", prose(&item.doc, &code));
    }
}

/// The fields of a structure, or the constants of an enum, as a list.
fn members(code: &[String], text: &mut String) {
    let mut lines = code.iter();
    while let Some(line) = lines.next() {
        let line = line.trim();
        if !line.starts_with("/**") {
            continue;
        }
        let mut comment = vec![line.to_owned()];
        while !comment.last().expect("it has a line").trim_end().ends_with("*/") {
            comment.push(lines.next().expect("a comment ends").clone());
        }
        let member = lines.next().map_or("", |line| line.trim().trim_end_matches([';', ',']));
        let _ = writeln!(text, "* `{member}`: {}", escaped(&plain(&comment).join("\n  ")));
    }
}

fn escaped(text: &str) -> String {
    text.replace('<', "\\<")
}

/// Paragraphs; lines that explain an argument of `code`, or an option's key, as a list.
fn prose(doc: &[String], code: &str) -> String {
    let words: Vec<&str> = code.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    let mut text = String::new();
    let mut in_list = false;
    for line in doc {
        let names = line.split_once(": ").map(|(names, _)| names).or_else(|| line.strip_suffix(':'));
        let explains = names.filter(|names| {
            names
                .split(", ")
                .all(|name| name.starts_with('"') && name.ends_with('"') || words.contains(&name) || name == "..._win")
        });
        let begins = ["Throws", "The caller must ensure:"].iter().any(|start| line.starts_with(start));
        match explains {
            Some(names) if !code.is_empty() => {
                let rest = escaped(line[names.len() + 1..].trim_start());
                let names: Vec<String> = names.split(", ").map(|name| format!("`{name}`")).collect();
                if !in_list && !text.is_empty() && !text.ends_with("\n\n") {
                    text.push('\n');
                }
                let _ = writeln!(text, "* {}: {rest}", names.join(", "));
                in_list = true;
            }
            _ => {
                if begins && !text.is_empty() && !text.ends_with("\n\n") {
                    text.push('\n');
                }
                in_list &= !begins && !line.is_empty();
                let line = escaped(line);
                let line = if line.ends_with("must ensure:") { format!("*{line}*") } else { line };
                let _ = writeln!(text, "{}{line}", if in_list { "  " } else { "" });
            }
        }
    }
    text
}

/// A class without the bodies of its functions and without what is private.
fn outline(code: &str) -> String {
    let code = code.split("\n private:\n").next().unwrap_or_default().trim_end();
    let Some((head, body)) = code.split_once("{\n") else { return code.to_owned() };
    let mut out = format!("{head}{{\n");
    let mut statement = String::new();
    let (mut round, mut curly, mut in_comment) = (0, 0, false);
    for line in body.trim_end_matches("};").lines() {
        let start = line.trim_start();
        in_comment |= start.starts_with("/**");
        if in_comment || start.starts_with('#') {
            // Those of a body go with it; a label of access comes first.
            if curly == 0 {
                out.push_str(statement.trim_start_matches('\n'));
                statement.clear();
                let _ = writeln!(out, "{line}");
            }
            in_comment &= !line.ends_with("*/");
            continue;
        }
        let line = line.split("  // NOLINT").next().unwrap_or_default().trim_end();
        for c in format!("{line}\n").chars() {
            match c {
                '(' if curly == 0 => round += 1,
                ')' if curly == 0 => round -= 1,
                '{' if round == 0 => curly += 1,
                _ => {}
            }
            // A body: what has braces and parameters and is no initial value.
            let is_body = curly > 0 && statement.contains('(') && !statement.trim_end().ends_with('=');
            if !is_body {
                statement.push(c);
            }
            if c == '}' && round == 0 && curly > 0 {
                curly -= 1;
                if curly == 0 && is_body {
                    let _ = writeln!(out, "{};", without_initialisers(&statement));
                    statement.clear();
                }
            }
            if c == ';' && curly == 0 && round == 0 {
                let _ = writeln!(out, "{}", statement.trim_matches('\n').trim_end());
                statement.clear();
            }
        }
    }
    out + "};"
}

/// A constructor up to its parameters' end; other functions as they are.
fn without_initialisers(statement: &str) -> String {
    let statement = statement.trim_matches('\n').trim_end();
    let mut depth = 0;
    for (i, c) in statement.char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if c == ')' && depth == 0 {
            let after = &statement[i + 1..];
            return match after.trim_start().starts_with(':') || after.contains(" : ") {
                true => format!("{}{}", &statement[..=i], after.split(':').next().unwrap_or_default().trim_end()),
                false => statement.to_owned(),
            };
        }
    }
    statement.to_owned()
}

//! docs/errors.md lists every text that a caller's exception may hold; this compares it with the code.

use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::Visit;

/// Macros and methods whose texts reach no caller.
const SILENT_MACROS: [&str; 18] = [
    "trace",
    "debug",
    "info",
    "warn",
    "error",
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "panic",
    "unreachable",
    "compile_error",
    "concat",
    "stringify",
    "println",
    "eprintln",
    "cfg",
    "env",
];
const SILENT_METHODS: [&str; 2] = ["expect", "expect_err"];

/// Collects the texts of one file: string literals of several words, wherever they stand in code that is no test. Whoever
/// builds a text in a new way is found all the same.
struct Texts<'a> {
    file: &'a str,
    function: String,
    found: &'a mut BTreeMap<String, String>,
    words: &'a mut BTreeSet<String>,
}

impl Texts<'_> {
    fn add(&mut self, text: &str) {
        let text = normal(text);
        if text.split_whitespace().filter(|word| word.chars().any(char::is_alphabetic)).nth(1).is_some() {
            self.found.entry(text).or_insert_with(|| format!("{} in {}", self.function, self.file));
        } else {
            self.words.extend(words_of(&text).map(str::to_owned));
        }
    }

    fn tokens(&mut self, tokens: TokenStream) {
        let mut after_hash = false;
        for token in tokens {
            let attribute =
                std::mem::replace(&mut after_hash, matches!(&token, TokenTree::Punct(p) if p.as_char() == '#'));
            match token {
                TokenTree::Group(_) if attribute => {}
                TokenTree::Literal(literal) => {
                    if let Ok(text) = syn::parse_str::<syn::LitStr>(&literal.to_string()) {
                        self.add(&text.value());
                    }
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let tokens = match &attribute.meta {
            syn::Meta::List(list) if list.path.is_ident("cfg") => list.tokens.to_string(),
            _ => return false,
        };
        tokens == "test"
    })
}

impl<'ast> Visit<'ast> for Texts<'_> {
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.function = format!("const {}", item.ident);
        // Documentation of the environment, which another test compares; of it only the names.
        let of_variable = matches!(&*item.ty, syn::Type::Path(path) if path.path.is_ident("Variable"));
        let texts = of_variable.then(|| self.found.clone());
        syn::visit::visit_item_const(self, item);
        if let Some(texts) = texts {
            *self.found = texts;
        }
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.function = format!("const {}", item.ident);
        syn::visit::visit_impl_item_const(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            self.function = format!("fn {}", item.sig.ident);
            syn::visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            self.function = format!("fn {}", item.sig.ident);
            syn::visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.visit_expr(&call.receiver);
        if !SILENT_METHODS.iter().any(|name| call.method == name) {
            call.args.iter().for_each(|argument| self.visit_expr(argument));
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let name = call.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        if !SILENT_MACROS.contains(&name.as_str()) {
            self.tokens(call.tokens.clone());
        }
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        self.add(&text.value());
    }
}

/// A text with every placeholder as `{}` and single blanks.
fn normal(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(start) = rest.find('{') {
        out.push_str(&rest[..start]);
        let end = rest[start..].find('}').map_or(rest.len(), |end| start + end + 1);
        out.push_str("{}");
        rest = &rest[end..];
    }
    out.push_str(rest);
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            // Tests of the surfaces have folders of their own.
            if path.file_name().is_some_and(|name| name != "tests") {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && !path.ends_with("tests.rs")
            // What `nvte-ep doctor` prints; nothing of it is thrown.
            && !path.ends_with("preflight/report.rs")
        {
            found.push(path);
        }
    }
}

/// Texts that reach no exception, in the ways that the collector cannot tell.
const NO_ERRORS: [&str; 12] = [
    "#define NCCL_VERSION_CODE",
    "nvte-ep stamp 1",
    // Hashed, to compare what ranks did.
    "give back",
    "register_layer ABI",
    "TransformerEngine >= 2.19 ABI",
    "TransformerEngine >= 2.19 ABI, preload",
    // Of the log itself.
    "nvte_ep: {} {}; {} is read as {}",
    "takes off, error, warn, info, debug or trace",
    "takes text, keyvalue or json",
    "({} more of this kind since the last one)",
    // Warnings only.
    "GIN goes through a thread of the processor (type 2, proxy), which is slower than GDAKI (type 3); NCCL_DEBUG=INFO says why NCCL chose it",
    "NCCL_IB_TC, the traffic class of the network, is {} on rank {} and {} on rank 0: only one of them can be the lossless class of a RoCE network",
];

/// Every text of the library's code, and where it is; and all single words.
fn texts_of_the_code() -> (BTreeMap<String, String>, BTreeSet<String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    sources(&root.join("abi"), &mut files);
    sources(&root.join("rust/src"), &mut files);
    let (mut found, mut words) = (BTreeMap::new(), BTreeSet::new());
    for path in files {
        let file = path.strip_prefix(root).unwrap().to_str().unwrap();
        let parsed = syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap();
        Texts { file, function: String::new(), found: &mut found, words: &mut words }.visit_file(&parsed);
    }
    found.retain(|text, _| !NO_ERRORS.contains(&text.as_str()));
    (found, words)
}

/// One entry of the document: its texts, and what is said about them.
struct Entry {
    texts: Vec<String>,
    meaning: String,
}

/// An entry is an item of a list: texts in backticks, an empty line, the meaning.
fn entries(document: &str) -> Vec<Entry> {
    let document = document.split_once("\n## ").expect("the document has sections").1;
    let mut all: Vec<Entry> = Vec::new();
    for section in document.split("\n## ") {
        for item in section.split("\n* ").skip(1) {
            let (head, meaning) = item.split_once("\n\n").unwrap_or((item, ""));
            let texts = head.split('`').skip(1).step_by(2).map(normal).collect();
            all.push(Entry { texts, meaning: meaning.trim().to_owned() });
        }
    }
    all
}

/// The letters of `text` that are of no text of the code.
fn left_over(text: &str, code: &BTreeMap<String, String>, words: &BTreeSet<String>) -> Vec<String> {
    let mut texts: Vec<&String> = code.keys().collect();
    texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
    let rest = texts.into_iter().fold(text.to_owned(), |rest, found| rest.replace(found.as_str(), "\0"));
    words_of(&rest).filter(|word| !words.contains(*word)).map(str::to_owned).collect()
}

fn words_of(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| word.chars().any(char::is_alphabetic))
}

#[test]
fn every_error_is_documented_and_nothing_else_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/errors.md");
    let (code, words) = texts_of_the_code();
    assert!(code.len() > 200, "the sources were not found");
    let entries = entries(&std::fs::read_to_string(path).unwrap());
    let documented: Vec<&String> = entries.iter().flat_map(|entry| &entry.texts).collect();

    let missing: Vec<String> = code
        .iter()
        .filter(|(text, _)| !documented.iter().any(|known| known.contains(text.as_str())))
        .map(|(text, place)| format!("* `{text}`\n\n  WHAT IT MEANS AND WHAT TO CHANGE.   (of {place})\n"))
        .collect();
    let superfluous: Vec<String> = documented
        .iter()
        .map(|text| (text, left_over(text, &code, &words)))
        .filter(|(_, left)| !left.is_empty())
        .map(|(text, left)| format!("* `{text}`   (not in the code: {})\n", left.join(" ")))
        .collect();
    let unexplained: Vec<String> = entries
        .iter()
        .filter(|entry| entry.texts.is_empty() || entry.meaning.split_whitespace().count() < 3)
        .map(|entry| format!("* `{}`\n", entry.texts.join("`, `")))
        .collect();
    assert!(
        missing.is_empty() && superfluous.is_empty() && unexplained.is_empty(),
        "docs/errors.md is not the code's.\n\nAdd these in their sections, several parts of one text as one entry \
         (`ARGUMENT RULE, got {{}}; REMEDY`), parts that are filled in behind `with`:\n\n{}\nChange or remove these:\n\n{}\n\
         Say what these mean:\n\n{}",
        missing.join("\n"),
        superfluous.join(""),
        unexplained.join("")
    );
}

/// By its number a user finds an entry; behind it stands a part of the text as the user sees it.
#[test]
fn every_entry_has_a_number_and_begins_with_its_text() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/errors.md");
    let document = std::fs::read_to_string(path).unwrap();
    let mut numbers = BTreeSet::new();
    for item in document.split("\n* ").skip(1) {
        let item = item.split_whitespace().collect::<Vec<_>>().join(" ");
        let (anchor, rest) = item.split_once("**").unwrap_or_else(|| panic!("an entry without a number: {item}"));
        let (number, rest) = rest.split_once("** ").unwrap();
        assert_eq!(anchor, format!("<a id=\"{number}\"></a>"), "{item}");
        let digits = number.strip_prefix("NVTE-EP-").unwrap_or_else(|| panic!("{number} is no number"));
        assert!(digits.len() == 3 && numbers.insert(digits.parse::<u32>().unwrap()), "{number} is there twice");
        let (start, text) = rest.split_once(": `").unwrap_or_else(|| panic!("no text follows {number}"));
        assert!(text.contains(start), "{number} does not begin with a part of its text: {start}");
    }
    assert!(numbers.len() > 190);
}

#[test]
fn the_collector_sees_texts_however_they_are_built() {
    let code = r#"
        const RULE: &str = "must be a constant";
        /// Not this text.
        #[allow(dead_code, reason = "not this text")]
        fn f(n: u32) -> Result<()> {
            tracing::warn!("not this text: {n}");
            let required = format!("must be at most {n:#x} with this");
            let other = || refuse("of a closure", vec!["in a macro"]);
            g().expect("not this text");
            Err(Error::argument("x", required, 1).with_remedy(if n > 0 { "one way" } else { "another way" }))
        }
        #[cfg(test)]
        mod tests { const T: &str = "not this text"; }
    "#;
    let (mut found, mut words) = (BTreeMap::new(), BTreeSet::new());
    Texts { file: "f.rs", function: String::new(), found: &mut found, words: &mut words }
        .visit_file(&syn::parse_file(code).unwrap());
    let texts: Vec<&str> = found.keys().map(String::as_str).collect();
    let expected =
        ["another way", "in a macro", "must be a constant", "must be at most {} with this", "of a closure", "one way"];
    assert_eq!(texts, expected);
    assert_eq!(found["one way"], "fn f in f.rs");

    let entry = "{} must be at most {} with this, got {}; one way";
    assert_eq!(left_over(entry, &found, &BTreeSet::from(["got".into()])), [""; 0]);
    assert_eq!(left_over("must be a constant number", &found, &BTreeSet::new()), ["number"]);
}

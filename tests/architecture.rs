//! The arrows between the files of a crate: no circle, none upward, and no file of product code that is too long.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::Visit;

/// Lines of product code that a file may have, tests not counted.
const MOST_LINES: usize = 600;

/// Layers from the top down: a module may use those of its own line and of later lines, not of earlier ones.
type Layers = &'static [&'static [&'static str]];

/// The crates whose files are looked at.
const CRATES: [(&str, Layers); 2] = [("src", CORE), ("host/src", HOST)];

const CORE: Layers = &[
    &["ffi"],
    &["backend"],
    &["preflight"],
    &[
        "ops",
        "memory",
        "symm_pool",
        "progress",
        "reserve",
        "wait",
        "sys",
        "env",
        "log",
        "options",
        "config",
        "limits",
        "tensor",
    ],
    &["dtype", "error", "atomic"],
];

const HOST: Layers = &[
    &["surface"],
    &["ep"],
    &["collectives", "comm", "windows", "batch", "line"],
    &["copy", "kernels", "native", "stream", "event"],
    &["graph"],
    &["queue", "order", "channel"],
    &["device", "tensor_check", "memory", "dtype"],
    &["check", "inject", "errors", "stats"],
    &["acting", "caller", "fault", "rule", "settings", "domains", "float", "machine", "sys"],
];

/// Arrows that may close a circle: the two halves of one boundary, with exceptions and with statuses.
const ALLOWED: [(&str, &str); 1] = [("ffi::guard", "ffi::status")];

/// Files of a crate by their module path, such as `backend::engine`.
fn modules(folder: &Path, path: &[String], found: &mut BTreeMap<Vec<String>, PathBuf>) {
    for entry in folder.read_dir().unwrap() {
        let file = entry.unwrap().path();
        let stem = file.file_stem().unwrap().to_str().unwrap().to_owned();
        if file.is_dir() {
            modules(&file, &[path, &[stem]].concat(), found);
        } else if file.extension().is_some_and(|extension| extension == "rs") && !stem.ends_with("tests") {
            let own = if matches!(stem.as_str(), "mod" | "lib") { path.to_vec() } else { [path, &[stem]].concat() };
            found.insert(own, file);
        }
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        _ => false,
    })
}

/// The paths that a file names, resolved against the module that it is.
struct Uses<'a> {
    own: &'a [String],
    modules: &'a BTreeMap<Vec<String>, PathBuf>,
    /// What names stand for: imported ones.
    found: BTreeSet<Vec<String>>,
}

impl Uses<'_> {
    fn add(&mut self, segments: &[String]) {
        let mut base = match segments.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("super") => self.own[..self.own.len().saturating_sub(1)].to_vec(),
            Some("self") => self.own.to_vec(),
            // A module that this one declares.
            Some(name) if self.modules.contains_key(&[self.own, &[name.to_owned()]].concat()) => {
                [self.own, &[name.to_owned()]].concat()
            }
            _ => return,
        };
        for segment in &segments[1..] {
            if segment == "super" {
                base.pop();
                continue;
            }
            base.push(segment.clone());
        }
        // The longest part that is a file; the rest is an item in it.
        while !self.modules.contains_key(&base) && base.pop().is_some() {}
        // A folder's file may know its parts.
        if !base.starts_with(self.own) && !base.is_empty() {
            self.found.insert(base);
        }
    }

    fn tree(&mut self, prefix: &[String], tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => self.tree(&[prefix, &[path.ident.to_string()]].concat(), &path.tree),
            syn::UseTree::Name(name) if name.ident == "self" => self.add(prefix),
            syn::UseTree::Name(name) => self.add(&[prefix, &[name.ident.to_string()]].concat()),
            syn::UseTree::Rename(name) => self.add(&[prefix, &[name.ident.to_string()]].concat()),
            syn::UseTree::Glob(_) => self.add(prefix),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(prefix, tree)),
        }
    }
}

impl<'ast> Visit<'ast> for Uses<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // What a folder's file exports of its parts is no use of them.
        if !is_test(&item.attrs) {
            self.tree(&[], &item.tree);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_impl(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if segments.len() > 1 {
            self.add(&segments);
        }
        syn::visit::visit_path(self, path);
    }
}

type Graph = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

fn graph(root: &Path) -> (BTreeMap<Vec<String>, PathBuf>, Graph) {
    let mut files = BTreeMap::new();
    modules(root, &[], &mut files);
    let uses = |(own, file): (&Vec<String>, &PathBuf)| {
        let source = syn::parse_file(&std::fs::read_to_string(file).unwrap()).unwrap();
        let mut uses = Uses { own, modules: &files, found: BTreeSet::new() };
        uses.visit_file(&source);
        uses.found.retain(|used| !ALLOWED.contains(&(&text(own), &text(used))));
        (own.clone(), uses.found)
    };
    let graph = files.iter().map(uses).collect();
    (files, graph)
}

fn text(module: &[String]) -> String {
    if module.is_empty() { "lib".into() } else { module.join("::") }
}

/// A circle, if there is one, as what is on it.
fn circle(graph: &Graph) -> Option<Vec<String>> {
    fn search<'a>(
        at: &'a [String],
        graph: &'a Graph,
        path: &mut Vec<&'a [String]>,
        done: &mut BTreeSet<&'a [String]>,
    ) -> bool {
        if done.contains(at) {
            return false;
        }
        if let Some(start) = path.iter().position(|module| *module == at) {
            path.drain(..start);
            return true;
        }
        path.push(at);
        for next in &graph[at] {
            if search(next, graph, path, done) {
                return true;
            }
        }
        path.pop();
        done.insert(at);
        false
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|start| {
        let mut path = Vec::new();
        search(start, graph, &mut path, &mut done).then(|| path.iter().map(|module| text(module)).collect())
    })
}

fn root(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)
}

#[test]
fn no_circle_between_files() {
    for (folder, _) in CRATES {
        let (_, graph) = graph(&root(folder));
        assert!(graph.values().map(BTreeSet::len).sum::<usize>() > 100, "{folder}: the arrows are found");
        assert_eq!(circle(&graph), None, "{folder}");
        let mut rooms = Graph::new();
        for (from, to) in graph.iter().filter(|(from, _)| !from.is_empty()) {
            let others = to.iter().filter(|to| to[0] != from[0]).map(|to| to[..1].to_vec());
            rooms.entry(from[..1].to_vec()).or_default().extend(others);
        }
        assert_eq!(circle(&rooms), None, "{folder}");
    }
}

#[test]
fn no_arrow_points_upward() {
    for (folder, layers) in CRATES {
        let (_, graph) = graph(&root(folder));
        let layer = |module: &[String]| {
            let room = module.first()?;
            let found = layers.iter().position(|rooms| rooms.contains(&room.as_str()));
            Some(found.unwrap_or_else(|| panic!("{room} of {folder} is in no layer of tests/architecture.rs")))
        };
        let upward: Vec<String> = graph
            .iter()
            .flat_map(|(from, to)| to.iter().map(move |to| (from, to)))
            .filter(|(from, to)| layer(from) > layer(to) && !from.is_empty())
            .map(|(from, to)| format!("{} -> {}", text(from), text(to)))
            .collect();
        assert_eq!(upward, [""; 0], "{folder}");
    }
}

/// Files of product code below a folder: not those of tests, nor what is generated or built.
fn product_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        if file.is_dir() {
            // A folder with a dot is git's or a tool's; packages' examples are programs to read, and qa has no product code.
            let other = ["target", "tests", "examples", "qa"].contains(&name.as_str()) || name.starts_with('.');
            if !other {
                product_files(&file, found);
            }
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            found.push(file);
        }
    }
}

#[test]
fn no_file_is_too_long() {
    let mut files = Vec::new();
    product_files(&root(""), &mut files);
    for part in ["src/lib.rs", "host/src/lib.rs", "abi/tensor/src/store.rs", "cli/src/main.rs", "rust/src/lib.rs"] {
        assert!(files.contains(&root(part)), "{part} is looked at");
    }
    for file in files {
        let source = std::fs::read_to_string(&file).unwrap();
        if source.lines().next().is_some_and(|first| first.contains("enerated by ")) {
            continue;
        }
        let product = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let product = product.split("#[cfg(test)]\npub(crate) mod tests {").next().unwrap();
        let lines = product.lines().count();
        assert!(lines <= MOST_LINES, "{} has {lines} lines without its tests", file.display());
    }
}

#[test]
fn every_module_is_on_the_map() {
    let map = std::fs::read_to_string(root("src/lib.rs")).unwrap();
    let map: Vec<&str> = map.lines().filter(|line| line.starts_with("//! | ")).collect();
    let (files, _) = graph(&root("src"));
    let rooms: BTreeSet<&String> = files.keys().filter_map(|module| module.first()).collect();
    let missing: Vec<_> = rooms
        .iter()
        .filter(|room| {
            let name = format!("`{room}`");
            !map.iter().any(|line| line.split('|').nth(1).is_some_and(|cell| cell.contains(&name)))
        })
        .collect();
    assert!(missing.is_empty(), "{missing:?}: modules that the table of src/lib.rs does not have");
}

#[test]
fn circles_are_seen() {
    let arrows = |pairs: &[(&str, &str)]| {
        let name = |name: &str| vec![name.to_owned()];
        let mut graph = Graph::new();
        for (from, to) in pairs {
            graph.entry(name(from)).or_default().insert(name(to));
            graph.entry(name(to)).or_default();
        }
        graph
    };
    assert_eq!(circle(&arrows(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    assert_eq!(circle(&arrows(&[("a", "b"), ("b", "c"), ("c", "b")])).unwrap(), ["b", "c"]);
}

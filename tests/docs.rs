//! The documents that repeat what the code says, compared with it.

use nvte_ep_core::env::VARIABLES;

fn read(path: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn every_variable_is_documented_as_the_code_has_it() {
    let text = read("docs/environment.md");
    let table = text.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let documented: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
    let expected: Vec<String> =
        VARIABLES.iter().map(|v| format!("| `{}` | {} | {} |", v.name, v.default, v.meaning)).collect();
    assert_eq!(documented, expected);
}

#[test]
fn the_readme_shows_the_compiled_example() {
    shows("README.md", "examples/forward_backward.cc", "cpp", "  ");
}

#[test]
fn the_rust_page_shows_the_compiled_example() {
    shows("docs/rust.md", "rust/examples/step.rs", "rust", "    ");
}

fn shows(page: &str, example: &str, language: &str, indent: &str) {
    let example = read(example);
    let step = example.split(&format!("{indent}// [step]\n")).nth(1).expect("the example marks its step");
    let step: String = step.lines().map(|line| format!("{}\n", line.strip_prefix(indent).unwrap_or(line))).collect();
    assert!(read(page).contains(&format!("```{language}\n{step}```")), "{page} does not show this:\n{step}");
}

/// The names in backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// The C++ sources of the tests, one after the other.
fn cpp_tests() -> String {
    fn gather(folder: &std::path::Path, text: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                gather(&path, text);
            } else if path.extension().is_some_and(|extension| extension == "cc") {
                text.push_str(&std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut text = String::new();
    gather(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests_cpp"), &mut text);
    text
}

/// Whether the test that a document names is there.
fn exists(name: &str, cpp: &str) -> bool {
    let has = |file: &str, text: String| read(file).contains(&text);
    if let Some(order) = name.strip_prefix("test_teardown ") {
        return has("tests_cpp/test_teardown.cc", format!("{{\"{order}\", "));
    }
    if let Some(case) = name.strip_prefix("interpreter.py ") {
        return has("tests_cpp/interpreter.py", format!("\ndef {case}(run):"));
    }
    if let Some((file, function)) = name.split_once("::") {
        return has(file, format!("fn {function}("));
    }
    if name.contains('/') {
        return std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name).is_file();
    }
    let Some((suite, test)) = name.split_once('.') else { return false };
    ["TEST", "TEST_F", "TEST_P", "TYPED_TEST"]
        .iter()
        .any(|kind| cpp.lines().any(|line| line.starts_with(&format!("{kind}({suite}, {test})"))))
}

#[test]
fn every_field_case_has_its_tests_or_a_reason() {
    let text = read("docs/field_cases.md");
    let (_, after) = text.split_once("\nNumbers: ").expect("the document lists the numbers");
    let (list, _) = after.split_once("\n\n").expect("an empty line ends the list");
    let mut numbers: Vec<&str> = list.split([',', '\n']).map(str::trim).filter(|number| !number.is_empty()).collect();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| ["| A", "| H", "| K"].iter().any(|start| line.starts_with(start)))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let mut documented: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    numbers.sort_unstable();
    documented.sort_unstable();
    assert_eq!(documented, numbers, "one row for each number");

    let cpp = cpp_tests();
    for row in &rows {
        let (number, last) = (row[0], row[row.len() - 1]);
        let reason = last.starts_with("none: ");
        assert_eq!(row.len(), 4, "{number}: case, kind, here, tests or why there are none");
        let named = quoted(last);
        // A reason may name tests, and commands.
        assert!(reason || !named.is_empty(), "{number} names no test");
        for name in named.iter().filter(|name| !(reason && name.contains(' '))) {
            assert!(exists(name, &cpp), "{number}: there is no test {name}");
        }
    }
}

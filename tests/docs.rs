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
    let example = read("examples/step.cc");
    let step = example.split("  // [step]\n").nth(1).expect("the example marks its step");
    let step: String = step.lines().map(|line| format!("{}\n", line.strip_prefix("  ").unwrap_or(line))).collect();
    assert!(read("README.md").contains(&format!("```cpp\n{step}```")), "README.md does not show this:\n{step}");
}

//! The code of a text: docs/errors.md gives each a number, by which users find it there.
#![forbid(unsafe_code)]

/// Number and the fixed parts of each text, which build.rs read from docs/errors.md.
const CODES: &[(u16, &[&str])] = include!(concat!(env!("OUT_DIR"), "/error_codes.rs"));

/// Fewer letters than these are in many texts.
const LEAST: usize = 8;

/// The number of the entry that says most of `text`: of a text that quotes another rank's, or ends with a remedy that has an
/// entry of its own, the more special one.
#[must_use]
pub fn code_of(text: &str) -> Option<u16> {
    let mut best = None;
    for (number, parts) in CODES {
        let letters: usize = parts.iter().map(|part| part.len()).sum();
        let may_be = (LEAST..=text.len()).contains(&letters);
        if may_be && best.is_none_or(|(most, _)| letters > most) && has_in_order(text, parts) {
            best = Some((letters, *number));
        }
    }
    best.map(|(_, number)| number)
}

fn has_in_order(text: &str, parts: &[&str]) -> bool {
    let mut rest = text;
    parts.iter().all(|part| {
        let found = rest.find(part);
        rest = found.map_or("", |at| &rest[at + part.len()..]);
        found.is_some()
    })
}

/// `text` with its code behind it.
#[must_use]
pub fn with_code(mut text: String) -> String {
    if let Some(number) = code_of(&text) {
        text.push_str(&format!(" [NVTE-EP-{number}]"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_documented_text_has_its_own_code() {
        let wrong: Vec<_> = CODES
            .iter()
            // As it is filled in, behind the name of a function.
            .map(|(number, parts)| (number, format!("nvte_ep_test: 7{}7", parts.join("7"))))
            .filter(|(number, text)| code_of(text) != Some(**number))
            .map(|(number, text)| format!("{number}: {text} has {:?}", code_of(&text)))
            .collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert!(CODES.len() > 190);
    }

    #[test]
    fn the_more_special_text_counts() {
        let text = "nvte_ep_initialize: rank 1 cannot take part: ep_comm must be on the calling thread's current device, 0, got \
                    a communicator on device 2; call cudaSetDevice first";
        assert_eq!(with_code(text.into()), format!("{text} [NVTE-EP-203]"));
        assert_eq!(with_code("something else".into()), "something else");
    }
}

//! Whose call an NCCL EP function serves: a library over NCCL EP says which of its functions and arguments NCCL EP's stand
//! for, and reports name those.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// The names that a caller gave: its function, and of arguments NCCL EP's name and its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    function: String,
    arguments: Vec<(String, String)>,
}

thread_local! {
    // Without a destructor: programs shut groups down at exit, when those of the main thread have run.
    static CALLER: ManuallyDrop<RefCell<Option<Arc<Caller>>>> = const { ManuallyDrop::new(RefCell::new(None)) };
}

/// For whom the calling thread works.
pub fn current() -> Option<Arc<Caller>> {
    CALLER.with(|caller| caller.borrow().clone())
}

/// Whether the calling thread's call is of a forward pass; without a caller it is what `direction` says.
pub fn is_forward(direction: bool) -> bool {
    CALLER.with(|caller| caller.borrow().as_ref().map_or(direction, |caller| !caller.is_backward()))
}

/// The calling thread works for `caller` from now on; gives for whom it did.
pub fn replace(caller: Option<Arc<Caller>>) -> Option<Arc<Caller>> {
    CALLER.with(|own| own.replace(caller))
}

/// Part of a text that may be a name.
fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '_' | '.')
}

impl Caller {
    /// Reads `FUNCTION NAME=OWN NAME=OWN ...`.
    pub fn parse(names: &str) -> Option<Self> {
        let mut words = names.split_ascii_whitespace();
        let function = words.next()?.to_owned();
        let pair = |word: &str| word.split_once('=').map(|(theirs, own)| (theirs.to_owned(), own.to_owned()));
        Some(Self { function, arguments: words.filter_map(pair).collect() })
    }

    /// Whether it computes gradients, as the functions whose names end in `_bwd` do. NCCL EP's pass direction says less: it
    /// goes by the routing weights, and a forward pass may have none.
    fn is_backward(&self) -> bool {
        self.function.ends_with("_bwd")
    }

    /// `text`, of a breach in `call`, in the caller's names; and NCCL EP's that were replaced.
    pub fn translate(&self, call: &str, text: &str) -> (String, Option<String>) {
        let (mut translated, mut replaced): (String, Vec<&str>) = (String::new(), Vec::new());
        let mut rest = text;
        while let Some(start) = rest.find(is_of_name) {
            let (between, from) = rest.split_at(start);
            let end = from.find(|letter| !is_of_name(letter)).unwrap_or(from.len());
            // The full stop of a sentence is not of the name.
            let (word, behind) = from.split_at(from[..end].trim_end_matches('.').len().max(1));
            let own = match self.arguments.iter().find(|(theirs, _)| theirs == word) {
                Some((_, own)) => Some(own),
                // Other mentions may be about what another rank called.
                None if word.starts_with("ncclEp") && behind.starts_with(':') => Some(&self.function),
                None => None,
            };
            translated.push_str(between);
            translated.push_str(own.map_or(word, String::as_str));
            if own.is_some() && !replaced.contains(&word) {
                replaced.push(word);
            }
            rest = behind;
        }
        translated.push_str(rest);
        if !call.is_empty() && !text.starts_with(call) {
            replaced.insert(0, call);
            translated.insert_str(0, &format!("{}: ", self.function));
        }
        (translated, (!replaced.is_empty()).then(|| replaced.join(": ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_in_the_callers_names() {
        let caller = Caller::parse("nvte_ep_combine inputs.tokens=expert_out outputs.tokens=result").unwrap();
        let (text, of_nccl) =
            caller.translate("", "ncclEpCombine: inputs.tokens: row 3 is read, but nobody has written it");
        assert_eq!(text, "nvte_ep_combine: expert_out: row 3 is read, but nobody has written it");
        assert_eq!(of_nccl.unwrap(), "ncclEpCombine: inputs.tokens");
        let (text, _) = caller.translate("ncclEpCombine", "ncclEpCombine: inputs.tokens lies on outputs.tokens.");
        assert_eq!(text, "nvte_ep_combine: expert_out lies on result.");
        let (text, of_nccl) = caller.translate("ncclEpCombine", "stream 0x10: the operation before is on 0x20");
        assert_eq!(text, "nvte_ep_combine: stream 0x10: the operation before is on 0x20");
        assert_eq!(of_nccl.unwrap(), "ncclEpCombine");
        // What another rank called is not of this caller.
        let ranks = "EP group: rank 0 entered ncclEpCombine(hidden=4), rank 1 entered ncclEpDispatch(hidden=4)";
        assert_eq!(caller.translate("", ranks), (ranks.to_owned(), None));
        let other = caller.translate("", "ncclEpCombine: my_inputs.tokens.x is 1. é");
        assert_eq!(other.0, "nvte_ep_combine: my_inputs.tokens.x is 1. é");
        assert_eq!(Caller::parse(" "), None);
    }
}

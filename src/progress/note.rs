//! What a rank says of itself to the others: its state and, in words, why it refused a call or gave up. One thread at a time
//! writes a note, in the memory of all processes; any number of them read it meanwhile. Nobody waits: a sequence number,
//! odd while a note is written, tells the reader that what it read is of two notes, and it reads again.
#![forbid(unsafe_code)]

use crate::atomic::{AtomicU64, Ordering, TRIES, fence, pause};

/// A word of the note; the text follows.
const SEQUENCE: usize = 0;
const STATE: usize = 1;
const REFUSED: usize = 2;
const TEXT_BYTES: usize = 3;
pub(crate) const TEXT: usize = 4;

/// The state of a rank that waits no longer. It is the last one: nothing is written over it.
pub(crate) const GAVE_UP: u64 = 3;

/// One rank's note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    /// 0 = the rank has not come yet.
    pub(crate) state: u64,
    /// The number that the refused call would have had.
    pub(crate) refused: u64,
    pub(crate) text: String,
}

/// The state alone, which is never torn.
pub(crate) fn state(words: &[AtomicU64]) -> u64 {
    words[STATE].load(Ordering::Acquire)
}

/// Writes a note. The caller is the only writer while this runs.
pub(crate) fn write(words: &[AtomicU64], state: u64, refused: u64, text: &str) {
    if words[STATE].load(Ordering::Relaxed) == GAVE_UP {
        return;
    }
    let room = 8 * (words.len() - TEXT);
    let end = (0..=room.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    let sequence = words[SEQUENCE].load(Ordering::Relaxed);
    words[SEQUENCE].store(sequence.wrapping_add(1), Ordering::Relaxed);
    // Who reads a word of this note reads the odd number behind it.
    fence(Ordering::Release);
    for (slot, bytes) in words[TEXT..].iter().zip(text.as_bytes()[..end].chunks(8)) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        slot.store(u64::from_le_bytes(word), Ordering::Relaxed);
    }
    words[TEXT_BYTES].store(end as u64, Ordering::Relaxed);
    words[REFUSED].store(refused, Ordering::Relaxed);
    words[STATE].store(state, Ordering::Release);
    words[SEQUENCE].store(sequence.wrapping_add(2), Ordering::Release);
}

/// Reads a note. The text stays empty where its writer was at work at each try, as one that was killed or stopped is.
pub(crate) fn read(words: &[AtomicU64]) -> Note {
    for _ in 0..TRIES {
        let before = words[SEQUENCE].load(Ordering::Acquire);
        if before.is_multiple_of(2) {
            let [state, refused, bytes] =
                [STATE, REFUSED, TEXT_BYTES].map(|index| words[index].load(Ordering::Relaxed));
            let room = 8 * (words.len() - TEXT);
            let text = words[TEXT..].iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
            let text: Vec<u8> = text.take(room.min(bytes as usize)).collect();
            // The words above are read before the number is read again.
            fence(Ordering::Acquire);
            if words[SEQUENCE].load(Ordering::Relaxed) == before {
                return Note { state, refused, text: String::from_utf8_lossy(&text).into_owned() };
            }
        }
        pause();
    }
    Note { state: state(words), refused: 0, text: String::new() }
}
